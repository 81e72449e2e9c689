"""Which slots can be used, and what can happen to them next. Pure functions on `state`."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations_with_replacement

from unicron.contracts.plans import Trigger, TriggerKind
from unicron.contracts.tasks import SlotRef
from unicron_planner.lookup import Event
from unicron_planner.state import PlannerState

PAIRS = 128
"""Pairs of kinds of nodes up to which every two nodes that are lost at once have their line in the table."""

MIXED = 256
"""Kinds of nodes with workers of several tasks, the most frequent, whose loss has its line in the table."""

Slots = dict[str, list[int]]


def usable(state: PlannerState, held: Mapping[str, Sequence[SlotRef]], spare_nodes: int) -> Slots:
    """Return the slots that plans may use, by node: no lost, drained or spare ones.

    As many nodes as there are lost ones come out of reserve. Spare are those with the fewest workers.
    """
    there = {name: node.slots for name, node in state.nodes.items() if node.up and name not in state.drained}
    spare = spare_nodes - sum(not node.up for node in state.nodes.values())
    if spare <= 0:
        return there
    busy = Counter(slot.node for slots in held.values() for slot in slots)
    resting = set(sorted(there, key=lambda name: (-busy[name], name))[-spare:])
    return {name: slots for name, slots in there.items() if name not in resting}


def usual_slots(state: PlannerState) -> int:
    """Return how many slots a node has as a rule, 0 without any node."""
    counts = Counter(len(node.slots) for node in state.nodes.values())
    return max(counts, key=lambda size: (counts[size], size), default=0)


def lost_with(nodes: Collection[str], held: Mapping[str, Sequence[SlotRef]]) -> dict[str, int]:
    """Return how many workers each task loses with `nodes`."""
    lost = {task: sum(slot.node in nodes for slot in slots) for task, slots in held.items()}
    return {task: count for task, count in lost.items() if count}


def next_events(
    state: PlannerState, there: Slots, held: Mapping[str, Sequence[SlotRef]], spare_nodes: int
) -> list[Event]:
    """Return all that may come next: a node or two are lost, a worker faults, one joins, a task ends or is launched."""
    workers, usual = sum(map(len, there.values())), usual_slots(state)
    lost = sum(not node.up for node in state.nodes.values())
    reserve = max(0, min(spare_nodes - lost, len(state.nodes) - lost - len(state.drained)))
    on: dict[str, Counter[str]] = {}
    for task, slots in held.items():
        for slot in slots:
            on.setdefault(slot.node, Counter())[task] += 1
    alike: dict[tuple[int, frozenset[tuple[str, int]]], list[str]] = {}
    for name, indexes in sorted(there.items()):
        alike.setdefault((len(indexes), frozenset(on.get(name, Counter()).items())), []).append(name)

    def left(lost_slots: int, nodes: int) -> int:
        """Return n' after nodes are lost; spare ones take their places."""
        return workers - lost_slots + min(nodes, reserve) * usual

    # what hits one task falls off the passes; what hits several costs a step for each task between the first and last
    mixed = sorted((kind for kind in alike if len(kind[1]) > 1), key=lambda kind: -len(alike[kind]))[MIXED:]
    kinds = [(kind, names) for kind, names in alike.items() if kind not in set(mixed)]
    lost_one = TriggerKind.NODE_LOST
    events = [Event(Trigger.of(lost_one, names), left(count, 1), dict(hit)) for (count, hit), names in kinds]
    few = len(kinds) * (len(kinds) + 1) <= 2 * PAIRS
    pairs = combinations_with_replacement(kinds, 2) if few else zip(kinds, kinds, strict=True)
    for ((one, hit), names), ((other, hits), others) in pairs:
        if names is not others or len(names) > 1:
            both = Counter(dict(hit)) + Counter(dict(hits))
            whom = [names] if names is others else [names, others]
            events.append(Event(Trigger.of(TriggerKind.TWO_NODES_LOST, *whom), left(one + other, 2), both))
    if state.nodes:
        events.append(Event(Trigger(TriggerKind.NODE_JOINED), workers + usual))
    for task in state.tasks:
        if held.get(task):
            events.append(Event(Trigger.of(TriggerKind.WORKER_FAILED, [task]), workers, {task: 1}))
            events.append(Event(Trigger.of(TriggerKind.TASK_FINISHED, [task]), workers, ended=task))
        else:
            events.append(Event(Trigger.of(TriggerKind.TASK_LAUNCHED, [task]), workers, launched=task))
    return events
