"""A plan in a person's words: the event, the decision, its cost to each task, and its grounds."""

from collections.abc import Mapping

from unicron.contracts.answers import PlanView, Weighing
from unicron.contracts.plans import Plan, TaskShare, Trigger, TriggerKind
from unicron.contracts.queries import WhatIf
from unicron.observe.words.units import has_known_flops, percent, si, span

NO_PLAN = "no plan yet: submit a task with `unicron submit FILE`"

NAMED = 8
"""Tasks that a sentence names before it only counts them."""

TIE = 1e-9
"""Part of a reward below which a difference is none."""

_HAPPENED = {
    TriggerKind.NODE_LOST: "node {} was lost",
    TriggerKind.NODE_LEFT: "node {} left",
    TriggerKind.NODE_JOINED: "node{s} {} joined",
    TriggerKind.NODE_DRAINED: "node {} was taken out of use",
    TriggerKind.NODE_UNDRAINED: "node {} was put back into use",
    TriggerKind.TASK_SUBMITTED: "task {} was submitted",
    TriggerKind.TASK_PAUSED: "task {} was paused",
    TriggerKind.TASK_RESUMED: "task {} was resumed",
    TriggerKind.TASK_REMOVED: "task {} was removed",
    TriggerKind.TASK_FAILED: "task {} failed",
    TriggerKind.TASK_FINISHED: "task {} finished",
}
_KINDS = {
    "failure": "after it lost a worker",
    "resize": "when it is only resized",
    "relayout": "when its layout changes",
}


def explain(view: PlanView) -> list[tuple[str, str]]:
    """Return pairs of a label and a sentence in plain words about the plan in `view`."""
    plan = view.plan
    if plan is None:
        return [("plan", NO_PLAN)]
    pairs = [
        ("what happened", f"{happened(plan)}; {_count(plan.workers, 'healthy slot')} can be used"),
        ("decision", _decision(plan)),
        ("effect", _effect(plan)),
        ("taken", _taken(view, plan)),
        ("held back", _held_back(view, plan)),
        ("runner-up", _runner_up(view, plan)),
        ("waiting", _waiting(plan)),
        ("beliefs", _beliefs(view, plan)),
    ]
    return [pair for pair in pairs if pair[1]]


def happened(plan: Plan) -> str:
    """Return what a plan answers in words: "node_lost:node-3" is "node node-3 was lost"."""
    kind, groups = plan.cause
    if kind not in _HAPPENED or not groups:
        return plan.trigger
    names = [*groups[0].named, *([f"{groups[0].more} more"] if groups[0].more else [])]
    return _HAPPENED[kind].format(" and ".join(names), s="s" if len(names) > 1 else "")


_COMES = {
    TriggerKind.NODE_LOST: "{} is lost",
    TriggerKind.TWO_NODES_LOST: "{} are lost",
    TriggerKind.NODE_JOINED: "a node joins",
    TriggerKind.WORKER_FAILED: "a worker of {} fails",
    TriggerKind.TASK_LAUNCHED: "{} has to run",
    TriggerKind.TASK_FINISHED: "{} ends",
}
"""The events that may happen next, as the lookup table has them."""


def comes(trigger: Trigger) -> str:
    """Return in words what a line of the lookup table is for: of nodes that are alike it stands for any one."""
    kind, groups = trigger
    names = [" or ".join([*each.named, *([f"{each.more} more"] if each.more else [])]) for each in groups]
    if kind is TriggerKind.TWO_NODES_LOST and len(groups) == 1:
        names = [f"two of {', '.join(groups[0].named)}" + (f" and {groups[0].more} more" if groups[0].more else "")]
    return _COMES[kind].format(" and ".join(names)) if kind in _COMES else str(trigger)


def condition(query: WhatIf) -> str:
    """Return what a `WhatIf` asks about, as it follows an "if"."""
    parts = []
    if query.lose:
        parts.append(f"{' and '.join(query.lose)} {'is' if len(query.lose) == 1 else 'are'} lost")
    if query.join:
        parts.append(f"{_count(query.join, 'node')} of the usual size {'joins' if query.join == 1 else 'join'}")
    if query.finish:
        parts.append(f"{' and '.join(query.finish)} {'finishes' if len(query.finish) == 1 else 'finish'}")
    if query.submit is not None:
        parts.append(f"{query.submit.name} is submitted")
    return ", ".join(parts)


