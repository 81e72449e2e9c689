"""States of workers on their way between nodes: a gRPC stream of chunks, closed by a checksum."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from hashlib import blake2b
from pathlib import Path

import grpc
import grpc.aio

from unicron.contracts.worker import FetchState, StateFetched
from unicron.errors import InvalidInputError

log = logging.getLogger(__name__)

METHOD = "/unicron.v1.State/Fetch"
CHUNK = 2 * 1024 * 1024
EXPORT_S = 60.0
"""How long a holder may take to export its state."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,200}\.[0-9]+-[0-9]+")


def path_of(directory: Path, name: str) -> Path:
    """Return the file of the exported state `name` ("worker.epoch-attempt").

    Raises:
        InvalidInputError: it is no such name.
    """
    if not _NAME.fullmatch(name):
        raise InvalidInputError(f"state {name!r}: expected WORKER.EPOCH-ATTEMPT")
    return directory / f"{name}.state"


async def exported(directory: Path, name: str) -> Path:
    """Wait until the state `name` is there, and return its path.

    Raises:
        InvalidInputError: it is not there in time.
    """
    path = path_of(directory, name)
    for _ in range(int(EXPORT_S / 0.005)):
        if path.exists():
            return path
        await asyncio.sleep(0.005)
    raise InvalidInputError(f"state {name}: its holder exported nothing within {EXPORT_S:.0f} s")


class _Fetch(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        if details.method != METHOD:
            return None
        return grpc.unary_stream_rpc_method_handler(self._send)

    async def _send(self, request: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        try:
            path = await exported(self._directory, request.decode(errors="replace"))
        except InvalidInputError as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        digest = blake2b(digest_size=16)
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
                yield b"d" + chunk
        yield b"s" + digest.digest()


async def serve(host: str, directory: Path) -> tuple[grpc.aio.Server, str]:
    """Start the server on a free port of `host`; return it and its host:port."""
    server = grpc.aio.server(options=_LIMITS)
    server.add_generic_rpc_handlers((_Fetch(directory),))
    port = server.add_insecure_port(f"{host}:0")
    await server.start()
    return server, f"{host}:{port}"


async def fetch(address: str, name: str, target: Path) -> None:
    """Copy the state `name` from the server at `address` to the file `target`, checked.

    Raises:
        InvalidInputError: the source can't be reached, has no such state, or its checksum is wrong; `target` is not
            there then.
    """
    unfinished = target.with_suffix(".part")
    digest, announced = blake2b(digest_size=16), b""
    try:
        async with grpc.aio.insecure_channel(address, options=_LIMITS) as channel:
            with unfinished.open("wb") as file:
                async for piece in channel.unary_stream(METHOD)(name.encode(), timeout=600):
                    if piece[:1] == b"d":
                        digest.update(piece[1:])
                        file.write(piece[1:])
                    else:
                        announced = piece[1:]
    except grpc.aio.AioRpcError as error:
        unfinished.unlink(missing_ok=True)
        raise InvalidInputError(f"state {name} from {address}: {error.details()}") from error
    if announced != digest.digest():
        unfinished.unlink(missing_ok=True)
        raise InvalidInputError(f"state {name} from {address}: wrong checksum, what arrived is not what was sent")
    unfinished.rename(target)


async def obtain(directory: Path, worker: str, node: str, wanted: FetchState) -> StateFetched:
    """Get a state for `worker` on this `node`, from a peer beside it or from another node; return what to tell it."""
    name = f"{wanted.source.worker}.{wanted.key}"
    try:
        if wanted.source.node == node:
            path = await exported(directory, name)
        else:
            path = directory / f"{worker}.{wanted.key}.fetched"
            await fetch(wanted.source.state_server, name, path)
    except (InvalidInputError, OSError) as error:
        log.warning("worker %s gets no state: %s", worker, error)
        return StateFetched(key=wanted.key, error=str(error))
    return StateFetched(key=wanted.key, path=str(path))


_LIMITS = [("grpc.max_receive_message_length", CHUNK + 1024), ("grpc.max_send_message_length", CHUNK + 1024)]
