"""Which services and nodes are healthy while something is wrong with them."""

import contextlib
import os
from functools import partial

import pytest
from helpers.scenes import scene
from unicron_agent.outbox import Outbox
from unicron_simulator.invariants import SERVICES
from unicron_simulator.world import LEASE_TTL_S

from unicron import health
from unicron.errors import BusUnavailableError


@scene(nodes=1)
async def test_a_service_is_healthy_while_an_instance_of_it_lives(stage, monkeypatch):
    @contextlib.asynccontextmanager
    async def connected(settings, name):
        yield stage.client.bus

    monkeypatch.setattr(health, "connected", connected)
    check = partial(health.check, health.HealthSettings())
    for name in SERVICES:
        await check(name)
        [instance] = stage.world._instances[name]
        await stage.world._kill(instance)
        await stage.wait(2 * LEASE_TTL_S)
        with pytest.raises(BusUnavailableError, match=f"no instance of {name} is active"):
            await check(name)
        stage.world._start(name)
        await stage.wait(2 * LEASE_TTL_S)
        await check(name)


@scene(nodes=1)
async def test_a_node_is_healthy_while_its_agent_reaches_the_bus(stage, tmp_path, monkeypatch):
    alive, clock, machine = tmp_path / "alive", stage.world.clock, stage.machine("node-1")

    def touch():
        alive.touch()
        os.utime(alive, (clock.now(), clock.now()))

    async def broken(subject, data):
        raise BusUnavailableError("the connection is down")

    await machine.crash_agent()
    machine.make_outbox = lambda *given: Outbox(*given, touch)
    machine.boot()
    await stage.until(alive.exists)
    health._check_agent(alive, clock.now())
    with monkeypatch.context() as away:
        away.setattr(machine.agent.link, "tell", broken)
        await stage.wait(1.5 * health.SILENT_S)
        with pytest.raises(BusUnavailableError, match="its agent has told the bus nothing for 15 s"):
            health._check_agent(alive, clock.now())
    await stage.wait(1.0)
    health._check_agent(alive, clock.now())
