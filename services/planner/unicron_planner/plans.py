"""From an answer of the lookup table to a plan that says who runs where and why somebody waits."""

from collections.abc import Mapping, Sequence

import numpy as np

from unicron.contracts.plans import Plan, TaskShare
from unicron.contracts.tasks import SlotRef, TaskSpec
from unicron_planner import throughput
from unicron_planner.lookup import Event, Row, Situation, Standing
from unicron_planner.placement import place


def make_plan(
    event: Event,
    row: Row,
    before: Plan | None,
    tasks: Mapping[str, TaskSpec],
    usable: Mapping[str, Sequence[int]],
    situation: Situation,
) -> Plan:
    """Return the plan that follows `before`.

    Args:
        event: what it answers.
        row: how many workers each task gets.
        before: the plan in force.
        tasks: in order of submission.
        usable: slots that may be used, by node.
        situation: what the row was made from.
    """
    held = slots_of(before)
    groups = {task: _group(situation.tasks[task], row.sizes[task]) for task in tasks}
    placed = place(usable, held, {task: row.sizes[task] for task in tasks}, groups)
    shares = []
    for task, spec in tasks.items():
        standing, size = situation.tasks[task], len(placed[task])
        shares.append(
            TaskShare(
                task=task,
                slots=placed[task],
                waf=float(standing.waf[np.searchsorted(standing.sizes, size)]),
                before=len(held.get(task, ())),
                waf_before=standing.held_waf,
                reason="" if size else waiting_reason(spec, tasks, row),
            )
        )
    return Plan(
        number=before.number + 1 if before else 1,
        trigger=str(event.trigger),
        workers=row.workers,
        shares=shares,
        waf=sum(share.waf for share in shares),
        reward=row.reward,
        running_s=situation.running_s(row.workers),
        transition_s=situation.failure_s if event.lost else situation.resize_s,
    )


def slots_of(plan: Plan | None) -> dict[str, list[SlotRef]]:
    """Return the slots that `plan` gives each task."""
    return {share.task: share.slots for share in plan.shares} if plan else {}


def differs(plan: Plan, before: Plan | None) -> bool:
    """Return whether `plan` says anything new: another slot, another task, or another reason to wait."""

    def gist(given: Plan | None) -> list[tuple[str, list[SlotRef], str]]:
        return [(share.task, share.slots, share.reason) for share in given.shares] if given else []

    return gist(plan) != gist(before)


def waiting_reason(spec: TaskSpec, tasks: Mapping[str, TaskSpec], row: Row) -> str:
    """Return one line on why the task has no worker."""
    least, problem = throughput.least(spec)
    if not least:
        return problem
    needs = f"needs {_count(least, 'worker')}"
    if least > row.workers:
        return f"{needs}, the cluster has {_count(row.workers, 'healthy slot')}"
    used = sum(row.sizes.values())
    whole = f"all {_count(used, 'slot')}" if used == row.workers else f"{used} of {_count(row.workers, 'slot')}"
    if all(tasks[task].weight > spec.weight for task, size in row.sizes.items() if size):
        return f"{needs}; higher-weighted tasks use {whole}"
    return f"{needs}; other tasks use {whole} and achieve no less there"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _group(standing: Standing, size: int) -> int:
    """Return how many workers of the task belong into one node at `size`."""
    return 1 if standing.groups is None else int(standing.groups[np.searchsorted(standing.sizes, size)])
