"""What a peer's processes noted is taken apart as Unicron's is, and what a peer can't do is told."""

import importlib.util

import pytest

from benchmarks import healing
from benchmarks.peers import runs
from benchmarks.peers.recovery import dropped, recovered
from benchmarks.struck import Note, Struck

LEFT, LOST, NEW = 1, 2, 3
"""Processes of two replicas of one rank: the one that stays, the one that is struck, and what comes in its place."""

USUALLY = healing.Usual(1.0, 0.5)
STRIKE = Struck(at=11.25, iteration=1, epoch=0, replica=1, phase="forward")


def note(what, pid, at, iteration, epoch=0, world=2):
    return Note(what, pid, at - 1.0, at, iteration, epoch, world, pid != LEFT)


def struck(strike=STRIKE):
    """Both compute a microbatch of two, and are in the second at the strike."""
    return [note("computed", pid, 11.0, 1) for pid in (LEFT, LOST)], strike


def test_survivors_that_drop_what_they_had_and_go_on_alone():
    notes, strike = struck()
    notes += [note("computed", LEFT, at, 1) for at in (12.0, 17.0)] + [note("computed", LEFT, 18.0, 1, epoch=1)]
    notes += [note("updated", LEFT, 18.5, 1, epoch=1, world=1)]
    notes += [note("formed", pid, at, 2, epoch=2) for pid, at in ((LEFT, 20.0), (NEW, 20.5))]
    found = recovered(notes, strike, USUALLY, 2, 2)
    assert found["microbatches_left"] == 0.75
    assert found["first_s"] == pytest.approx(7.25)
    assert found["beyond_s"] == pytest.approx(7.25 - 0.75 - 0.5)
    assert found["whole_s"] == pytest.approx(9.25)
    assert dropped(notes, 2, 4) == 2
    assert healing.wasted(notes, 1, 4, dropped=2) == 3


def test_a_group_that_starts_anew_as_a_whole():
    notes, strike = struck()
    notes += [note("formed", pid, 20.0, 0, epoch=1) for pid in (NEW, NEW + 1)]
    notes += [note("computed", pid, at, 1, epoch=1) for pid in (NEW, NEW + 1) for at in (21.0, 22.0)]
    notes += [note("updated", NEW, 22.5, 1, epoch=1)]
    assert recovered(notes, strike, USUALLY, 2, 2)["first_s"] is None
    notes += [note("updated", NEW + 1, 22.75, 1, epoch=1)]
    found = recovered(notes, strike, USUALLY, 2, 2)
    assert found["first_s"] == pytest.approx(11.5)
    assert found["whole_s"] == pytest.approx(8.75)
    assert (dropped(notes, 2, 4), healing.wasted(notes, 1, 4), healing.redone(notes)) == (0, 2, 0)


def test_after_a_strike_in_the_update_the_next_iteration_counts():
    notes, strike = struck(Struck(at=12.2, iteration=1, epoch=0, replica=1, phase="update"))
    notes += [note("updated", LEFT, 12.5, 1), note("updated", LEFT, 20.0, 2, epoch=1, world=1)]
    found = recovered(notes, strike, USUALLY, 2, 2)
    assert (found["iteration"], found["microbatches_left"]) == (2, 2.0)
    assert found["beyond_s"] == pytest.approx(7.8 - 2.5)
    assert found["whole_s"] is None


def test_what_a_peer_cannot_run_is_told():
    assert runs.refusal("torchrun", "dp2_tp2_pp2") is None
    assert "FSDP2 only" in runs.refusal("torchft", "dp2_tp2")
    there = importlib.util.find_spec("torchft") is not None
    assert runs.refusal("torchft", "dp2_fsdp2") == (None if there else "not installed; pip install torchft-nightly")
