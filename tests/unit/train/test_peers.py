"""Waits of a rank that are in vain, as another never comes there."""

import msgspec
import pytest

from unicron.train.inplace.peers import RankPosition, Wait, Waiting

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


def test_a_position_is_read_as_it_was_told():
    position = at(COLLECTIVE)
    assert msgspec.json.decode(msgspec.json.encode(position), type=RankPosition) == position
    assert f"{position.waits}, {GRADIENT}, {LOOP}" == (
        "collective 5 since the training loop began, the gradient of iteration 9, the beginning of the training loop"
    )
