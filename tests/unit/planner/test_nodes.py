"""What may come next, and for how much of it there is a line."""

from unicron_planner import nodes
from unicron_planner.holdings import Holdings
from unicron_planner.state import Node, PlannerState

from unicron.contracts.plans import TriggerKind
from unicron.contracts.tasks import SlotRef, TaskSpec


def cluster(holders):
    """Return nodes of two slots, each with workers of the two tasks named."""
    state = PlannerState(nodes={name: Node(slots=[0, 1]) for name in holders})
    held = {}
    for name, tasks in holders.items():
        for slot, task in enumerate(tasks):
            held.setdefault(task, []).append(SlotRef(node=name, slot=slot))
    state.tasks = {task: TaskSpec(name=task, command=["x"]) for task in sorted(held)}
    return state, {name: [0, 1] for name in holders}, Holdings(held)


def named(events, kind):
    return [event.trigger.names for event in events if event.trigger.kind is kind]


def test_every_kind_of_node_and_every_pair_has_a_line_where_they_are_few():
    events = nodes.next_events(*cluster({"n1": "aa", "n2": "aa", "n3": "ab"}), 0, 256)
    assert named(events, TriggerKind.NODE_LOST) == ["n1,n2", "n3"]
    assert named(events, TriggerKind.TWO_NODES_LOST) == ["n1,n2", "n1,n2+n3"]
    lost = [dict(event.lost) for event in events if event.trigger.kind is TriggerKind.TWO_NODES_LOST]
    assert lost == [{"a": 4}, {"a": 3, "b": 1}]


def test_of_many_mixed_kinds_the_most_frequent_have_a_line_and_of_pure_ones_all():
    holders = {"n1": "ab", "n2": "bc", "n3": "bc", "n4": "cd", "n5": "ee", "n6": "ff"}
    events = nodes.next_events(*cluster(holders), 0, 1)
    assert named(events, TriggerKind.NODE_LOST) == ["n2,n3", "n5", "n6"]


def test_spare_nodes_take_the_places_of_lost_ones():
    state, there, held = cluster({"n1": "aa", "n2": "aa"})
    state.nodes["spare"] = Node(slots=[0, 1])
    by_name = {str(event.trigger): event.workers for event in nodes.next_events(state, there, held, 1, 256)}
    assert (by_name["node_lost:n1,n2"], by_name["two_nodes_lost:n1,n2"]) == (4, 2)
