"""The registry of a cluster that only observes: it drains nobody, and keeps what waits for a user."""

import pytest
from unicron_registry.core import RegistryCore

from unicron.contracts import events
from unicron.contracts.queries import PauseTask, RewindTask, SubmitTask
from unicron.contracts.stragglers import StragglerDetected
from unicron.contracts.tasks import Slot, TaskSpec

JOINED = events.NodeJoined(
    node="n1", source="n1", incarnation="a", host="h", slots=[Slot(index=0)], at=1.0, version="1.2"
)
WITHHELD = events.OrdersWithheld(task="t", orders=["stop t-1"])


@pytest.fixture
def registry():
    core = RegistryCore()
    core.handle(JOINED)
    core.answer(SubmitTask(spec=TaskSpec(name="t", command=["t.py"], iterations=10, checkpoints="/storage")))
    core.handle(events.ObserveOnlySwitched())
    return core


def withheld(registry):
    return registry.state.tasks["t"].withheld


def test_the_node_of_a_straggler_stays_in_use_until_the_cluster_heals(registry):
    fields = {"task": "t", "epoch": 1, "world_size": 2, "first": 0, "last": 90, "steps": 20, "slowdown": 1.5}
    found = StragglerDetected(**fields, waste=0.3, diagnosis="slow-worker", node="n1", drain=True, source="straggler")
    assert registry.handle(found) == []
    registry.handle(events.ObserveOnlySwitched(on=False))
    assert registry.handle(found) == [events.NodeDrained(node="n1")]


def test_a_task_of_which_orders_are_withheld_is_resumed_though_nobody_has_paused_it(registry):
    assert registry.answer(PauseTask(task="t", pause=False))[1] == []
    registry.handle(WITHHELD)
    assert withheld(registry) == str(WITHHELD)
    assert registry.answer(PauseTask(task="t", pause=False))[1] == [events.TaskPaused(task="t", paused=False)]
    assert not withheld(registry)
    assert registry.answer(PauseTask(task="t", pause=False))[1] == []


@pytest.mark.parametrize("query", [PauseTask(task="t"), RewindTask(task="t", iteration=3)])
def test_what_a_user_orders_else_takes_the_place_of_what_was_withheld(registry, query):
    registry.handle(WITHHELD)
    registry.answer(query)
    assert not withheld(registry)


@pytest.mark.parametrize("over", [events.OrdersWithheld(task="t"), events.ObserveOnlySwitched(on=False)])
def test_nothing_waits_for_a_user_any_more_when_the_cluster_says_so(registry, over):
    registry.handle(WITHHELD)
    registry.handle(over)
    assert not withheld(registry)


def test_a_node_is_known_with_the_version_of_its_agent(registry):
    assert registry.state.nodes["n1"].version == "1.2"
