"""Nodes that join shortly after one another are planned for together; who loses something never waits."""

import msgspec
from helpers.planner import admitted, cluster, feed, lost, nodes, sizes, state, submitted
from unicron_planner.core import ADMISSIONS, PlannerCore
from unicron_planner.state import PlannerState

from unicron.contracts.base import TimerFired
from unicron.contracts.events import NodeDrained, NodeGone, PlanDecided

WIDE = submitted("a", most=40, throughput={})
FIRED = TimerFired(name=ADMISSIONS.name)


def joining(planner, *names):
    """Let nodes join without a moment passing; return what the planner says."""
    return [message for name in names for message in planner.handle(admitted(name))]


def plans(messages):
    return [message.plan for message in messages if isinstance(message, PlanDecided)]


def test_a_burst_of_nodes_makes_one_plan():
    planner = cluster(WIDE)
    assert joining(planner, "n4", "n5", "n6", "n7", "n8") == [ADMISSIONS]
    assert planner.state.plan.workers == 6
    (plan,) = plans(planner.handle(FIRED))
    assert (plan.trigger, plan.workers) == ("node_joined:n4,n5,n6,n7 and 1 more", 16)
    assert sizes(plan) == {"a": 16}
    assert plans(planner.handle(FIRED)) == []
    assert joining(planner, "n9") == [ADMISSIONS], "the next burst waits anew"


def test_one_node_that_joins_is_still_answered_from_the_table():
    planner = cluster(WIDE)
    joining(planner, "n4")
    planner.handle(TimerFired(name="refresh"))  # a table that knew of the node would lack what it brings
    (plan,) = plans(planner.handle(FIRED))
    assert (plan.prepared, sizes(plan)) == (True, {"a": 8})


def test_a_lost_node_is_answered_at_once_with_all_that_joined_meanwhile():
    planner = cluster(WIDE)
    joining(planner, "n4", "n5")
    (plan,) = plans(planner.handle(lost("n1")))
    assert (plan.trigger, plan.workers, sizes(plan)) == ("node_lost:n1", 8, {"a": 8})
    assert plans(planner.handle(FIRED)) == []


def test_a_node_that_goes_again_before_it_was_planned_for_gets_no_worker():
    planner = cluster(WIDE)
    for gone in (lost, lambda node: NodeGone(node=node), lambda node: NodeDrained(node=node)):
        joining(planner, "n4", "n5")
        out = [*planner.handle(gone("n4")), *planner.handle(FIRED)]
        assert "n4" not in nodes(planner.state.plan, "a")
        assert "n5" in nodes(planner.state.plan, "a")
        assert plans(out)
        feed(planner, lost("n5"), NodeDrained(node="n4", drain=False), lost("n4"))


def test_a_node_in_use_that_has_other_slots_now_is_planned_for_at_once():
    planner = cluster(WIDE)
    (plan,) = plans(planner.handle(admitted("n2", slots=1)))
    assert (plan.trigger, plan.workers) == ("node_joined:n2", 5)


def test_nodes_that_wait_are_not_forgotten_over_a_restart():
    planner = cluster(WIDE)
    joining(planner, "n4", "n5")
    again = PlannerCore(msgspec.msgpack.decode(state(planner), type=PlannerState))
    assert joining(again, "n6") == [], "the shell has kept the timer"
    (plan,) = plans(again.handle(FIRED))
    assert (plan.trigger, sizes(plan)) == ("node_joined:n4,n5,n6", {"a": 12})
