"""The agent's ends of its workers' channels: connections on a unix socket."""

import asyncio
import logging
import os
import signal
import socket
import struct
from collections.abc import Callable
from pathlib import Path

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
        self._writers: dict[str, asyncio.StreamWriter] = {}

    async def serve(self, path: Path) -> asyncio.Server:
        """Take connections on the socket `path`."""
        return await asyncio.start_unix_server(self._attend, path)

    def send(self, worker: str, message: ToWorker) -> None:
        """Send a message to a worker; one that is not connected gets nothing."""
        writer = self._writers.get(worker)
        if writer is not None and not writer.is_closing():
            writer.write(frame(message))

    async def heard(self, worker: str) -> None:
        """Return when all is heard that a worker has said whose process has ended.

        On a busy machine the end of a process and its last words are found at once, in any order. The end of the
        connection is not waited for, nor what comes later: a child of the process may hold it.
        """
        for _ in range(TURNS):
            if worker not in self._writers:
                return
            await asyncio.sleep(0)

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hear one worker until it is gone."""
        name = ""
        try:
            hello = await _read(reader)
            if not isinstance(hello, Hello) or not self._known(hello.worker):
                _end(writer, hello)
                return
            name = hello.worker
            self._writers[name] = writer
            self._said(name, hello)
            while True:
                self._said(name, await _read(reader))
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass  # it ended, or the agent does
        except InvalidInputError as error:
            log.warning("worker %s: %s", name or "unknown", error)
        finally:
            if self._writers.get(name) is writer:
                del self._writers[name]
            writer.close()


def _end(writer: asyncio.StreamWriter, said: ToAgent) -> None:
    """End a worker that is none of this agent's: an agent that was ended as it forked it has left no record of it."""
    peer: socket.socket = writer.get_extra_info("socket")
    pid, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    log.warning("an unknown worker knocked (process %d), and nobody can order it any more: %s", pid, said)
    if isinstance(said, Hello) and user == os.getuid() and pid != os.getpid():
        os.kill(pid, signal.SIGKILL)


async def _read(reader: asyncio.StreamReader) -> ToAgent:
    length = length_of(await reader.readexactly(LENGTH.size))
    return to_agent(await reader.readexactly(length))
