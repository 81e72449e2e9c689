"""What contradicts itself in the detector's state is named."""

import pytest
from helpers.detector import scene_of
from unicron_detector.state import Lost


@pytest.fixture
def scene():
    scene = scene_of("n1", "n2", w1="n1", w2="n2")
    scene.disconnect("n1")
    return scene


def up_and_lost(state):
    state.lost["n2"] = Lost(at=state.now)


def ahead(state):
    state.workers["w2"].epoch += 9


def another_s_timer(state):
    state.nodes["n1"].suspect = state.nodes["n1"].suspect.replace("n1", "n2")


def timer_to_come(state):
    state.timers = 0


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (up_and_lost, "n2 is up, and given up"),
        (lambda state: state.workers.pop("w2"), "the books on workers"),
        (lambda state: state.nodes.pop("n2"), "w2: it is watched on n2, which is not up"),
        (lambda state: state.tasks.clear(), "which is not known"),
        (ahead, "w2: it is in epoch 9"),
        (another_s_timer, "ends the grace of n1"),
        (timer_to_come, "ends the grace of n1"),
    ],
)
def test_what_contradicts_itself_is_named(scene, plant, words):
    assert scene.detector.validate() == []
    plant(scene.detector.state)
    assert any(words in problem for problem in scene.detector.validate()), scene.detector.validate()
