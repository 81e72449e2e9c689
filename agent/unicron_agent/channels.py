"""The agent's ends of its workers' channels: connections on a unix socket."""

import asyncio
import fcntl
import logging
import struct
import termios
from collections.abc import Callable
from pathlib import Path

from unicron.contracts.worker import LENGTH, Hello, ToAgent, ToWorker, frame, length_of, to_agent
from unicron.errors import InvalidInputError

log = logging.getLogger(__name__)

TURNS = 5
"""Of the event loop, within which what was received is heard."""


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

        On a busy machine the end of a process and its last words are found at once, in any order. Its connection need
        not have ended: a child of it may hold that.
        """
        quiet = 0
        while quiet < TURNS and (writer := self._writers.get(worker)) is not None:
            quiet = 0 if _unread(writer) else quiet + 1
            await asyncio.sleep(0)

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hear one worker until it is gone."""
        name = ""
        try:
            hello = await _read(reader)
            if not isinstance(hello, Hello) or not self._known(hello.worker):
                log.warning("an unknown worker knocked: %s", hello)
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


def _unread(writer: asyncio.StreamWriter) -> bool:
    """Return whether the kernel holds something that was sent to us and that we have not received."""
    descriptor = writer.get_extra_info("socket").fileno()
    if descriptor < 0:
        return False
    (count,) = struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))
    return bool(count)


async def _read(reader: asyncio.StreamReader) -> ToAgent:
    length = length_of(await reader.readexactly(LENGTH.size))
    return to_agent(await reader.readexactly(length))
