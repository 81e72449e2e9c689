"""Records of a script's ranks that are unpickled, and those that a new rank can begin at."""

import os
import pickle
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from unicron.contracts.frames import LIMIT
from unicron.contracts.tasks import WorkerPhase
from unicron.contracts.worker import NOWHERE, SNAPSHOT_AGAIN
from unicron.train.carry.kinds import NotCarriedError
from unicron.train.inplace.inplace import InPlace
from unicron.train.inplace.records import NO_SNAPSHOT, UNKNOWN, Records, untrusted_reason
from unicron.train.inplace.takeover import Takeover
from unicron.train.loops.active_loops import LoopPlace, LoopSnapshot

OPEN = replace(NOWHERE, rendezvous="10.0.0.7:4000")


def test_on_other_machines_nothing_is_unpickled_without_a_fabric_key():
    assert "UNICRON_FABRIC_KEY" in untrusted_reason(OPEN)
    with pytest.raises(NotCarriedError, match="no fabric key"):
        Records().take_over(OPEN, [])
    assert not untrusted_reason(replace(OPEN, secrets=[b"k" * 32]))
    assert not untrusted_reason(replace(OPEN, rendezvous="127.0.0.1:4000"))
    assert not untrusted_reason(replace(OPEN, rendezvous="[::1]:4000"))


def test_a_lost_rank_reaches_the_others_if_one_of_its_records_is_of_a_point_of_theirs():
    def left(*counts):
        return [pickle.dumps([[["train.py:7", 0, count, 0]], [], []]) for count in counts] + [b""]

    records, others = Records(), [[LoopPlace("train.py:7", 0, 6, 2)], [LoopPlace("train.py:7", 0, 6, 0)]]
    assert records.lost_reach(others), "none is lost"
    records._lost = {1: left(5, 6), 2: left(6)}
    assert records.lost_reach(others)
    records._lost[2] = left(4, 5)
    assert not records.lost_reach(others), "that of rank 2 are all of an iteration before"
    assert records.lacks_of_lost(others, others) == NO_SNAPSHOT
    earlier = [[LoopPlace("train.py:7", 0, 5, 0)], *others]
    assert records.lacks_of_lost(others, earlier) == UNKNOWN, "what collectives gave since then can't be given"
    assert not records.lacks_of_lost(earlier, earlier)
    records._lost = {1: []}
    assert not records.lost_reach(others)


def test_snapshots_that_are_more_than_the_rendezvous_takes_are_refused_by_name(capfd, monkeypatch):
    """The script has ranks other than the first print nothing, in one way or another."""
    monkeypatch.setattr("builtins.print", lambda *_: None)
    monkeypatch.setattr("sys.stderr", None)
    sent, records = {}, Records()
    records._store, records._membership = SimpleNamespace(set=sent.__setitem__), replace(OPEN, rendezvous="[::1]:4000")
    for size, refused, again in ((1 << 20, False, 0), (6 << 20, True, 0), (1, False, 1), (1, False, 0)):
        snapshots = [bytes([number]) * size for number in range(3)]
        records.publish(LoopSnapshot([["train.py:7", 0, 6, 2]] * 3, [b""] * 3, snapshots))
        told = capfd.readouterr().err
        assert ("its 3 snapshots, one for each loop, take more than 15 MiB" in told) is refused
        assert told.count(SNAPSHOT_AGAIN) == again
        assert bool(records.refusal) is refused
    assert max(map(len, sent.values())) < LIMIT


def test_what_can_not_be_carried_is_tried_with_no_older_copy():
    told, groups = [], SimpleNamespace(restored=True)
    takeover = object.__new__(Takeover)
    takeover._member = SimpleNamespace(
        core=SimpleNamespace(epoch=3, iteration=40), groups=groups, ranks=SimpleNamespace(send=told.append)
    )
    for groups.restored in (True, False):  # else only this process was in vain
        takeover._report_unusable(NotCarriedError("`x` has changed here on the way to the loop"))
    assert [(each.epoch, each.iteration) for each in told] == [(3, 0)]


@pytest.mark.parametrize(
    ("lacking", "raised"),
    [({"saving": "a thread"}, NotCarriedError), ({"other": "a lock"}, NameError), ({}, NameError)],
)
def test_a_variable_that_could_not_go_along_is_no_fault_of_the_script_and_any_other_that_is_missing_is(lacking, raised):
    def begin_again(why):
        raise NotCarriedError(why)

    loops = SimpleNamespace(taker=SimpleNamespace(lacking=lacking))
    rank = SimpleNamespace(_takeover=SimpleNamespace(begin_again=begin_again), loops=loops, _tell_failed=lambda _: None)
    with pytest.raises(raised, match="'saving' is not defined"), InPlace.run_to_end(rank):
        exec("saving.result()", {})


def test_who_waits_for_a_trial_at_the_end_of_its_script_does_not_count_as_one_that_computes():
    order, channel = [], SimpleNamespace(iteration=7, send=lambda told: order.append(told.phase))

    def finish():
        order.append("waits")
        raise KeyError

    rank = object.__new__(InPlace)
    rank._pid, rank._channel = os.getpid(), channel
    rank._takeover = SimpleNamespace(drill=SimpleNamespace(finish=finish))
    with pytest.raises(KeyError):
        rank._finish("at the end of train.py")
    assert order == [WorkerPhase.WAITING, "waits"]
