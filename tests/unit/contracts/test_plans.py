"""The wire form of a plan: the shares that have changed, and the event that it answers."""

import pytest

from unicron.contracts.answers import TableRow
from unicron.contracts.plans import Plan, TaskShare, Trigger, TriggerKind
from unicron.contracts.tasks import ParallelLayout, SlotRef


def share(task, *nodes, **fields):
    slots = [SlotRef(node=node, slot=0) for node in nodes]
    return TaskShare(task=task, slots=slots, layout=ParallelLayout(replicas=len(nodes)), **fields)


def plan(number, *shares):
    tasks = [one.task for one in shares]
    return Plan(number=number, trigger="node_lost:n1", workers=4, shares=list(shares), tasks=tasks)


FIRST = plan(1, share("a", "n1", waf=2.0), share("b", "n2", "n3", waf=3.0), share("c", reason="needs 9 workers"))


def test_a_first_plan_travels_whole():
    assert FIRST.news(None) == FIRST
    assert FIRST.whole(None) == FIRST


def test_only_what_is_new_travels_and_the_reader_has_the_whole_again():
    ready = share("c", reason="needs 8 workers")
    second = plan(2, share("b", "n2", "n3", before=2, waf=3.0, waf_before=3.0), ready, share("d", "n4"))
    news = second.news(FIRST)
    assert [one.task for one in news.shares] == ["c", "d"]
    assert news.whole(FIRST) == second


def test_a_share_that_was_kept_has_what_it_had():
    second = plan(2, share("a", "n1", before=1, waf=2.0, waf_before=2.0), share("b", "n2", before=2, waf=1.0))
    third = plan(3, *(one.kept() for one in second.shares))
    assert third.news(second).shares == []
    assert third.news(second).whole(second) == third
    assert [(one.before, one.waf_before) for one in third.shares] == [(1, 2.0), (1, 1.0)]


def test_a_plan_from_before_there_were_left_out_shares_is_whole():
    old = Plan(number=2, trigger="node_lost:n1", workers=4, shares=[share("b", "n2")])
    assert old.whole(FIRST) == old


# --- what it answers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trigger", "text"),
    [
        (Trigger(TriggerKind.NODE_JOINED), "node_joined"),
        (Trigger.of(TriggerKind.NODE_LOST, ["node-3"]), "node_lost:node-3"),
        (Trigger.of(TriggerKind.TASK_FINISHED, ["and_more"]), "task_finished:and_more"),
        (Trigger.of(TriggerKind.NODE_LOST, [f"n{number}" for number in range(7)]), "node_lost:n0,n1,n2,n3 and 3 more"),
        (Trigger.of(TriggerKind.TWO_NODES_LOST, list("abcde"), ["f", "g"]), "two_nodes_lost:a,b,c,d and 1 more+f,g"),
    ],
)
def test_a_trigger_is_read_as_it_was_written(trigger, text):
    assert str(trigger) == text
    assert Trigger.parse(text) == trigger
    assert Plan(number=1, trigger=text, workers=4).cause == trigger
    assert TableRow(event=text, workers=4, reward=0.0).trigger == trigger


def test_a_trigger_of_a_newer_planner_is_unknown_and_still_says_whom():
    assert Trigger.parse("node_moved:n1") == Trigger.of(TriggerKind.UNKNOWN, ["n1"])
