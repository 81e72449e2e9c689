"""The agent's ends of its workers' channels: connections on a unix socket."""

import asyncio
import logging
import os
import signal
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import cast

from unicron.contracts.frames import LENGTH, frame, length_of
from unicron.contracts.worker import Hello, ToAgent, ToWorker, to_agent
from unicron.errors import InvalidInputError

log = logging.getLogger(__name__)

TURNS = 20
"""Of the event loop, each of which receives 256 KiB: more than a socket holds when its sender has ended."""


class Channels:
    """The connections of this node's workers, by worker."""

    def __init__(self, is_known: Callable[[str], bool], on_message: Callable[[str, ToAgent], object]) -> None:
        """Make it.

        Args:
            is_known: returns whether a worker is this agent's.
            on_message: called with the name of a worker and its message.
        """
        self._is_known, self._on_message = is_known, on_message
        self._connections: dict[str, asyncio.WriteTransport] = {}

    async def serve(self, path: Path) -> asyncio.Server:
        """Take connections on the socket `path`."""
        return await asyncio.get_running_loop().create_unix_server(lambda: _WorkerConnection(self), path)

    def send(self, worker: str, message: ToWorker) -> None:
        """Send a message to a worker; one that is not connected gets nothing."""
        transport = self._connections.get(worker)
        if transport is not None and not transport.is_closing():
            transport.write(frame(message))

    async def drain(self, worker: str) -> None:
        """Receive the last messages of a worker whose process has ended.

        On a busy machine the end of a process and its last messages become visible at once, in any order. This does
        not wait for the end of the connection, which a child of the process may hold open.
        """
        for _ in range(TURNS):
            if worker not in self._connections:
                return
            await asyncio.sleep(0)

    def receive(self, name: str, message: ToAgent, transport: asyncio.WriteTransport) -> str:
        """Handle a message on the connection of the worker `name` (empty before its `Hello`); return the name."""
        if not name:
            if not isinstance(message, Hello) or not self._is_known(message.worker):
                _kill_unknown(transport, message)
                return ""
            name = message.worker
            self._connections[name] = transport
        self._on_message(name, message)
        return name

    def disconnected(self, name: str, transport: asyncio.WriteTransport) -> None:
        """Forget a connection that has ended."""
        if self._connections.get(name) is transport:
            del self._connections[name]


class _WorkerConnection(asyncio.Protocol):
    """A worker's connection. The event loop calls it with data, which is cheaper than a task for each worker."""

    _transport: asyncio.Transport

    def __init__(self, channels: Channels) -> None:
        self._channels, self._name, self._data = channels, "", bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._data += data
        try:
            while not self._transport.is_closing() and (message := self._next()):
                self._name = self._channels.receive(self._name, message, self._transport)
                if not self._name:
                    self._transport.close()
        except InvalidInputError as error:
            log.warning("worker %s: %s", self._name or "unknown", error)
            self._transport.close()

    def _next(self) -> ToAgent | None:
        """Return the next message, None where it is not whole yet."""
        start = LENGTH.size
        if len(self._data) < start or len(self._data) < (end := start + length_of(bytes(self._data[:start]))):
            return None
        message = to_agent(bytes(self._data[start:end]))
        del self._data[:end]
        return message

    def connection_lost(self, _: Exception | None) -> None:
        self._channels.disconnected(self._name, self._transport)


def _kill_unknown(transport: asyncio.WriteTransport, on_message: ToAgent) -> None:
    """Kill a worker that is not this agent's: an earlier agent died between its fork and its record."""
    peer: socket.socket = transport.get_extra_info("socket")
    pid, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    log.warning("an unknown worker knocked (process %d), and nobody can order it any more: %s", pid, on_message)
    if isinstance(on_message, Hello) and user == os.getuid() and pid != os.getpid():
        os.kill(pid, signal.SIGKILL)
