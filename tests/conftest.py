"""A real nats-server for the whole run, one of their own for tests that kill it, and worlds to run both buses in."""

import contextlib
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Protocol

import pytest
from nats.js.errors import NotFoundError

from unicron.aio import insist
from unicron.bus import nats, topology
from unicron.bus.memory import MemoryWorld
from unicron.bus.protocol import Bus
from unicron.bus.server import NatsServer, free_port
from unicron.clock import SystemClock
from unicron.settings import Settings

# a shell's background jobs ignore this signal, and so would the processes that tests start to interrupt them
signal.signal(signal.SIGINT, signal.default_int_handler)

LEASE_TTL_S = 0.4
PATIENT_PING_S = 10.0
"""Tests share the machine with others: no client that merely waits for its turn is to be cut off."""


class World(Protocol):
    """Somewhere to connect to."""

    async def connect(self, name: str = "test") -> Bus: ...

    async def close(self) -> None: ...


class NatsWorld:
    """A server with fresh, empty streams."""

    def __init__(self, url: str) -> None:
        self.settings = Settings(nats_url=url, lease_ttl_s=LEASE_TTL_S)
        self._open: list[nats.NatsBus] = []

    async def provision(self) -> None:
        bus = await self.connect("provision")
        for stream in topology.streams():
            with contextlib.suppress(NotFoundError):
                await bus.jetstream.delete_stream(stream.name)
        await insist(lambda: topology.provision(bus.jetstream, lease_ttl_s=LEASE_TTL_S), "provisioning")

    async def connect(self, name: str = "test") -> nats.NatsBus:
        bus = await nats.connect(self.settings, name)
        self._open.append(bus)
        return bus

    async def close(self) -> None:
        for bus in self._open:
            await bus.close()


class LocalWorld:
    """The bus in memory, in the machine's own time."""

    def __init__(self) -> None:
        self._world = MemoryWorld(SystemClock(), LEASE_TTL_S)
        self._open: list[Bus] = []

    async def connect(self, name: str = "test") -> Bus:
        self._open.append(self._world.connect())
        return self._open[-1]

    async def close(self) -> None:
        for bus in self._open:
            await bus.close()


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """One real server for all tests that leave it alive."""
    server = NatsServer(tmp_path_factory.mktemp("nats"), free_port(), ping_s=PATIENT_PING_S)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def private_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A real server that the test may kill and restart."""
    server = NatsServer(tmp_path / "nats", free_port(), ping_s=PATIENT_PING_S)
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def nats_world(nats_server: NatsServer) -> AsyncIterator[NatsWorld]:
    """The shared server, emptied."""
    world = NatsWorld(nats_server.url)
    await world.provision()
    yield world
    await world.close()


@pytest.fixture
async def private_world(private_server: NatsServer) -> AsyncIterator[NatsWorld]:
    """The private server, provisioned."""
    world = NatsWorld(private_server.url)
    await world.provision()
    yield world
    await world.close()


@pytest.fixture(params=["nats", "memory"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """Each of the two buses in turn."""
    made: World
    if request.param == "memory":
        made = LocalWorld()
    else:
        made = NatsWorld(request.getfixturevalue("nats_server").url)
        await made.provision()
    yield made
    await made.close()


@pytest.fixture
async def bus(world: World) -> Bus:
    """A connection to each of the two buses in turn."""
    return await world.connect()
