"""An agent's reports from its workers' timings: lengths of iterations, and forecasts of traffic."""

import math

import pytest
from msgspec.structs import replace
from unicron_agent.traffic import NodeTraffic
from unicron_agent.workers.timings import SHORTEST_S, Timings
from unicron_agent.workers.workers import LocalWorker, communicating

from unicron.contracts.slowdowns import Computed
from unicron.contracts.traffic import Forecast, forecast_name
from unicron.contracts.worker import NOWHERE, Iterated

HERE = ("gpt-1", "gpt-2")


@pytest.fixture
def timings():
    return Timings("n1")


def add(timings, worker, iteration, seconds, now, epoch=0, here=HERE):
    rank = HERE.index(worker) + 4
    told = {"iteration": iteration, "epoch": epoch, "rank": rank, "world_size": 8, "seconds": 1.0, "loss": 1.0}
    known = LocalWorker(worker=worker, task="gpt", slot=0, place=rank % 2)
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
    timings.keep_tasks({"gpt"})
    assert len(add(timings, "gpt-2", 7, 0.3, 10.1)) == 1
    add(timings, "gpt-1", 8, 0.2, 20.0)
    timings.keep_tasks(set())
    assert add(timings, "gpt-2", 8, 0.3, 20.1) == []


# --- who sends something to other nodes, and when ---------------------------------------------------------------------


def worker(name, slot, world_size, task="a", epoch=3, **fields):
    membership = replace(NOWHERE, epoch=epoch, world_size=world_size)
    return LocalWorker(worker=name, task=task, slot=slot, membership=membership, **fields)


def test_workers_whose_membership_is_all_here_send_nothing_to_other_nodes():
    here = [worker("a-1", 0, 2), worker("a-2", 1, 2)]
    assert communicating(here) == []
    assert communicating([*here, worker("b-1", 2, 3, task="b"), worker("b-2", 3, 3, task="b")]) == [2, 3]
    assert communicating([here[0], worker("a-2", 1, 2, epoch=4)]) == [0, 1], "one of them is still elsewhere"


def test_who_is_through_sends_nothing_and_who_was_adopted_may():
    assert communicating([worker("a-1", 0, 2, finished=True)]) == []
    assert communicating([LocalWorker(worker="a-1", task="a", slot=5)]) == [5]


def test_the_network_is_idle_as_long_as_all_workers_leave_it_so(tmp_path):
    traffic = NodeTraffic(tmp_path, lambda: [0, 1, 2])
    assert traffic.forecast() == Forecast(), "who has said nothing yet has nothing to send"
    (tmp_path / forecast_name(0)).write_bytes(Forecast(7.0, 2.0).encode())
    (tmp_path / forecast_name(1)).write_bytes(Forecast(5.0, 1.0).encode())
    (tmp_path / forecast_name(3)).write_bytes(Forecast(0.0, 9.0).encode())
    assert traffic.forecast() == Forecast(5.0, 2.0)
    assert math.isinf(NodeTraffic(tmp_path).forecast().idle_until)
