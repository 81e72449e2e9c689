"""Messages and clusters that the planner's tests share."""

import msgspec
from unicron_planner.core import PlannerCore
from unicron_planner.lookup import LookupRow

from unicron.contracts.base import Message, TimerFired
from unicron.contracts.events import (
    FailureDetected,
    IterationFinished,
    NodeAdmitted,
    PlanDecided,
    TaskStateChanged,
    TaskSubmitted,
)
from unicron.contracts.failures import Severity
from unicron.contracts.plans import Plan
from unicron.contracts.queries import GetPlan
from unicron.contracts.tasks import Slot, SlotRef, TaskSpec, TaskState

CONCAVE = {1: 1.0e9, 2: 1.8e9, 3: 2.4e9, 4: 2.7e9}
FIRST = SlotRef(node="n1", slot=0)
STEEPER = CONCAVE | {4: 2.8e9}


def spec(name, weight=1.0, least=1, most=4, unit=1, throughput=CONCAVE, flops=1.0):
    sizes = {"min_workers": least, "max_workers": most, "unit": unit}
    speed = {"throughput": throughput, "flops_per_iteration": flops}
    return TaskSpec(name=name, command=["python", "train.py"], weight=weight, **sizes, **speed)


def refs(*texts):
    return [SlotRef(node=text.split(":")[0], slot=int(text.split(":")[1])) for text in texts]


def grouped(slots, width):
    """Return slots in groups of so many, in their order."""
    return [slots[first : first + width] for first in range(0, len(slots), width)]


def inside(group):
    return len({slot.node for slot in group}) == 1


def admitted(node, slots=2, incarnation="1", **fields):
    there = [Slot(index=index) for index in range(slots)]
    return NodeAdmitted(node=node, incarnation=incarnation, host="127.0.0.1", slots=there, **fields)


def submitted(name, **fields):
    return TaskSubmitted(task=name, spec=spec(name, **fields))


def lost(node, **fields):
    return FailureDetected(severity=Severity.SEV1, method="node_health", status="lost_connection", node=node, **fields)


def ended(task, state=TaskState.FINISHED):
    return TaskStateChanged(task=task, state=state)


def iteration(task, workers, seconds, epoch=0, number=0, slot=FIRST):
    place = {"node": slot.node, "slot": slot.slot, "task": task, "worker": "w"}
    told = {"epoch": epoch, "iteration": number, "world_size": workers, "seconds": seconds, "loss": 1.0}
    return IterationFinished(**place, **told)


def measure(planner, task, workers, seconds, count=25, epoch=0):
    """Let a task finish `count` iterations that count, after one that doesn't."""
    slot = planner._held.slots_of(task)[0]
    for number in range(count + 1):
        feed(planner, iteration(task, workers, seconds, epoch, number, slot))


def feed(planner: PlannerCore, *messages: Message, prepared=True) -> list[Plan]:
    """Feed messages in and let the timers fire, as the shell does; return the plans that came out, whole.

    Without `prepared`, the lookup table is thrown away before each.
    """
    plans = []
    for message in messages:
        before = planner.state.plan
        if not prepared:
            planner._table, planner._situation = {}, None
        for found in planner.handle(message):
            if isinstance(found, PlanDecided):
                plans.append(found.plan.whole(before))
                assert plans[-1] == planner.state.plan
            else:
                plans += feed(planner, TimerFired(name=found.name), prepared=prepared)
    return plans


def cluster(*more: Message, nodes=3) -> PlannerCore:
    """Return a planner that knows `nodes` nodes of two slots and has heard `more`."""
    planner = PlannerCore()
    feed(planner, *(admitted(f"n{number}") for number in range(1, nodes + 1)), *more)
    return planner


def sizes(plan: Plan) -> dict[str, int]:
    return {share.task: len(share.slots) for share in plan.shares}


def nodes(plan: Plan, task: str) -> list[str]:
    return sorted(slot.node for share in plan.shares if share.task == task for slot in share.slots)


def slots(plan: Plan) -> dict[str, list[str]]:
    return {share.task: sorted(map(str, share.slots)) for share in plan.shares}


def reasons(plan: Plan) -> dict[str, str]:
    return {share.task: share.reason for share in plan.shares if share.reason}


def table(planner: PlannerCore) -> dict[str, LookupRow]:
    """Return the rows that are ready by the name of each event; nodes that are alike share one."""
    reply, out = planner.answer(GetPlan())
    assert not out
    rows = {}
    assert len(reply.plan.table) == len(planner._table)
    for row in planner._table.values():
        kind, whom = row.trigger
        names = [f"{kind}:{name}" for each in whom for name in each.named]
        rows.update(dict.fromkeys(names or [str(kind)], row))
    return rows


def state(planner: PlannerCore) -> bytes:
    return msgspec.msgpack.encode(planner.state)


TWO = (submitted("a", throughput=STEEPER), submitted("b", weight=2.0, throughput=STEEPER))
