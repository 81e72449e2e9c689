"""States of workers on their way between nodes: a gRPC stream of chunks, held against a checksum."""

import asyncio
import hashlib
import logging
import re
from collections.abc import AsyncIterator
from hashlib import blake2b
from pathlib import Path

import grpc
import grpc.aio

from unicron.contracts.states import StateRef
from unicron.contracts.worker import StateFetched
from unicron.errors import InvalidInputError

log = logging.getLogger(__name__)

METHOD = "/unicron.v1.State/Fetch"
CHUNK = 2 * 1024 * 1024

_NAME = re.compile(r"[A-Za-z0-9_-]{1,200}\.[0-9]+\.state")


def exported(directory: Path, name: str) -> Path:
    """Return the file of the exported state `name` ("WORKER.EPOCH.state").

    Raises:
        InvalidInputError: it is no such name, or there is no such state.
    """
    if not _NAME.fullmatch(name):
        raise InvalidInputError(f"state {name!r}: expected WORKER.EPOCH.state")
    path = directory / name
    if not path.is_file():
        raise InvalidInputError(f"state {name}: it is not there (any more)")
    return path


def checksum_of(path: Path) -> bytes:
    """Return the checksum of a file's content, as `StateRef` has it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: blake2b(digest_size=16)).digest()


class _Fetch(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        if details.method != METHOD:
            return None
        return grpc.unary_stream_rpc_method_handler(self._send)

    async def _send(self, request: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        try:
            path = exported(self._directory, request.decode(errors="replace"))
        except InvalidInputError as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                yield chunk


async def serve(host: str, directory: Path) -> tuple[grpc.aio.Server, str]:
    """Start the server on a free port of `host`; return it and its host:port."""
    server = grpc.aio.server(options=_LIMITS)
    server.add_generic_rpc_handlers((_Fetch(directory),))
    port = server.add_insecure_port(f"{host}:0")
    await server.start()
    return server, f"{host}:{port}"


async def fetch(ref: StateRef, target: Path) -> None:
    """Copy the state `ref` from another node to the file `target`, checked.

    Raises:
        InvalidInputError: the source can't be reached, has no such state, or its checksum is wrong; `target` is not
            there then.
    """
    name, address = ref.location.name, ref.location.address
    unfinished = target.with_suffix(".part")
    digest = blake2b(digest_size=16)
    try:
        async with grpc.aio.insecure_channel(address, options=_LIMITS) as channel:
            with unfinished.open("wb") as file:
                async for piece in channel.unary_stream(METHOD)(name.encode(), timeout=600):
                    digest.update(piece)
                    file.write(piece)
    except grpc.aio.AioRpcError as error:
        unfinished.unlink(missing_ok=True)
        raise InvalidInputError(f"state {name} from {address}: {error.details()}") from error
    if ref.checksum != digest.digest():
        unfinished.unlink(missing_ok=True)
        raise InvalidInputError(f"state {name} from {address}: wrong checksum, what arrived is not what was sent")
    unfinished.rename(target)


def _checked(directory: Path, ref: StateRef) -> Path:
    path = exported(directory, ref.location.name)
    if checksum_of(path) != ref.checksum:
        raise InvalidInputError(f"state {path.name}: wrong checksum, what lies there is not what was exported")
    return path


async def obtain(directory: Path, worker: str, node: str, ref: StateRef) -> StateFetched:
    """Get a state for `worker` on this `node`, from a peer beside it or from another node; return what to tell it."""
    name, own = ref.location.name, ref.location.node != node
    try:
        if own:
            path = directory / f"{worker}.fetched"
            await fetch(ref, path)
        else:
            path = await asyncio.to_thread(_checked, directory, ref)
    except (InvalidInputError, OSError) as error:
        log.warning("worker %s gets no state: %s", worker, error)
        return StateFetched(name=name, error=str(error))
    return StateFetched(name=name, path=str(path), own=own)


_LIMITS = [("grpc.max_receive_message_length", CHUNK + 1024), ("grpc.max_send_message_length", CHUNK + 1024)]
