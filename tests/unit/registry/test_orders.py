"""What users order a task to do: pause, save, stop, go back."""

import re

import pytest
from unicron_registry.core import RegistryCore

from tests.unit.registry.test_core import refused
from unicron.contracts import events
from unicron.contracts.queries import PauseTask, RemoveTask, RewindTask, SaveTask, SubmitTask
from unicron.contracts.storage import StoredState
from unicron.contracts.tasks import Member, ParallelLayout, TaskSpec, TaskState


@pytest.fixture
def registry():
    """A running task with a storage, whose iteration 6 is done, and one without."""
    core = RegistryCore()
    for name, root in (("gpt", "/storage"), ("bare", "")):
        core.answer(SubmitTask(spec=TaskSpec(name=name, command=["t.py"], iterations=10, checkpoints=root)))
        members = [Member(worker=f"{name}-1", node="n1", slot=0)]
        core.handle(events.TaskStateChanged(task=name, state=TaskState.RUNNING, epoch=1, members=members, reason=""))
    where = {"node": "n1", "slot": 0, "worker": "gpt-1", "epoch": 1, "world_size": 1}
    core.handle(events.IterationFinished(task="gpt", iteration=6, seconds=1.0, loss=1.0, **where))
    return core


def view(registry):
    return registry.state.tasks["gpt"]


def stored(iteration):
    return events.CheckpointStored(node="n1", task="gpt", iteration=iteration, address="/storage/gpt/step", removed=[])


def test_pausing_goes_there_and_back(registry):
    reply, facts = registry.answer(PauseTask(task="gpt"))
    assert (reply.error, facts, view(registry).paused) == ("", [events.TaskPaused(task="gpt", paused=True)], True)
    assert registry.answer(PauseTask(task="gpt"))[1] == [], "it is paused already"
    _, facts = registry.answer(PauseTask(task="gpt", pause=False))
    assert (facts, view(registry).paused) == ([events.TaskPaused(task="gpt", paused=False)], False)


def test_saving_is_ordered_after_the_last_iteration_that_is_done(registry):
    _, facts = registry.answer(SaveTask(task="gpt"))
    assert facts == [events.CheckpointOrdered(task="gpt", after=6)]
    assert registry.handle(stored(7)) == []
    assert not view(registry).state.ended, "it was not to be stopped"


def test_who_stops_a_task_with_its_state_saved_has_it_removed_when_that_is_on_storage(registry):
    _, facts = registry.answer(SaveTask(task="gpt", stop=True))
    assert facts == [events.CheckpointOrdered(task="gpt", after=6)]
    assert registry.handle(stored(6)) == [], "that one was on its way before"
    assert registry.handle(stored(8)) == [events.TaskRemoved(task="gpt")]
    assert view(registry).state is TaskState.REMOVED
    assert "iteration 8 in /storage/gpt/step" in view(registry).reason


def test_a_task_that_has_gone_back_is_stopped_with_an_earlier_state_than_it_had(registry):
    found = StoredState(root="/storage", folder="step-000003", iteration=3, layout=ParallelLayout())
    registry.handle(events.CheckpointFound(node="n1", task="gpt", search=1, stored=found, skipped=[]))
    assert registry.answer(SaveTask(task="gpt", stop=True))[1] == [events.CheckpointOrdered(task="gpt", after=2)]
    assert registry.handle(stored(4)) == [events.TaskRemoved(task="gpt")]


def test_what_can_not_be_saved_is_not_stopped(registry):
    registry.answer(SaveTask(task="gpt", stop=True))
    [alert] = registry.handle(events.CheckpointFailed(node="n1", task="gpt", reason="the disk is full"))
    assert isinstance(alert, events.Alert)
    assert re.search("not stopped.*the disk is full.*unicron task stop gpt", alert.text)
    assert registry.handle(stored(8)) == [], "nor later, when nobody expects it any more"


def test_whoever_pauses_it_meanwhile_does_not_have_it_stopped(registry):
    registry.answer(SaveTask(task="gpt", stop=True))
    registry.answer(PauseTask(task="gpt"))
    assert registry.handle(stored(8)) == []


def test_going_back_is_told_with_its_iteration(registry):
    _, facts = registry.answer(RewindTask(task="gpt", iteration=4))
    assert facts == [events.TaskRewound(task="gpt", iteration=4)]


@pytest.mark.parametrize(
    ("query", "says"),
    [
        (PauseTask(task="other"), "no task 'other'; the known ones are bare, gpt"),
        (RemoveTask(task="other"), "no task 'other'; the known ones are bare, gpt"),
        (SaveTask(task="bare"), "bare has no storage"),
        (RewindTask(task="bare", iteration=1), "bare has no storage"),
        (RewindTask(task="gpt", iteration=10), "iterations 0 to 9, not 10"),
        (RewindTask(task="gpt", iteration=-1), "iterations 0 to 9, not -1"),
    ],
)
def test_what_can_not_be_done_is_refused(registry, query, says):
    refused(registry, query, says)


def test_nothing_is_ordered_of_a_task_that_does_not_run(registry):
    registry.handle(events.TaskStateChanged(task="gpt", state=TaskState.WAITING, epoch=1, members=[], reason=""))
    refused(registry, SaveTask(task="gpt"), "gpt is waiting.*wait until it runs")
    registry.handle(events.TaskStateChanged(task="gpt", state=TaskState.FINISHED, epoch=1, members=[], reason=""))
    for query in (PauseTask(task="gpt"), SaveTask(task="gpt"), RewindTask(task="gpt", iteration=1)):
        refused(registry, query, "gpt is finished")
