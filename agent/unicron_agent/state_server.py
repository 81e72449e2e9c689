"""Hands the states that workers of this node have exported to other nodes: a gRPC stream of chunks."""

import re
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio

from unicron.contracts.states import KEPT, LENT
from unicron.errors import StateTransferError

METHOD = "/unicron.v1.State/Fetch"
CHUNK = 2 * 1024 * 1024
LIMITS = [("grpc.max_receive_message_length", CHUNK + 1024), ("grpc.max_send_message_length", CHUNK + 1024)]

_NAME = re.compile(rf"[A-Za-z0-9_-]{{1,200}}\.[0-9]+\.({LENT}|{KEPT})")


def exported(directory: Path, name: str) -> Path:
    """Return the file of the exported state `name` ("WORKER.EPOCH.state", or "WORKER.EPOCH.kept").

    Raises:
        StateTransferError: it is no such name, or there is no such state.
    """
    if not _NAME.fullmatch(name):
        raise StateTransferError(f"state {name!r}: expected WORKER.EPOCH.{LENT} or WORKER.EPOCH.{KEPT}")
    path = directory / name
    if not path.is_file():
        raise StateTransferError(f"state {name}: it is not there (any more)")
    return path


def kept(directory: Path) -> list[str]:
    """Return the names of the states that workers have left behind."""
    names = (path.name for path in directory.glob(f"*.{KEPT}"))
    return sorted(name for name in names if _NAME.fullmatch(name))


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
        except StateTransferError as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                yield chunk


async def serve(host: str, directory: Path) -> tuple[grpc.aio.Server, str]:
    """Start the server on a free port of `host`; return it and its host:port."""
    server = grpc.aio.server(options=LIMITS)
    server.add_generic_rpc_handlers((_Fetch(directory),))
    port = server.add_insecure_port(f"{host}:0")
    await server.start()
    return server, f"{host}:{port}"
