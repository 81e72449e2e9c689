"""Sources of a worker's snapshots: the memory of this node, or another node."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Protocol

from xxhash import xxh3_128

from unicron.contracts.states import KEPT, SAVED, StateRef
from unicron.errors import StateTransferError, UnsoundStateError, explain_lack
from unicron.snapshots.memory import SnapshotMemory, finished_or_removed, unsound, verify
from unicron_agent.calls import grpc
from unicron_agent.fabric import Fabric, challenge_in
from unicron_agent.snapshots.server import FETCH, LIMITS, TIMEOUT_S


class SnapshotSource(Protocol):
    """A place that hands snapshots out."""

    async def obtain(self, ref: StateRef, target: Path) -> Path:
        """Make the snapshot `ref` the file `target`, whole and checked, and return it; the caller removes it.

        Raises:
            UnsoundStateError: the source hands over something else.
            StateTransferError: the source lacks it, or goes away; or there is no room. Nothing is left behind.
        """


class OwnMemory:
    """The memory of this node."""

    def __init__(self, memory: SnapshotMemory) -> None:
        self._memory = memory

    async def obtain(self, ref: StateRef, target: Path) -> Path:
        """Give the file a second name, which stays when its holder removes the first."""
        with _errors_translated(ref, target), finished_or_removed(target) as unfinished:
            os.link(self._path(ref), unfinished)
            await asyncio.to_thread(verify, ref, unfinished)
        return target

    def _path(self, ref: StateRef) -> Path:
        try:
            return self._memory.path(ref.location.name)
        except StateTransferError as error:
            raise _missing(ref)(str(error)) from error


class OtherNode:
    """The memory of another node, by its agent's snapshot server."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric

    async def obtain(self, ref: StateRef, target: Path) -> Path:
        """Copy the file, piece by piece."""
        digest, left = xxh3_128(), ref.size
        address, name = ref.location.address, ref.location.name.encode()
        with _errors_translated(ref, target), finished_or_removed(target) as unfinished:
            async with self._fabric.channel(address, ref.location.node, LIMITS) as channel:
                with unfinished.open("wb") as file:
                    async for piece in self._pieces(channel, address, name):
                        state = piece[:left]  # a saved one is followed by its label
                        left -= len(state)
                        digest.update(state)
                        file.write(state)
            if digest.digest() != ref.checksum:
                raise unsound(ref)
        return target

    async def _pieces(
        self, channel: grpc.aio.Channel, address: str, name: bytes, challenge: bytes = b""
    ) -> AsyncIterator[bytes]:
        """Yield what the other node sends; ask once more, where it wants another proof: one of the clocks is off."""
        header = self._fabric.proof_metadata(FETCH, address, name, challenge)
        try:
            async for piece in channel.unary_stream(FETCH)(name, timeout=TIMEOUT_S, metadata=header):
                yield piece
        except grpc.aio.AioRpcError as error:
            if challenge or not (challenge := challenge_in(error)):
                raise
            async for piece in self._pieces(channel, address, name, challenge):
                yield piece


def source_of(ref: StateRef, node: str, memory: SnapshotMemory, fabric: Fabric) -> SnapshotSource:
    """Return where to obtain `ref` from on this `node`, with this memory and this key of the cluster's nodes."""
    return OwnMemory(memory) if ref.location.node == node else OtherNode(fabric)


def _missing(ref: StateRef) -> type[StateTransferError]:
    """Return the error of a snapshot that is not there: one to last is unsound, for whoever counts on it goes on so."""
    return UnsoundStateError if ref.location.name.endswith((SAVED, KEPT)) else StateTransferError


@contextlib.contextmanager
def _errors_translated(ref: StateRef, target: Path) -> Iterator[None]:
    """Raise a StateTransferError that names snapshot and places where the transfer inside fails."""
    what = f"state {ref.location.name!r} of {ref.location.node}"
    try:
        yield
    except grpc.aio.AioRpcError as error:
        kind = _missing(ref) if error.code() is grpc.StatusCode.NOT_FOUND else StateTransferError
        raise kind(f"{what} from {ref.location.address}: {error.details()}") from error
    except OSError as error:
        raise StateTransferError(f"{what} into {target.parent}: {explain_lack(error)}") from error
