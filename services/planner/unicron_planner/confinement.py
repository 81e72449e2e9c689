"""Tasks that are to have each tensor-parallel group in one NVLink domain, or not at all. Pure.

How many of their groups the domains have room for depends on where the others are, so it is seen when slots are given:
a task that found too little room is limited to what it found, and the workers are shared out anew.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from unicron.contracts.plans import Plan
from unicron.contracts.tasks import TaskSpec
from unicron_planner.holdings import PlannedSlots, Slots
from unicron_planner.lookup import Event, LookupRow, Situation, answer
from unicron_planner.neighbours import Neighbours
from unicron_planner.placement import tensor_groups
from unicron_planner.plans import Limits, confined, group_shape, make_plan


class Planned(NamedTuple):
    """A plan.

    Attributes:
        given: the situation that it was made from.
        event: that it answers, in that situation.
        row: that it carries out.
        anew: whether the workers had to be shared out anew, as a confined task found too little room.
    """

    plan: Plan
    given: Situation
    event: Event
    row: LookupRow
    anew: bool = False


def planned(
    event: Event,
    row: LookupRow,
    given: Situation,
    situate: Callable[[], Situation],
    number: int,
    tasks: Mapping[str, TaskSpec],
    held: PlannedSlots,
    usable: Slots,
    near: Neighbours,
) -> Planned:
    """Return the plan that answers an event; no confined task has a group in two domains in it.

    Args:
        event: what it answers.
        row: how many workers each task is to get, if that can be.
        given: what the row was made from.
        situate: returns the cluster as it is, without a task that the event ends.
        number: of the plan.
        tasks: in order of submission.
        held: which slots each task has now.
        usable: slots that may be used, by node.
        near: which nodes are near to one another.
    """
    made = Planned(make_plan(event, row, number, tasks, held, usable, given, near), given, event, row)
    limits = Limits()
    while crossing := _limits(made, tasks, near):
        if not limits:
            lost = {task: count for task, count in event.lost.items() if task in tasks}
            given, event = situate(), replace(event, lost=lost, ended="")
        limits |= crossing
        given = _limited(given, crossing)
        row = answer(given, event)
        plan = make_plan(event, row, number, tasks, held, usable, given, near, limits)
        made = Planned(plan, given, event, row, anew=True)
    return made


def _limits(made: Planned, tasks: Mapping[str, TaskSpec], near: Neighbours) -> Limits:
    """Return how many workers those tasks can have that have groups in two domains: what their other groups have."""
    limits, names = Limits(), confined(tasks, near)
    for share in made.plan.shares if names else ():
        if share.task in names and share.slots:
            shape = group_shape(tasks[share.task], made.given.tasks[share.task], len(share.slots))
            groups = tensor_groups(share.slots, shape)
            whole = [group for group in groups if not near.cross(group)]
            if len(whole) < len(groups):
                limits[share.task] = sum(map(len, whole))
    return limits


def _limited(given: Situation, limits: Limits) -> Situation:
    """Return the situation without the sizes of tasks that are beyond their limits."""
    tasks = dict(given.tasks)
    for name, most in limits.items():
        tasks[name] = tasks[name].only(tasks[name].sizes <= most)
    return replace(given, tasks=tasks)
