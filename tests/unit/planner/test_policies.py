"""How the policies of others share workers out: feasible sizes only, all that fits, always the same."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unicron_planner.policies import POLICIES, Demand, equally, repair_hit, sized, weighted

from unicron.errors import InvalidInputError


def job(name, sizes, **fields):
    return Demand(name, np.array([0, *sizes], np.int64), **fields)


EVERY = range(1, 129)
EIGHTS = range(8, 129, 8)


def test_equally_gives_the_same_to_all_and_the_rest_to_the_first():
    assert equally([job(name, EVERY) for name in "abc"], 12) == {"a": 4, "b": 4, "c": 4}
    assert equally([job(name, EVERY) for name in "abc"], 14) == {"a": 5, "b": 5, "c": 4}
    assert equally([], 14) == {}


def test_weighted_follows_the_weights_and_sized_the_models():
    tasks = [job("a", EVERY, weight=0.5, parameters=7), job("b", EVERY, weight=1.5, parameters=1)]
    assert weighted(tasks, 16) == {"a": 4, "b": 12}
    assert sized(tasks, 16) == {"a": 14, "b": 2}


def test_what_rounding_leaves_over_goes_to_whoever_is_furthest_below_its_share():
    # each is due 21.3 of 128 and gets 16; the 32 left over are four further steps
    assert list(equally([job(name, EIGHTS) for name in "abcdef"], 128).values()) == [24, 24, 24, 24, 16, 16]
    # due 4.9 and 1.1: a is further below, though it has more
    assert weighted([job("a", EVERY, weight=4.9), job("b", EVERY, weight=1.1)], 6) == {"a": 5, "b": 1}
    # due 6.9, 2.3 and 2.8: c is furthest below with 0, then a
    tasks = [job("a", EVERY, weight=3), job("b", EVERY, weight=1), job("c", [4], weight=1.2)]
    assert weighted(tasks, 12) == {"a": 6, "b": 2, "c": 4}


def test_a_step_that_does_not_fit_is_passed_over():
    assert equally([job("a", [2, 8]), job("b", [1, 2, 3])], 6) == {"a": 2, "b": 3}
    assert equally([job("a", [8]), job("b", [8])], 8) == {"a": 8, "b": 0}
    assert equally([job("a", [8])], 7) == {"a": 0}


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_shares_that_are_none_are_refused(weight):
    with pytest.raises(InvalidInputError, match=r"task b: a share of .*; give a finite number"):
        weighted([job("a", EVERY), job("b", EVERY, weight=weight)], 8)
    with pytest.raises(InvalidInputError, match="all tasks have a share of 0"):
        sized([job("a", EVERY)], 8)


def test_repair_touches_only_the_tasks_that_were_hit():
    tasks = [job("a", EVERY, held=8), job("b", EIGHTS, held=16, hit=True), job("c", EVERY, held=8)]
    assert repair_hit(tasks, 32) == {"a": 8, "b": 16, "c": 8}
    assert repair_hit(tasks, 28) == {"a": 8, "b": 8, "c": 8}
    assert repair_hit(tasks, 20) == {"a": 8, "b": 0, "c": 8}


def test_repair_gives_nobody_more_than_it_had_and_the_first_hit_the_first_place():
    tasks = [job("b", EVERY, held=8, hit=True), job("a", EVERY, held=8, hit=True)]
    assert repair_hit(tasks, 100) == {"b": 8, "a": 8}
    assert repair_hit(tasks, 12) == {"b": 8, "a": 4}


SIZES = st.sets(st.integers(1, 40), min_size=1).map(sorted)
JOBS = st.tuples(SIZES, st.floats(0.1, 10), st.floats(0.1, 200), st.integers(0, 40), st.booleans())


@settings(max_examples=300, deadline=None)
@given(st.lists(JOBS, min_size=1, max_size=6), st.integers(0, 120))
def test_every_policy_keeps_to_feasible_sizes_and_to_the_workers_and_leaves_no_step_that_fits(drawn, workers):
    tasks = [
        job(f"t{number}", sizes, weight=weight, parameters=parameters, held=held, hit=hit)
        for number, (sizes, weight, parameters, held, hit) in enumerate(drawn)
    ]
    for name, policy in POLICIES.items():
        found = policy(tasks, workers)
        assert list(found) == [task.name for task in tasks]
        assert all(found[task.name] in task.sizes for task in tasks)
        assert sum(found.values()) <= workers
        assert found == policy(tasks, workers)
        free = workers - sum(found.values())
        for task in tasks:
            larger = [int(size) for size in task.sizes if size > found[task.name]]
            if name == "repair_hit":
                larger = [size for size in larger if size <= task.held]
            if larger and (name != "repair_hit" or task.hit):
                assert larger[0] - found[task.name] > free
