"""Workers' notes, and those of peers' processes, are analysed rightly: the work that was left, and what came on top."""

import importlib.util

import msgspec
import pytest

from benchmarks.harness import healing
from benchmarks.harness.healing import dropped, recovered
from benchmarks.harness.strikes import Note, Struck
from benchmarks.peers import runs
from unicron.contracts.events import Regrouped

LEFT, LOST = 1, 2
"""Processes: of the replica that stays whole, and of the one that is struck."""


def note(what, pid, began, at, iteration, epoch=0):
    return Note(what, pid, began, at, iteration, epoch, 2, pid - 1)


def quiet(iteration, starts):
    """An iteration of two microbatches of 1 s on each replica, and 0.5 s for reduce and update."""
    found = []
    for pid in (LEFT, LOST):
        found += [note("computed", pid, starts + n, starts + n + 1, iteration) for n in range(2)]
        found.append(note("updated", pid, starts + 2.4, starts + 2.5, iteration))
    return found


def disturbed(late):
    """The same, struck after 0.25 s of the second microbatch; the rest comes `late` seconds after that has ended."""
    found = [note("computed", pid, 10, 11, 1) for pid in (LEFT, LOST)] + [note("computed", LEFT, 11, 12, 1)]
    found += [note("computed", LEFT, 12 + late + n, 13 + late + n, 1, epoch=1) for n in range(2)]
    return [*found, note("updated", LEFT, 14.4 + late, 14.5 + late, 1, epoch=1)]


STRIKE = Struck(at=11.25, iteration=1, epoch=0, replica=1, phase="forward")


def test_what_is_usual_leaves_out_struck_iterations_and_the_first():
    notes = [*quiet(0, 0), *disturbed(5.0), *quiet(2, 20)]
    assert healing.usual(notes, [STRIKE], 2) == healing.Usual(1.0, 0.5)
    with pytest.raises(SystemExit, match="undisturbed"):
        healing.usual(disturbed(5.0), [STRIKE], 2)


def test_beyond_the_work_left_is_what_the_fault_cost():
    found = healing.healed(disturbed(0.3), STRIKE, healing.Usual(1.0, 0.5))
    assert found["microbatches_left"] == 2.75
    assert found["first_s"] == pytest.approx(3.55)
    assert found["beyond_s"] == found["waiting_s"] == pytest.approx(0.3)


def test_an_iteration_that_never_ended_has_no_figures():
    cut = [each for each in disturbed(0.3) if each.what != "updated"]
    assert healing.healed(cut, STRIKE, healing.Usual(1.0, 0.5))["beyond_s"] is None


def test_a_strike_in_the_update_counts_for_the_next_iteration():
    strike = Struck(at=2.4, iteration=0, epoch=0, replica=1, phase="update")
    notes = [*quiet(0, 0), note("computed", LEFT, 2.6, 3.6, 1), note("updated", LEFT, 4.0, 4.1, 1)]
    found = healing.healed(notes, strike, healing.Usual(1.0, 0.5))
    assert (found["iteration"], found["microbatches_left"]) == (1, 1.0)
    assert found["beyond_s"] == pytest.approx(0.2)


def regrouped(worker, epoch, at, world_size=2, seconds=0.0):
    told = {"node": "node-1", "slot": 0, "task": "t", "rank": 0, "iteration": 1}
    return Regrouped(worker=worker, epoch=epoch, world_size=world_size, at=at, seconds=seconds, **told)


def test_an_iteration_that_is_computed_after_it_had_ended_is_redone():
    notes = quiet(0, 0)
    assert healing.redone(notes) == 0
    assert healing.redone([*notes, note("computed", LEFT, 5.0, 6.0, 0)]) == 1


