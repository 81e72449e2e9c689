"""What workers noted is taken apart rightly: the work that was left, and what came on top."""

import msgspec
import pytest

from benchmarks import healing
from benchmarks.struck import Note, Struck
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


def test_whole_is_when_the_last_rank_of_all_has_joined():
    told = [regrouped("a", 0, 9.0), regrouped("b", 0, 9.0), regrouped("a", 1, 12.0, 1)]
    assert healing.whole_s(told, 10.0, 2) is None
    told += [regrouped("a", 2, 13.0), regrouped("c", 2, 13.5)]
    assert healing.whole_s(told, 10.0, 2) == 3.5


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
