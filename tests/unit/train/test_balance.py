"""Sequences are shared out by what they cost."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron.errors import InvalidInputError
from unicron.train.balance import balance, round_robin, spread


@st.composite
def batches(draw):
    ranks, microbatches = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    slots = ranks * microbatches
    lengths = draw(st.lists(st.integers(1, 32768), min_size=slots, max_size=4 * slots))
    return lengths, ranks, microbatches


def rank_costs(lengths, assignment):
    return [sum(lengths[place] ** 2 for places in mine for place in places) for mine in assignment]


@given(batches())
def test_every_sequence_is_given_out_once_and_no_microbatch_is_empty(batch):
    lengths, ranks, microbatches = batch
    found = balance(*batch)
    assert sorted(place for mine in found for places in mine for place in places) == list(range(len(lengths)))
    assert [len(mine) for mine in found] == [microbatches] * ranks
    assert all(places for mine in found for places in mine)


@given(batches())
def test_it_is_never_worse_than_dealing_them_out_in_turn(batch):
    lengths, ranks, microbatches = batch
    in_turn = round_robin(len(lengths), ranks, microbatches)
    assert max(rank_costs(lengths, balance(*batch))) <= max(rank_costs(lengths, in_turn))


@given(batches())
def test_the_costliest_rank_is_near_what_nobody_can_beat(batch):
    lengths, ranks, microbatches = batch
    if len(lengths) < 2 * ranks * microbatches:  # where each microbatch has to get one, that decides
        return
    costs = rank_costs(lengths, balance(*batch))
    floor = max(*(length**2 for length in lengths), sum(length**2 for length in lengths) / ranks)
    assert max(costs) <= 2 * floor  # what filling the least loaded guarantees in general


@given(batches())
def test_the_memory_of_a_microbatch_is_kept_to(batch):
    lengths, ranks, microbatches = batch
    limit = 4 * max(*lengths, math.ceil(sum(lengths) / (ranks * microbatches)))
    found = balance(*batch, max_tokens=limit)
    assert max(sum(lengths[place] for place in places) for mine in found for places in mine) <= limit


def test_a_long_tailed_batch_becomes_even():
    drawn = random.Random(1)
    lengths = [min(32768, 1 + int(drawn.lognormvariate(7.6, 1.3))) for _ in range(512)]
    before, after = round_robin(512, 8, 4), balance(lengths, 8, 4)
    assert spread(lengths, before) > 1.3
    assert spread(lengths, after) < 1.001


def test_every_rank_works_out_the_same():
    lengths = [100, 100, 50, 50, 100, 50, 7, 7]
    assert balance(lengths, 2, 2) == balance(list(lengths), 2, 2)


def test_costs_can_be_other_than_squares():
    # by squares the one long sequence weighs as much as four; by tokens as much as two
    lengths = [4, 2, 2, 2, 2]
    assert sorted(len(mine[0]) for mine in balance(lengths, 2, 1)) == [1, 4]
    assert sorted(len(mine[0]) for mine in balance(lengths, 2, 1, cost=lambda length: length)) == [2, 3]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (([1, 2], 0, 1), "ranks is 0"),
        (([1, 2], 1, 0), "microbatches is 0"),
        (([1, 0], 1, 1), r"lengths\[1\] is 0"),
        (([1, 2], 2, 2), "2 sequences for 2 x 2 microbatches"),
    ],
)
def test_what_makes_no_sense_is_told(given, told):
    with pytest.raises(InvalidInputError, match=told):
        balance(*given)


def test_what_does_not_fit_is_told():
    with pytest.raises(InvalidInputError, match=r"lengths\[0\] is 9, over max_tokens=8"):
        balance([9, 1], 1, 1, max_tokens=8)
    with pytest.raises(InvalidInputError, match="no room for"):
        balance([5, 5, 5], 1, 2, max_tokens=8)
