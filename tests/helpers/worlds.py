"""Worlds to run both buses in, each with fresh, empty streams."""

import contextlib
from typing import Protocol

from nats.js.errors import NotFoundError
from unicron_deploy import nats_server
from unicron_simulator.storms.bus import MemoryWorld

from helpers.ports import free_port
from unicron import client
from unicron.aio import retry_until_available
from unicron.bus import connection, nats, topology
from unicron.bus.protocol import Bus
from unicron.clock import Clock, SystemClock
from unicron.settings import Settings

LEASE_TTL_S = 30.0
"""Nobody loses a lease who merely waits for a turn on a core; a test that wants a takeover deletes the lease."""

PATIENT_PING_S = 10.0
"""Tests share the machine with others: no client that merely waits for its turn is to be cut off."""


# a server that waits for a core starts late, and answers late
nats_server.START_S, connection.ANSWER_S, client.ANSWER_S = 120.0, 10.0, 60.0


@contextlib.contextmanager
def serving(directory, **options):
    """Run a real server of a test's own, patient by default."""
    server = nats_server.NatsServer(directory, free_port(), **{"ping_s": PATIENT_PING_S, **options})
    server.start()
    try:
        yield server
    finally:
        server.stop()


def known(server, keys, user, **fields):
    """Return the settings of a user whose key a server knows."""
    return Settings(nats_url=server.url, nats_nkey=str(keys.path(user)), **fields)


class World(Protocol):
    """Somewhere to connect to."""

    async def connect(self, name: str = "test") -> Bus: ...

    async def close(self) -> None: ...


class NatsWorld:
    """A server with fresh, empty streams."""

    def __init__(self, url: str) -> None:
        self.settings = Settings(nats_url=url, lease_ttl_s=LEASE_TTL_S, connect_timeout_s=120.0)
        self._open: list[nats.NatsBus] = []

    async def provision(self) -> None:
        bus = await self.connect("provision")
        for stream in topology.streams():
            with contextlib.suppress(NotFoundError):
                await bus.jetstream.delete_stream(stream.name)
        await retry_until_available(lambda: topology.provision(bus.jetstream, lease_ttl_s=LEASE_TTL_S), "provisioning")

    async def connect(self, name: str = "test") -> nats.NatsBus:
        bus = await nats.connect(self.settings, name)
        self._open.append(bus)
        return bus

    async def close(self) -> None:
        for bus in self._open:
            await bus.close()


class LocalWorld:
    """The bus in memory, in the machine's own time unless it is given another clock."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or SystemClock()
        self.memory = MemoryWorld(self.clock, LEASE_TTL_S)
        self._open: list[Bus] = []

    async def connect(self, name: str = "test") -> Bus:
        self._open.append(self.memory.connect())
        return self._open[-1]

    async def close(self) -> None:
        for bus in self._open:
            await bus.close()
