"""Nodes with the key of a cluster: what they hand out and take in of states."""

import contextlib

from unicron_agent.fabric import Fabric
from unicron_agent.snapshots.server import FETCH, LIMITS, SnapshotServer
from unicron_agent.traffic import NodeTraffic
from xxhash import xxh3_128

from unicron import fabric_proofs
from unicron.contracts.states import StateLocation, StateRef
from unicron.snapshots.memory import SnapshotMemory

KEY = fabric_proofs.new_key()


def fabric(folder, node="n1", key=KEY, **fields):
    """Return a node's end of it, with a file of its own in `folder`."""
    path = folder / f"{node}-fabric.key"
    path.touch(mode=0o600)
    path.write_bytes(fabric_proofs.key_file_text(key))
    return Fabric(str(path), node, **fields)


def state_ref(content, name, node="n1", address="n1:1", iteration=3):
    """Return the reference of a state of a worker of `gpt`."""
    location = StateLocation(node=node, worker="gpt-1", name=name, address=address)
    checksum = xxh3_128(content).digest()
    return StateRef(task="gpt", iteration=iteration, place=0, location=location, size=len(content), checksum=checksum)


class Node:
    """A node whose state server is real.

    Attributes:
        folder: what it has in its memory.
        reports: of its server about copies.
        address: of its server, once that was started.
    """

    def __init__(self, name, folder, fabric, limit=0):
        self.name, self.folder, self.fabric, self.reports = name, folder, fabric, []
        folder.mkdir()
        self.memory, self.traffic = SnapshotMemory(folder, limit), NodeTraffic(folder)

    @contextlib.asynccontextmanager
    async def served(self, kind=SnapshotServer, host="127.0.0.1"):
        self.made = kind(self.memory, self.name, lambda *report: self.reports.append(report), self.traffic, self.fabric)
        server, self.address = await self.made.serve(host)
        self.server = server
        try:
            yield self
        finally:
            await server.stop(0)


async def fetched(address, name, header):
    """Return the answer of the server at an address to a call with such a header."""
    async with Fabric("", "").channel(address, "", LIMITS) as channel:
        return b"".join([piece async for piece in channel.unary_stream(FETCH)(name.encode(), metadata=header)])