def changes(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """Return whose number of workers changes: "gpt-a 4 -> 3, gpt-b 2 -> 3"; empty where none does."""
    found = [f"{task} {before.get(task, 0)} -> {size}" for task, size in after.items() if size != before.get(task, 0)]
    more = f" and {len(found) - NAMED} tasks more" if len(found) > NAMED else ""
    return ", ".join(found[:NAMED]) + more


def _decision(plan: Plan) -> str:
    after = {share.task: len(share.slots) for share in plan.shares}
    moved = changes({share.task: share.before for share in plan.shares}, after)
    kept = [f"{share.task} keeps {len(share.slots)}" for share in plan.shares if len(share.slots) == share.before > 0]
    rest = ", ".join(kept) if len(kept) <= NAMED else f"the other {len(kept)} tasks keep theirs"
    ready = "it lay ready in the lookup table" if plan.prepared else "it was computed when it was needed"
    took = f" ({span(plan.lookup_s)})" if plan.lookup_s else ""
    return f"workers: {'; '.join(filter(None, (moved, rest))) or 'none for any task'}. {ready.capitalize()}{took}"


def _effect(plan: Plan) -> str:
    if not plan.shares:
        return ""
    if not has_known_flops(plan):
        return (
            "nothing is known of the tasks' FLOP/s, so workers were counted, times weight; "
            "give flops_per_iteration, throughput or model in the task files"
        )
    moved = sorted((share for share in plan.shares if share.waf != share.waf_before), key=_gain)
    texts = [f"{share.task} {_difference(_gain(share), share.waf_before)}" for share in moved[:NAMED]]
    if len(moved) > NAMED:
        rest = sum(map(_gain, moved[NAMED:]))
        texts.append(f"{len(moved) - NAMED} tasks more together {_difference(rest, 0.0)}")
    before = sum(share.waf_before for share in plan.shares)
    change = plan.waf - before
    sign = "a gain" if change > 0 else "a loss"
    part = f" ({percent(abs(change) / before)})" if before else ""
    total = f"in all {sign} of {si(abs(change), 'FLOP/s')}{part}" if change else "in all no change"
    total += f", {si(plan.waf, 'FLOP/s')} (weighted) expected"
    return f"{', '.join(texts) or 'no task gains or loses'}; {total}"


def _runner_up(view: PlanView, plan: Plan) -> str:
    other = view.runner_up
    if other is None:
        return ""
    behind = plan.reward - other.reward
    if abs(behind) <= TIE * abs(plan.reward):
        how = "as good; of equals the one that moves fewer workers is taken"
    else:
        part = percent(abs(behind) / (abs(plan.reward) or abs(behind)))
        what = f"{si(abs(behind), 'FLOP')} ({part})" if has_known_flops(plan) else part
        how = f"would earn {what} {'less' if behind > 0 else 'more, which is within the error,'} until the next failure"
    return f"{_instead(other.changes, plan)}: {how}"


def _taken(view: PlanView, plan: Plan) -> str:
    """Return what a plan gains that takes workers which it could have left, beside its cost and its error."""
    if view.taken is None:
        return ""
    instead = _instead(view.taken.changes, plan)
    return f"against {instead}, which leaves running tasks more, it {_weighed(view.taken, plan, 'earns')}"


def _held_back(view: PlanView, plan: Plan) -> str:
    """Return which plan was not made as too little speaks for it, with its cost and its error."""
    if view.held_back is None:
        return ""
    instead = _instead(view.held_back.changes, plan)
    return f"{instead}, which takes workers from running tasks, {_weighed(view.held_back, plan, 'would earn')}"


def _weighed(weighing: Weighing, plan: Plan, earns: str) -> str:
    gain, cost, error = (_worth(amount, plan) for amount in (weighing.gain, weighing.cost, weighing.error))
    verdict = "more" if weighing.gain > weighing.cost + weighing.error else "not more"
    return (
        f"{earns} {gain} more until the next failure: {verdict} than its cost, {cost} while tasks are reconfigured, "
        f"and the error of the estimates, {error}, together"
    )


def _worth(amount: float, plan: Plan) -> str:
    """Return weighted FLOP, also as a part of what the plan earns until the next failure."""
    whole = plan.waf * plan.running_s
    part = percent(amount / whole) if whole else ""
    return f"{si(amount, 'FLOP')} ({part})" if has_known_flops(plan) else part


def _instead(sizes: Mapping[str, int], plan: Plan) -> str:
    """Return what another plan gives instead: "gpt-a 4 (not 3)"."""
    given = {share.task: len(share.slots) for share in plan.shares}
    differs = [f"{task} {size} (not {given[task]})" for task, size in sizes.items() if size != given.get(task, size)]
    more = f" and {len(differs) - NAMED} tasks more" if len(differs) > NAMED else ""
    return ", ".join(differs[:NAMED]) + more


def _waiting(plan: Plan) -> str:
    found = [f"{share.task} {share.reason or 'has no workers'}" for share in plan.shares if not share.slots]
    more = [f"{len(found) - NAMED} tasks more"] if len(found) > NAMED else []
    return "; ".join([*found[:NAMED], *more])


def guesses(view: PlanView) -> str:
    """Return what is assumed of tasks about which nothing is known, beside those of which something is."""
    if view.plan is None or not has_known_flops(view.plan) or not view.guessed:
        return ""
    names = list(view.guessed)
    more = f" and {len(names) - NAMED} tasks more" if len(names) > NAMED else ""
    each = si(max(view.guessed.values()), "FLOP/s")
    return (
        f"nothing is known of the FLOP/s of {', '.join(names[:NAMED])}{more}: a worker there counts as {each}, "
        "the least that one brings to the others"
    )


def _beliefs(view: PlanView, plan: Plan) -> str:
    parts = []
    if view.failure_rate > 0:
        every = 1 / (view.failure_rate * max(plan.workers, 1))
        parts.append(
            f"one node failure every {span(every)} among {_count(plan.workers, 'worker')} "
            f"({view.failures} seen; {view.failure_rate * 86400:.2g} a worker and day)"
        )
    stands = [f"{span(seconds)} {_KINDS.get(kind, f'({kind})')}" for kind, seconds in view.transitions.items()]
    if stands:
        parts.append(f"a task earns nothing for {', '.join(stands)}")
    return "; ".join(filter(None, [*parts, guesses(view)]))


def _gain(share: TaskShare) -> float:
    return share.waf - share.waf_before


def _difference(gain: float, before: float) -> str:
    if not gain:
        return "neither gains nor loses"
    part = f" ({percent(abs(gain) / before)})" if before else ""
    return f"{'gains' if gain > 0 else 'loses'} {si(abs(gain), 'FLOP/s')}{part}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
