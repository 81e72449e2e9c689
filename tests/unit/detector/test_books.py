"""What the detector remembers of workers and nodes is found without a walk through all of them."""

import pytest
from helpers.detector import brief, scene_of
from helpers.unwalked import Unwalked
from unicron_detector.books import Books

from unicron.contracts.base import TimerFired
from unicron.contracts.events import NodeAdmitted, TaskStateChanged
from unicron.contracts.tasks import TaskState, WorkerStatus


@pytest.fixture
def scene():
    scene = scene_of("n1", "n2", "n3", w1="n1", w2="n2", w3="n3")
    scene.run(task="other", o1="n1", o2="n2")
    scene.detector.state.workers = Unwalked(scene.detector.state.workers)
    scene.detector.state.nodes = Unwalked(scene.detector.state.nodes)
    return scene


def fire(scene):
    """Fire what is due, but for the tick."""
    name = next(name for name in scene.timers if name != "tick")
    del scene.timers[name]
    return scene.feed(TimerFired(name=name, at=scene.now))


def test_the_end_of_a_worker(scene):
    assert brief(scene.exit("w1", signal=9)) == [(2, "exited_abnormally", "w1")]


def test_a_broken_collective_beside_a_suspect_node(scene):
    scene.disconnect("n1")
    assert brief(scene.collective("w2")) == [(1, "lost_connection", "n1")]
    assert scene.detector.state.tasks["other"].failed_epoch == 0, "it had a worker there"


def test_a_node_that_does_not_come_back(scene):
    scene.disconnect("n1")
    assert brief(fire(scene)) == [(1, "lost_connection", "n1")]
    assert scene.exit("w1", signal=9) == []


def test_a_node_that_comes_back_without_a_worker(scene):
    alive = [WorkerStatus(worker="w1", task="gpt", slot=0)]
    back = NodeAdmitted(node="n1", incarnation="b", host="h", slots=[], workers=alive)
    assert brief(scene.feed(back)) == [(2, "exited_abnormally", "o1")]


def test_a_task_that_ends(scene):
    scene.feed(TaskStateChanged(task="gpt", state=TaskState.FINISHED))
    assert scene.exit("w1", signal=9) == []
    assert brief(scene.exit("o1", signal=9)) == [(2, "exited_abnormally", "o1")]


def test_records_of_processes_that_are_gone_are_dropped_in_time_and_no_others():
    scene = scene_of("n1", "n2", w1="n1", w2="n1", w3="n2")
    scene.exit("w2", signal=9)
    scene.wait(scene.limits.window_s / 2)
    scene.exit("w1", signal=9)
    scene.wait(scene.limits.window_s / 2 + 1)
    assert list(scene.detector.state.workers) == ["w1", "w3"]
    assert Books(scene.detector.state).watched_on("n1") == []
    assert Books(scene.detector.state).watched_on("n2") == ["w3"]