def test_regroups_are_those_of_the_replicas_that_were_left():
    told = [regrouped("a", 0, 9.0), msgspec.structs.replace(regrouped("b", 0, 9.0), rank=1)]
    told += [regrouped("a", 1, 12.0, 1, seconds=0.1), regrouped("a", 2, 13.0, seconds=0.2)]
    told += [regrouped("b", 2, 13.0, seconds=3.0), regrouped("a", 3, 14.0, seconds=9.0)]
    assert healing.regroups(told, STRIKE, 2, 1) == {"loss_s": 0.1, "join_s": 0.2}
    assert healing.regroups(told[:2], STRIKE, 2, 1) == {"loss_s": None, "join_s": None}


# --- peers ------------------------------------------------------------------------------------------------------------


NEW = 3
"""A process that comes in the place of the one that was struck."""

USUALLY = healing.Usual(1.0, 0.5)


def noted(what, pid, at, iteration, epoch=0, world=2):
    return Note(what, pid, at - 1.0, at, iteration, epoch, world, pid != LEFT)


def struck(strike=STRIKE):
    """Both compute a microbatch of two, and are in the second at the strike."""
    return [noted("computed", pid, 11.0, 1) for pid in (LEFT, LOST)], strike


def test_survivors_that_drop_what_they_had_and_go_on_alone():
    notes, strike = struck()
    notes += [noted("computed", LEFT, at, 1) for at in (12.0, 17.0)] + [noted("computed", LEFT, 18.0, 1, epoch=1)]
    notes += [noted("updated", LEFT, 18.5, 1, epoch=1, world=1)]
    notes += [noted("formed", pid, at, 2, epoch=2) for pid, at in ((LEFT, 20.0), (NEW, 20.5))]
    found = recovered(notes, strike, USUALLY, 2, 2)
    assert found["microbatches_left"] == 0.75
    assert found["first_s"] == pytest.approx(7.25)
    assert found["beyond_s"] == pytest.approx(7.25 - 0.75 - 0.5)
    assert found["whole_s"] == pytest.approx(9.25)
    assert dropped(notes, 2, 4) == 2
    assert healing.wasted(notes, 1, 4, dropped=2) == 3


def test_a_group_that_starts_anew_as_a_whole():
    notes, strike = struck()
    notes += [noted("formed", pid, 20.0, 0, epoch=1) for pid in (NEW, NEW + 1)]
    notes += [noted("computed", pid, at, 1, epoch=1) for pid in (NEW, NEW + 1) for at in (21.0, 22.0)]
    notes += [noted("updated", NEW, 22.5, 1, epoch=1)]
    assert recovered(notes, strike, USUALLY, 2, 2)["first_s"] is None
    notes += [noted("updated", NEW + 1, 22.75, 1, epoch=1)]
    found = recovered(notes, strike, USUALLY, 2, 2)
    assert found["first_s"] == pytest.approx(11.5)
    assert found["whole_s"] == pytest.approx(8.75)
    assert (dropped(notes, 2, 4), healing.wasted(notes, 1, 4), healing.redone(notes)) == (0, 2, 0)


def test_after_a_strike_in_the_update_the_next_iteration_counts():
    notes, strike = struck(Struck(at=12.2, iteration=1, epoch=0, replica=1, phase="update"))
    notes += [noted("updated", LEFT, 12.5, 1), noted("updated", LEFT, 20.0, 2, epoch=1, world=1)]
    found = recovered(notes, strike, USUALLY, 2, 2)
    assert (found["iteration"], found["microbatches_left"]) == (2, 2.0)
    assert found["beyond_s"] == pytest.approx(7.8 - 2.5)
    assert found["whole_s"] is None


def test_what_a_peer_cannot_run_is_told():
    assert runs.refusal("torchrun", "dp2_tp2_pp2") is None
    assert "FSDP2 only" in runs.refusal("torchft", "dp2_tp2")
    there = importlib.util.find_spec("torchft") is not None
    assert runs.refusal("torchft", "dp2_fsdp2") == (None if there else "not installed; pip install torchft-nightly")
