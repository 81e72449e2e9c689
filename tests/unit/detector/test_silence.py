"""Programs that nobody watches, none of whose ranks shows any sign of life."""

import pytest
from helpers import ROOT
from helpers.detector import DetectorHarness, brief
from unicron_agent.workers.stacks import LAUNCHER
from unicron_detector.silence import WAITS

from unicron.contracts.events import FailureDetected, TaskSubmitted, WorkerStalled
from unicron.contracts.tasks import Healing, TaskSpec

COLLECTIVE = "7 MainThread: barrier (torch/distributed/distributed_c10d.py:5356) < <module> (train.py:9)"
READS = "7 MainThread: read (train.py:3) < <module> (train.py:8) < _run_code (<frozen runpy>:88)"
NOWHERE = "7 MainThread: await_membership (channel.py:80) < run (launcher.py:110)"
HANG, GROUP = "task_hang", "all 3 workers of gpt have written nothing and waited for"


class Silent(DetectorHarness):
    """Three workers of a program, on a node each, who are silent for ten seconds at most."""

    def __init__(self, heal=Healing.RESTART):
        super().__init__()
        self.join("a", "b", "c")
        self.feed(TaskSubmitted(task="gpt", spec=TaskSpec(name="gpt", command=["x"], heal=heal)))
        self.run(**{"gpt-1": "a", "gpt-2": "b", "gpt-3": "c"})

    def silent(self, number, waited_s=10.0, where=COLLECTIVE, epoch=0, **fields):
        place, at = self.places[f"gpt-{number}"], {"epoch": epoch, "iteration": 0, "phase": "compute"}
        limits = {"waited_s": waited_s, "limit_s": 10.0, "silent": True, "responsive": True, **fields}
        return self.feed(WorkerStalled(**place, **at, **limits, stacks=[where] if where else []))

    def all_silent(self, *where, **last):
        out = []
        for number, place in enumerate(where, 1):
            out += self.silent(number, where=place, **(last if number == len(where) else {}))
        return out


def only(out):
    [failure] = [each for each in out if isinstance(each, FailureDetected)]
    return failure


def test_where_all_wait_for_one_another_all_begin_again():
    failure = only(Silent().all_silent(COLLECTIVE, COLLECTIVE, COLLECTIVE))
    assert brief([failure]) == [(3, HANG, "gpt-3")]
    at = "gpt-1 on a is at MainThread: barrier"
    assert failure.reason.startswith(f"{GROUP} 10.00 s, where 10.00 s are allowed; {at}")
    assert failure.reason.count("train.py:9") == 3


@pytest.mark.parametrize("heal", [Healing.RESTART, Healing.IN_PLACE])
def test_the_one_that_waits_for_nobody_is_to_blame(heal):
    failure = only(Silent(heal).all_silent(COLLECTIVE, READS, COLLECTIVE))
    assert brief([failure]) == [(2, HANG, "gpt-2")]
    assert failure.reason.startswith("gpt-2 is at MainThread: read (train.py:3) < <module> (train.py:8); all 3")


def test_the_one_that_is_stopped_is_to_blame_wherever_others_are():
    failure = only(Silent().all_silent(READS, READS, COLLECTIVE, responsive=False))
    assert brief([failure]) == [(2, HANG, "gpt-3")]
    assert failure.reason.startswith("gpt-3 is stopped; ")


@pytest.mark.parametrize("places", [(READS, READS, READS), (READS, COLLECTIVE, READS), ("", "", "")])
def test_where_it_can_not_be_told_all_begin_again_and_in_place_all_are_replaced(places):
    assert only(Silent().all_silent(*places)).severity == 3
    in_place = Silent(Healing.IN_PLACE)
    out = brief(in_place.all_silent(*places))
    outside = [f"gpt-{number}" for number, place in enumerate(places, 1) if place != COLLECTIVE]
    assert out == [(2, HANG, name) for name in outside]
    assert len(in_place.detector.state.tasks["gpt"].ladder.restarts) == 1, "the others are echoes"


def test_none_is_silent_alone():
    scene = Silent()
    assert scene.silent(1) + scene.silent(2) == []
    scene.wait(2.0)
    assert scene.silent(1, 12.0) + scene.silent(2, 12.0) == []


def test_it_counts_for_how_long_all_were_together():
    scene = Silent()
    scene.silent(1)
    scene.silent(2)
    scene.wait(8.0)
    assert scene.silent(3) == [], "the others may have been heard since"
    scene.wait(2.0)
    assert scene.silent(1, 20.0) == []
    assert scene.silent(2, 11.0) == [], "it was heard just before the third became silent"
    scene.wait(2.0)
    assert "waited for 11.00 s" in only(scene.silent(3, 14.0)).reason


def test_one_that_was_only_ordered_may_be_busy_and_one_that_is_gone_does_not_count():
    scene = Silent()
    scene.start("gpt-4", "a", slot=1)
    assert scene.all_silent(COLLECTIVE, COLLECTIVE, COLLECTIVE) == []
    scene.exit("gpt-4", exit_code=0, expected=True)
    scene.exit("gpt-3", exit_code=0, expected=True)
    assert only(scene.silent(1)).reason.startswith("all 2 workers")


def test_one_that_was_ordered_of_an_agent_before_this_one_is_not_waited_for():
    scene = Silent()
    scene.start("gpt-4", "a", slot=1)
    scene.join("a", incarnation="b", workers=[("gpt-1", "gpt")])
    assert only(scene.all_silent(COLLECTIVE, COLLECTIVE, COLLECTIVE)).status == HANG


def test_those_that_wait_for_a_membership_hang_for_no_fault():
    assert Silent().all_silent(NOWHERE, NOWHERE, NOWHERE) == []
    assert brief(Silent(Healing.IN_PLACE).all_silent(NOWHERE, READS, NOWHERE)) == [(2, HANG, "gpt-2")]


def test_what_hangs_again_and_again_is_given_up_though_each_time_lasts_long():
    scene, out = Silent(), []
    for epoch in range(12):
        scene.run(epoch=epoch, **{"gpt-1": "a", "gpt-2": "b", "gpt-3": "c"})
        scene.wait(700.0)
        for number in (1, 2, 3):
            out += scene.silent(number, 695.0, epoch=epoch, limit_s=690.0)
    assert brief(out)[-1] == "TaskBroken"
    assert "no progress: 10 starts of all ranks in a row failed" in out[-1].reason


@pytest.mark.parametrize("call", [LAUNCHER, *(each for each in WAITS if not each.startswith("torch/"))])
def test_a_call_of_the_training_library_that_is_looked_for_in_stacks_exists(call):
    name, _, file = call.rstrip(":").partition(" (")
    texts = [path.read_text() for path in (ROOT / "unicron").rglob("*.py") if path.match(file or "*.py")]
    assert any(f"def {name}(" in text for text in texts)
