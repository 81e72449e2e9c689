"""Waits of a rank that are in vain, as another never comes there."""

import threading
from types import SimpleNamespace

import msgspec
import pytest

from unicron.contracts.tasks import WorkerPhase
from unicron.errors import GroupBrokenError
from unicron.train.inplace.peers import Peers, RankPosition, Wait, Waiting, cure

SETUP, LOOP = Waiting(Wait.SETUP, 3), Waiting(Wait.LOOP)
COLLECTIVE, GRADIENT = Waiting(Wait.COLLECTIVE, 5), Waiting(Wait.GRADIENT, 9)


def at(waits=None, **begun):
    """Return the position of a rank that has begun all that the others have, but for what is given."""
    has = {"setup": 3, "begun": True, "collectives": 5, "iterations": 10}
    return RankPosition(rank=0, where="x.py:1", waits=waits, **{**has, **begun})


LACKING = [
    (SETUP, {"setup": 2, "begun": False}),
    (LOOP, {"begun": False}),
    (COLLECTIVE, {"collectives": 4}),
    (GRADIENT, {"iterations": 9}),
]


@pytest.mark.parametrize(("waits", "lacking"), LACKING)
def test_who_waits_for_one_that_has_ended_before_it_came_there_waits_in_vain(waits, lacking):
    assert at(waits).never_meets(at(**lacking))
    assert not at(waits).never_meets(at()), "it was there"


@pytest.mark.parametrize(("waits", "lacking"), LACKING)
@pytest.mark.parametrize(("other", "missing"), LACKING)
def test_two_that_wait_for_each_other_do_so_where_neither_has_begun_what_the_other_waits_for(
    waits, lacking, other, missing
):
    if waits.wait is other.wait:
        return
    assert at(waits, **missing).never_meets(at(other, **lacking))
    assert not at(waits).never_meets(at(other, **lacking)), "it may come yet, or has long since gone on"


@pytest.mark.parametrize(
    ("waits", "other", "said", "unsaid"),
    [
        (SETUP, None, ["collectives before their loop"], "batches"),
        (LOOP, SETUP, ["same training loop", "collectives before their loop"], "batches"),
        (COLLECTIVE, None, ["same collectives", "number of batches"], "loop"),
        (COLLECTIVE, COLLECTIVE, ["same collectives"], "batches"),
        (GRADIENT, None, ["number of batches"], "collectives"),
        (GRADIENT, COLLECTIVE, ["number of batches", "same collectives"], "loop"),
    ],
)
def test_what_to_change_is_what_ranks_do_otherwise(waits, other, said, unsaid):
    told = cure(waits, other)
    assert all(each in told for each in said)
    assert unsaid not in told


def test_a_position_is_read_as_it_was_told():
    position = at(COLLECTIVE)
    assert msgspec.json.decode(msgspec.json.encode(position), type=RankPosition) == position
    assert f"{position.waits}, {GRADIENT}, {LOOP}" == (
        "collective 5 since the training loop began, the gradient of iteration 9, the beginning of the training loop"
    )


@pytest.mark.parametrize(("waits", "told"), [(COLLECTIVE, {WorkerPhase.WAITING}), (GRADIENT, set())])
def test_a_lasting_wait_in_a_collective_of_the_script_is_no_computation_that_hangs(waits, told, monkeypatch):
    looks, enough = [], threading.Event()

    def away():
        looks.append(1)
        if len(looks) == 3:
            enough.set()
        raise GroupBrokenError("no rendezvous")

    monkeypatch.setattr("unicron.train.inplace.peers.LOOK_S", 0.001)
    sent = []
    peers = Peers(SimpleNamespace(iteration=4, send=sent.append), away, lambda *_: None)
    peers.watch()
    with peers.waiting(waits):
        assert enough.wait(30)
    assert {each.phase for each in sent} == told
