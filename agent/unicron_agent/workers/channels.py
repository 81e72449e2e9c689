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

from unicron.contracts.worker import LENGTH, Hello, ToAgent, ToWorker, frame, length_of, to_agent
from unicron.errors import InvalidInputError

log = logging.getLogger(__name__)

TURNS = 20
"""Of the event loop, each of which receives 256 KiB: more than a socket holds when its sender has ended."""


class Channels:
    """Workers that are connected, by name."""

    def __init__(self, known: Callable[[str], bool], said: Callable[[str, ToAgent], object]) -> None:
        """Make it.

        Args:
            known: whether a worker is this agent's.
            said: is called with the name of a worker and what it says.
        """
        self._known, self._said = known, said
        self._lines: dict[str, asyncio.WriteTransport] = {}

    async def serve(self, path: Path) -> asyncio.Server:
        """Take connections on the socket `path`."""
        return await asyncio.get_running_loop().create_unix_server(lambda: _Line(self), path)

    def send(self, worker: str, message: ToWorker) -> None:
        """Send a message to a worker; one that is not connected gets nothing."""
        line = self._lines.get(worker)
        if line is not None and not line.is_closing():
            line.write(frame(message))

    async def heard(self, worker: str) -> None:
        """Return when all is heard that a worker has said whose process has ended.

        On a busy machine the end of a process and its last words are found at once, in any order. The end of the
        connection is not waited for, nor what comes later: a child of the process may hold it.
        """
        for _ in range(TURNS):
            if worker not in self._lines:
                return
            await asyncio.sleep(0)

    def hear(self, name: str, message: ToAgent, line: asyncio.WriteTransport) -> str:
        """Hear what came on a connection of the worker `name`, empty before it has greeted; return its name."""
        if not name:
            if not isinstance(message, Hello) or not self._known(message.worker):
                _end(line, message)
                return ""
            name = message.worker
            self._lines[name] = line
        self._said(name, message)
        return name

    def lost(self, name: str, line: asyncio.WriteTransport) -> None:
        """Forget a connection that has ended."""
        if self._lines.get(name) is line:
            del self._lines[name]


class _Line(asyncio.Protocol):
    """A worker's connection. No task reads it, which would have to be woken up for each message in its turn."""

    _line: asyncio.Transport

    def __init__(self, channels: Channels) -> None:
        self._channels, self._name, self._data = channels, "", bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._line = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._data += data
        try:
            while not self._line.is_closing() and (message := self._next()):
                self._name = self._channels.hear(self._name, message, self._line)
                if not self._name:
                    self._line.close()
        except InvalidInputError as error:
            log.warning("worker %s: %s", self._name or "unknown", error)
            self._line.close()

    def _next(self) -> ToAgent | None:
        """Return the next message, None where it is not whole yet."""
        start = LENGTH.size
        if len(self._data) < start or len(self._data) < (end := start + length_of(bytes(self._data[:start]))):
            return None
        message = to_agent(bytes(self._data[start:end]))
        del self._data[:end]
        return message

    def connection_lost(self, _: Exception | None) -> None:
        self._channels.lost(self._name, self._line)


def _end(line: asyncio.WriteTransport, said: ToAgent) -> None:
    """End a worker that is none of this agent's: an agent that was ended as it forked it has left no record of it."""
    peer: socket.socket = line.get_extra_info("socket")
    pid, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    log.warning("an unknown worker knocked (process %d), and nobody can order it any more: %s", pid, said)
    if isinstance(said, Hello) and user == os.getuid() and pid != os.getpid():
        os.kill(pid, signal.SIGKILL)
