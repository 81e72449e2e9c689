"""What a plan answers: a value in the code, one text on the wire."""

import pytest

from unicron.contracts.plans import Plan, Trigger, TriggerKind
from unicron.contracts.queries import TableRow


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
