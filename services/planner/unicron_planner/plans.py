"""From an answer of the lookup table to a plan that says who runs where and why somebody waits."""

from collections.abc import Mapping, Sequence

from unicron.contracts.plans import Plan, TaskShare
from unicron.contracts.tasks import SlotRef, TaskSpec
from unicron_planner.placement import place
from unicron_planner.state import Row


def make_plan(
    row: Row,
    before: Plan | None,
    tasks: Mapping[str, TaskSpec],
    usable: Mapping[str, Sequence[int]],
    waf: Mapping[str, float],
) -> Plan:
    """Return the plan that follows `before`.

    Args:
        row: how many workers each task gets.
        before: the plan in force.
        tasks: in order of submission.
        usable: slots that may be used, by node.
        waf: F(t, x') of each task that gets workers.
    """
    held = slots_of(before)
    placed = place(usable, held, {task: row.sizes[task] for task in tasks})
    shares = [
        TaskShare(
            task=task,
            slots=placed[task],
            waf=waf.get(task, 0.0),
            before=len(held.get(task, ())),
            reason="" if placed[task] else waiting_reason(spec, tasks, row),
        )
        for task, spec in tasks.items()
    ]
    return Plan(
        number=before.number + 1 if before else 1,
        trigger=row.event,
        workers=row.workers,
        shares=shares,
        waf=sum(share.waf for share in shares),
        reward=row.reward,
        runner_up_reward=row.runner_up_reward,
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
    needs = f"needs {_count(spec.sizes[0], 'worker')}"
    if spec.sizes[0] > row.workers:
        return f"{needs}, the cluster has {_count(row.workers, 'healthy slot')}"
    used = sum(row.sizes.values())
    whole = f"all {_count(used, 'slot')}" if used == row.workers else f"{used} of {_count(row.workers, 'slot')}"
    if all(tasks[task].weight > spec.weight for task, size in row.sizes.items() if size):
        return f"{needs}; higher-weighted tasks use {whole}"
    return f"{needs}; other tasks use {whole} and achieve no less there"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
