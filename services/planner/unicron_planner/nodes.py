"""Slots that can be used, and events that can happen to them next. Pure functions on `state`."""

from collections import Counter
from itertools import combinations_with_replacement

from unicron.contracts.plans import Trigger, TriggerKind
from unicron_planner.holdings import PlannedSlots, Slots
from unicron_planner.lookup import Event
from unicron_planner.state import PlannerState

PAIRS = 128
"""Pairs of kinds of nodes up to which every two nodes that are lost at once have their line in the table."""

Kind = tuple[int, frozenset[tuple[str, int]]]
"""The effect of a node's loss: its slots, and the tasks of its workers. Nodes of one kind are alike."""


def usable(state: PlannerState, held: PlannedSlots, spare_nodes: int) -> Slots:
    """Return the slots that plans may use, by node: no lost, drained or spare ones.

    As many nodes as there are lost ones come out of reserve. Spare are those with the fewest workers.
    """
    drained = set(state.drained)
    slots_by_node = {name: node.slots for name, node in state.nodes.items() if node.up and name not in drained}
    spare = spare_nodes - sum(not node.up for node in state.nodes.values())
    if spare <= 0:
        return slots_by_node
    resting = set(sorted(slots_by_node, key=lambda name: (-len(held.on.get(name, ())), name))[-spare:])
    return {name: slots for name, slots in slots_by_node.items() if name not in resting}


def usual_slots(state: PlannerState) -> int:
    """Return how many slots a node has as a rule, 0 without any node."""
    counts = Counter(len(node.slots) for node in state.nodes.values())
    return max(counts, key=lambda size: (counts[size], size), default=0)


def next_events(
    state: PlannerState, slots_by_node: Slots, held: PlannedSlots, spare_nodes: int, mixed: int
) -> list[Event]:
    """Return all that may come next: a node or two are lost, a worker faults, one joins, a task ends or is launched.

    Args:
        state: of the planner.
        slots_by_node: slots that plans may use.
        held: which task has which.
        spare_nodes: that are kept free.
        mixed: kinds of nodes with workers of several tasks, the most frequent, whose loss has its line in the table.
    """
    workers, usual = sum(map(len, slots_by_node.values())), usual_slots(state)
    lost = sum(not node.up for node in state.nodes.values())
    reserve = max(0, min(spare_nodes - lost, len(state.nodes) - lost - len(state.drained)))

    def left(lost_slots: int, nodes: int) -> int:
        """Return n' after nodes are lost; spare ones take their places."""
        return workers - lost_slots + min(nodes, reserve) * usual

    # what hits one task falls off the passes; what hits several costs a step for each task between the first and last
    alike = _kinds(slots_by_node, held)
    rare = set(sorted((kind for kind in alike if len(kind[1]) > 1), key=lambda kind: -len(alike[kind]))[mixed:])
    kinds = [(kind, names) for kind, names in alike.items() if kind not in rare]
    lost_one = TriggerKind.NODE_LOST
    events = [Event(Trigger.of(lost_one, names), left(count, 1), dict(hit)) for (count, hit), names in kinds]
    few = len(kinds) * (len(kinds) + 1) <= 2 * PAIRS
    pairs = combinations_with_replacement(kinds, 2) if few else zip(kinds, kinds, strict=True)
    for ((one, hit), names), ((other, hits), others) in pairs:
        if names is not others or len(names) > 1:
            both = Counter(dict(hit)) + Counter(dict(hits))
            groups = [names] if names is others else [names, others]
            events.append(Event(Trigger.of(TriggerKind.TWO_NODES_LOST, *groups), left(one + other, 2), both))
    if state.nodes:
        events.append(Event(Trigger(TriggerKind.NODE_JOINED), workers + usual))
    for task in state.tasks:
        if held.slots_of(task):
            events.append(Event(Trigger.of(TriggerKind.WORKER_FAILED, [task]), workers, {task: 1}))
            events.append(Event(Trigger.of(TriggerKind.TASK_FINISHED, [task]), workers, ended=task))
        else:
            events.append(Event(Trigger.of(TriggerKind.TASK_LAUNCHED, [task]), workers, launched=task))
    return events


def _kinds(slots_by_node: Slots, held: PlannedSlots) -> dict[Kind, list[str]]:
    """Return the nodes by kind."""
    found: dict[Kind, list[str]] = {}
    known: dict[tuple[int, tuple[str, ...]], list[str]] = {}
    for name, slots in sorted(slots_by_node.items()):
        what = len(slots), tuple(held.on.get(name, {}).values())
        if what not in known:  # counting what stands on each of thousands of nodes would take most of the time
            known[what] = found.setdefault((what[0], frozenset(Counter(what[1]).items())), [])
        known[what].append(name)
    return found
