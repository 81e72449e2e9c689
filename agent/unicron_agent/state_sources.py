"""Where a worker's state can be had from: the memory of this node, or a peer's node."""

import asyncio
import contextlib
import hashlib
import os
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

import grpc
import grpc.aio

from unicron.contracts.states import StateRef
from unicron.errors import StateTransferError
from unicron_agent.state_server import LIMITS, METHOD, exported


class StateSource(Protocol):
    """A way to obtain a state."""

    async def obtain(self, ref: StateRef, target: Path) -> Path:
        """Make the state `ref` the file `target`, whole and checked, and return it; it is the caller's to remove.

        Raises:
            StateTransferError: the source lacks it, goes away, or hands over something else; or there is no room.
                Nothing is left behind.
        """


class SharedMemory:
    """A state that a worker of this node has exported."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def obtain(self, ref: StateRef, target: Path) -> Path:
        """Give the file a second name, which stays when its holder removes the first."""
        with _whole(ref, target) as unfinished:
            os.link(exported(self._directory, ref.location.name), unfinished)
            _check(ref, await asyncio.to_thread(_checksum, unfinished))
        return target


class Peer:
    """A state on another node, from its agent's state server."""

    async def obtain(self, ref: StateRef, target: Path) -> Path:
        """Copy the file, piece by piece."""
        digest = blake2b(digest_size=16)
        with _whole(ref, target) as unfinished:
            async with grpc.aio.insecure_channel(ref.location.address, options=LIMITS) as channel:
                with unfinished.open("wb") as file:
                    async for piece in channel.unary_stream(METHOD)(ref.location.name.encode(), timeout=600):
                        digest.update(piece)
                        file.write(piece)
            _check(ref, digest.digest())
        return target


def source_of(ref: StateRef, node: str, directory: Path) -> StateSource:
    """Return where to obtain `ref` from on this `node`, whose workers export to `directory`."""
    return SharedMemory(directory) if ref.location.node == node else Peer()


@contextlib.contextmanager
def _whole(ref: StateRef, target: Path) -> Iterator[Path]:
    """Lend a file to fill, and make it `target` if nothing goes wrong; else remove it and say what did."""
    unfinished = target.with_suffix(".part")
    what = f"state {ref.location.name!r} of {ref.location.node}"
    try:
        unfinished.unlink(missing_ok=True)
        yield unfinished
        unfinished.rename(target)
    except grpc.aio.AioRpcError as error:
        raise StateTransferError(f"{what} from {ref.location.address}: {error.details()}") from error
    except OSError as error:
        raise StateTransferError(f"{what} into {target.parent}: {error.strerror}; make room there") from error
    finally:
        unfinished.unlink(missing_ok=True)


def _check(ref: StateRef, checksum: bytes) -> None:
    if checksum != ref.checksum:
        name, node = ref.location.name, ref.location.node
        raise StateTransferError(f"state {name!r} of {node}: wrong checksum; this is not what was exported")


def _checksum(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: blake2b(digest_size=16)).digest()
