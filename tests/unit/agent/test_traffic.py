"""Which workers of a node send something to others, and what they tell of it."""

import math

from msgspec.structs import replace
from unicron_agent.traffic import NodeTraffic
from unicron_agent.workers import Worker, communicating

from unicron.contracts.traffic import Forecast, forecast_name
from unicron.contracts.worker import NOWHERE


def worker(name, slot, world_size, task="a", epoch=3, **fields):
    membership = replace(NOWHERE, epoch=epoch, world_size=world_size)
    return Worker(worker=name, task=task, slot=slot, membership=membership, **fields)


def test_workers_whose_membership_is_all_here_send_nothing_to_other_nodes():
    here = [worker("a-1", 0, 2), worker("a-2", 1, 2)]
    assert communicating(here) == []
    assert communicating([*here, worker("b-1", 2, 3, task="b"), worker("b-2", 3, 3, task="b")]) == [2, 3]
    assert communicating([here[0], worker("a-2", 1, 2, epoch=4)]) == [0, 1], "one of them is still elsewhere"


def test_who_is_through_sends_nothing_and_who_was_adopted_may():
    assert communicating([worker("a-1", 0, 2, finished=True)]) == []
    assert communicating([Worker(worker="a-1", task="a", slot=5)]) == [5]


def test_the_network_is_idle_as_long_as_all_workers_leave_it_so(tmp_path):
    traffic = NodeTraffic(tmp_path, lambda: [0, 1, 2])
    assert traffic.forecast() == Forecast(), "who has said nothing yet has nothing to send"
    (tmp_path / forecast_name(0)).write_bytes(Forecast(7.0, 2.0).encode())
    (tmp_path / forecast_name(1)).write_bytes(Forecast(5.0, 1.0).encode())
    (tmp_path / forecast_name(3)).write_bytes(Forecast(0.0, 9.0).encode())
    assert traffic.forecast() == Forecast(5.0, 2.0)
    assert math.isinf(NodeTraffic(tmp_path).forecast().idle_until)
