"""From an answer of the lookup table to a plan that says who runs where and why somebody waits."""

from collections.abc import Mapping, Sequence

import numpy as np

from unicron.contracts.plans import Plan, TaskShare
from unicron.contracts.tasks import ParallelLayout, TaskSpec
from unicron_planner import throughput
from unicron_planner.estimates import FAILURE, RELAYOUT, RESIZE
from unicron_planner.holdings import PlannedSlots
from unicron_planner.lookup import Event, LookupRow, Situation, TaskStanding
from unicron_planner.neighbours import UNKNOWN, Neighbours
from unicron_planner.placement import place

Limits = dict[str, int]
"""Most workers of tasks for whose tensor-parallel groups the NVLink domains have no more room."""


def make_plan(
    event: Event,
    row: LookupRow,
    number: int,
    tasks: Mapping[str, TaskSpec],
    held: PlannedSlots,
    usable: Mapping[str, Sequence[int]],
    situation: Situation,
    near: Neighbours = UNKNOWN,
    limits: Limits | None = None,
) -> Plan:
    """Return the plan that carries out `row`.

    Args:
        event: what it answers.
        row: how many workers each task gets.
        number: of the plan.
        tasks: in order of submission.
        held: which slots each task has now.
        usable: slots that may be used, by node.
        situation: what the row was made from.
        near: which nodes are near to one another.
        limits: that the row keeps to.
    """
    shapes = {task: group_shape(spec, situation.tasks[task], row.sizes[task]) for task, spec in tasks.items()}
    sizes = {task: row.sizes[task] for task in tasks}
    placed = place(usable, held, sizes, shapes, near, confined(tasks, near))
    shares = []
    for task, spec in tasks.items():
        standing, size = situation.tasks[task], len(placed[task])
        shares.append(
            TaskShare(
                task=task,
                slots=placed[task],
                waf=standing.waf_of(size),
                before=len(held.slots_of(task)),
                waf_before=standing.held_waf,
                reason="" if size else waiting_reason(spec, tasks, row, limits or {}),
                layout=spec.shape(size),
            )
        )
    return Plan(
        number=number,
        trigger=str(event.trigger),
        workers=row.workers,
        shares=shares,
        waf=sum(share.waf for share in shares),
        reward=row.reward,
        running_s=situation.running_s(row.workers),
        transition_s=_transition_s(event, shares, tasks, situation),
        tasks=list(tasks),
    )


def confined(tasks: Mapping[str, TaskSpec], near: Neighbours) -> frozenset[str]:
    """Return the tasks whose tensor-parallel groups are to stay inside of domains, as far as any domain is known."""
    return frozenset(task for task, spec in tasks.items() if spec.within_domain) if near.domains else frozenset()


def changes_layout(spec: TaskSpec, before: int, after: int) -> bool:
    """Return whether the shape of a replica changes from `before` to `after` workers, and a state with it.

    A task that comes out of waiting, or goes into it, hands none over.
    """
    return bool(before and after) and not spec.shape(before).is_like(spec.shape(after))


def disturbance(share: TaskShare, spec: TaskSpec, event: Event) -> str:
    """Return which kind of transition a plan brings upon a task, empty where it goes on as it is."""
    if changes_layout(spec, share.before, len(share.slots)):
        return RELAYOUT
    if share.task in event.lost:
        return FAILURE
    return RESIZE if len(share.slots) != share.before else ""


def differs(plan: Plan, before: Plan | None) -> bool:
    """Return whether `plan` says anything new: another slot, another task, or another reason to wait."""
    tasks = [share.task for share in before.shares] if before else []
    return [share.task for share in plan.shares] != tasks or bool(plan.news(before).shares)


def _transition_s(
    event: Event, shares: Sequence[TaskShare], tasks: Mapping[str, TaskSpec], situation: Situation
) -> float:
    """Return the longest D_transition that was assumed for a task of the plan."""
    longest = situation.failure_s if event.lost else situation.resize_s
    if any(changes_layout(tasks[share.task], share.before, len(share.slots)) for share in shares):
        return max(longest, situation.relayout_s)
    return longest


def waiting_reason(spec: TaskSpec, tasks: Mapping[str, TaskSpec], row: LookupRow, limits: Limits) -> str:
    """Return one line on why the task has no worker."""
    least, problem = throughput.least(spec)
    if not least:
        return problem
    needs = f"needs {_count(least, 'worker')}"
    if least > row.workers:
        return f"{needs}, the cluster has {_count(row.workers, 'healthy slot')}"
    if spec.name in limits:
        room = _count(limits[spec.name], "such worker")
        return f"{needs} in tensor-parallel groups inside of one NVLink domain each; there is room for {room}"
    used = sum(row.sizes.values())
    whole = f"all {_count(used, 'slot')}" if used == row.workers else f"{used} of {_count(row.workers, 'slot')}"
    if all(tasks[task].weight > spec.weight for task, size in row.sizes.items() if size):
        return f"{needs}; higher-weighted tasks use {whole}"
    if not throughput.has_known_flops(spec, {}):
        cure = "a higher weight, throughput or model in its task file"
        return f"{needs}; other tasks use {whole}, and nothing is known of its FLOP/s: {cure} would count against them"
    return f"{needs}; other tasks use {whole} and achieve no less there"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def group_shape(spec: TaskSpec, standing: TaskStanding, size: int) -> ParallelLayout:
    """Return which workers belong together at `size`: replicas, or the tensor-parallel groups that its model needs."""
    if standing.tensor is None:
        return spec.shape(size)
    return ParallelLayout(tensor=int(standing.tensor[np.searchsorted(standing.sizes, size)]))
