"""The registry's alerts: tasks of which nothing runs, and lines that no node of a task has seen."""

import pytest
from unicron_registry.core import RegistryCore
from unicron_registry.watchdogs import AGAIN_S, IDLE_S

from unicron.contracts import events
from unicron.contracts.base import CancelTimer, SetTimer, TimerFired
from unicron.contracts.queries import PauseTask, RemoveTask, SubmitTask
from unicron.contracts.tasks import Member, Slot, TaskSpec, TaskState
from unicron.contracts.watchdogs import AlertKind, LogPattern

LOSS = LogPattern(pattern="loss", absent_for_s=60.0)
SIZES = {"min_workers": 2, "max_workers": 4, "microbatches": 8, "iterations": 10}
IDLE = SetTimer(name="idle:gpt", after_s=IDLE_S)


class Registry:
    """A registry with a task, and nodes of two slots."""

    def __init__(self, *nodes, names=("gpt",)):
        self.core = RegistryCore()
        for node in nodes:
            where = {"rendezvous": "10.0.0.1:7", "state_server": "10.0.0.1:8"}
            slots = [Slot(index=0), Slot(index=1)]
            self.core.handle(
                events.NodeJoined(
                    node=node, source=node, at=1.0, incarnation="a", host="10.0.0.1", slots=slots, **where
                )
            )
        for name in names:
            spec = TaskSpec(name=name, command=["x"], watch_log=[LOSS], **SIZES)
            _, self.facts = self.core.answer(SubmitTask(spec=spec))

    def change(self, state, *nodes, task="gpt", **fields):
        members = [Member(worker=f"{task}-{slot}", node=node, slot=slot) for slot, node in enumerate(nodes)]
        return self.core.handle(events.TaskStateChanged(task=task, state=state, members=members, **fields))

    def look(self):
        """Have the timer end; return what is told, and the seconds until it is looked again."""
        *alerts, timer = self.core.handle(TimerFired(name="idle:gpt"))
        assert all(alert.kind is AlertKind.TASK_IDLE and alert.task == "gpt" for alert in alerts)
        return [alert.text.partition("more: ")[2] for alert in alerts], timer.after_s

    def missed(self, node, **fields):
        fact = events.PatternMissed(**{"node": node, "task": "gpt", "pattern": "loss", "limit_s": 60.0, **fields})
        return [(alert.kind, alert.text) for alert in self.core.handle(fact)]


def test_a_task_for_which_nodes_lack_is_told_of_and_again_after_long():
    registry = Registry()
    assert registry.facts[1:] == [IDLE]
    assert registry.look() == (["it needs 2 slots, and the nodes in use have 0"], AGAIN_S)


def test_a_task_that_waits_for_another_to_end_is_queued_and_not_told_of():
    registry = Registry("n1", "n2", names=("gpt", "bert"))
    registry.change(TaskState.RUNNING, "n1", task="bert")
    assert registry.look() == ([], IDLE_S)


def test_a_task_that_waits_though_there_is_room_is_told_of():
    says, _ = Registry("n1").look()
    assert says == ["it waits, though 2 slots are there: the planner has not planned for it yet"]


def test_a_task_that_is_starting_for_ever_is_told_of_with_the_reason():
    registry = Registry("n1")
    assert registry.change(TaskState.STARTING, reason="two workers build their model") == []
    assert registry.look() == (["it is starting: two workers build their model"], AGAIN_S)


def test_a_task_that_runs_ends_or_is_paused_is_not_told_of():
    registry = Registry("n1")
    registry.core.answer(PauseTask(task="gpt"))
    assert registry.look() == ([], IDLE_S)
    assert registry.change(TaskState.RUNNING, "n1") == [CancelTimer(name="idle:gpt")]
    assert registry.core.handle(TimerFired(name="idle:gpt")) == [], "it was on its way"
    assert registry.change(TaskState.RECOVERING, "n1") == [IDLE]
    assert registry.change(TaskState.RECONFIGURING, "n1") == [], "nothing has run since"
    _, facts = registry.core.answer(RemoveTask(task="gpt"))
    assert facts[1:] == [CancelTimer(name="idle:gpt")]


def test_a_line_counts_as_missed_when_all_nodes_of_the_task_miss_it():
    registry = Registry("n1", "n2")
    registry.change(TaskState.RUNNING, "n1", "n2")
    assert registry.missed("n1") == []
    assert registry.missed("n3") == [], "it has no part in the task"
    [(kind, text)] = registry.missed("n2")
    assert (kind, text) == (AlertKind.LOG, "nothing that task gpt wrote for 60 s matches 'loss'; 60 s are allowed")
    assert registry.missed("n1", missing=False) == []
    assert registry.missed("n2") == []
    assert len(registry.missed("n1")) == 1


def test_a_node_that_has_left_the_task_counts_no_more():
    registry = Registry("n1", "n2")
    registry.change(TaskState.RUNNING, "n1", "n2")
    assert registry.missed("n1") == []
    registry.change(TaskState.RUNNING, "n2", epoch=1)
    [(_, text)] = registry.missed("n2", first=True)
    assert "wrote since it started" in text


@pytest.mark.parametrize("fields", [{"task": "bert"}, {"pattern": "anything"}])
def test_what_no_task_has_asked_for_changes_nothing(fields):
    registry = Registry("n1")
    registry.change(TaskState.RUNNING, "n1")
    assert registry.missed("n1", **fields) == []
    assert registry.core.state.missed == {}
    registry.missed("n1")
    registry.change(TaskState.FAILED)
    assert registry.core.state.missed == {}
