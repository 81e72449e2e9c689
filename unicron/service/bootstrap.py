"""Makes the parts that touch the network: the real bus, and a user's client on it."""

import getpass
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from unicron.bus import nats
from unicron.client import Client
from unicron.contracts.ranges import LONGEST_WHO
from unicron.printable import one_line
from unicron.settings import Settings


@asynccontextmanager
async def connected(settings: Settings, name: str, *, patient: bool = True) -> AsyncIterator[nats.NatsBus]:
    """Connect to the bus as `name`, and say goodbye at the end.

    Args:
        settings: address of the bus, and the credentials.
        name: of the connection.
        patient: whether to try again until the time is up, where every server fails.

    Raises:
        BusUnavailableError: no server answers at the address that `settings` name.
        InvalidInputError: credentials or TLS files can't be used.
    """
    bus = await nats.connect(settings, name, patient=patient)
    try:
        yield bus
    finally:
        await bus.close()


@asynccontextmanager
async def connected_client(settings: Settings, name: str, *, patient: bool = True) -> AsyncIterator[Client]:
    """Connect a client as `name`; its orders carry the name of this process's user. Raises as `connected` does."""
    async with connected(settings, name, patient=patient) as bus:
        yield Client(bus, by=own_name())


def own_name() -> str:
    """Return who runs this process, for a person: user@host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = str(os.getuid())
    return one_line(f"{user}@{socket.gethostname()}").replace("\t", "\\t")[:LONGEST_WHO]
