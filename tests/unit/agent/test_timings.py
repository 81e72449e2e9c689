"""What an agent makes of its workers' iteration times."""

import pytest
from unicron_agent.timings import SHORTEST_S, Timings
from unicron_agent.workers import Worker

from unicron.contracts.slowdowns import Computed
from unicron.contracts.worker import Iterated

HERE = ("gpt-1", "gpt-2")


@pytest.fixture
def timings():
    return Timings("n1")


def add(timings, worker, iteration, seconds, now, epoch=0, here=HERE):
    rank = HERE.index(worker) + 4
    told = {"iteration": iteration, "epoch": epoch, "rank": rank, "world_size": 8, "seconds": 1.0, "loss": 1.0}
    known = Worker(worker=worker, task="gpt", slot=0, place=rank % 2)
    return timings.add(known, Iterated(**told, computed_s=seconds), here, now)


def test_one_message_tells_of_all_workers_of_an_iteration(timings):
    assert add(timings, "gpt-1", 7, 0.2, 10.0) == []
    [timed] = add(timings, "gpt-2", 7, 0.3, 10.1)
    assert (timed.node, timed.task, timed.epoch, timed.iteration) == ("n1", "gpt", 0, 7)
    told = [("gpt-1", 4, 0, 0.2), ("gpt-2", 5, 1, 0.3)]
    assert timed.workers == [Computed(worker=who, rank=rank, place=at, seconds=s) for who, rank, at, s in told]


def test_of_short_iterations_the_mean_is_told(timings):
    told = []
    for iteration in range(20):
        now = 10.0 + SHORTEST_S * iteration / 4
        told += add(timings, "gpt-1", iteration, 0.1 + 0.01 * (iteration % 4), now, here=("gpt-1",))
    assert len(told) == 5
    assert [each.iteration for each in told] == [0, 4, 8, 12, 16]
    assert told[2].workers[0].seconds == pytest.approx((0.11 + 0.12 + 0.13 + 0.10) / 4)


def test_who_computed_nothing_is_not_waited_for_and_not_named(timings):
    assert add(timings, "gpt-1", 7, 0.0, 10.0) == []
    [timed] = add(timings, "gpt-2", 7, 0.3, 10.1)
    assert [each.worker for each in timed.workers] == ["gpt-2"]


def test_a_new_membership_begins_anew(timings):
    assert add(timings, "gpt-1", 7, 9.0, 10.0) == []
    add(timings, "gpt-1", 7, 0.2, 11.0, epoch=1)
    [timed] = add(timings, "gpt-2", 7, 0.2, 11.0, epoch=1)
    assert [each.seconds for each in timed.workers] == [0.2, 0.2]


def test_tasks_that_are_gone_are_forgotten(timings):
    add(timings, "gpt-1", 7, 0.2, 10.0)
    timings.keep({"gpt"})
    assert len(add(timings, "gpt-2", 7, 0.3, 10.1)) == 1
    add(timings, "gpt-1", 8, 0.2, 20.0)
    timings.keep(set())
    assert add(timings, "gpt-2", 8, 0.3, 20.1) == []
