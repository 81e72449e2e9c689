"""The node's rendezvous: a small key-value store where the ranks of a membership find one another.

It lives in the agent, outside the ranks, so that it survives each of them.
"""

import asyncio
import logging
from collections import OrderedDict

from unicron.contracts.worker import LENGTH, Put, Take, Taken, frame, length_of, to_rendezvous
from unicron.errors import InvalidInputError

log = logging.getLogger(__name__)

KEPT = 256
"""Rendezvous that are remembered; what one holds is needed only while its group is being formed."""


class RendezvousServer:
    """All rendezvous at this node."""

    def __init__(self) -> None:
        self._held: OrderedDict[str, dict[str, bytes]] = OrderedDict()
        self._news = asyncio.Condition()

    async def serve(self, host: str) -> tuple[asyncio.Server, str]:
        """Start the server on a free port of `host`; return it and its host:port."""
        server = await asyncio.start_server(self._attend, host, 0)
        return server, f"{host}:{server.sockets[0].getsockname()[1]}"

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one rank until it leaves."""
        try:
            while True:
                length = length_of(await reader.readexactly(LENGTH.size))
                message = to_rendezvous(await reader.readexactly(length))
                if isinstance(message, Put):
                    await self._put(message)
                elif isinstance(message, Take):
                    writer.write(frame(Taken(values=await self._take(message))))
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass  # it left, or the agent ends
        except InvalidInputError as error:
            log.warning("somebody at the rendezvous: %s", error)
        finally:
            writer.close()

    def _values(self, name: str) -> dict[str, bytes]:
        found = self._held.setdefault(name, {})
        self._held.move_to_end(name)
        if len(self._held) > KEPT:
            self._held.popitem(last=False)
        return found

    async def _put(self, message: Put) -> None:
        async with self._news:
            self._values(message.rendezvous_id)[message.key] = message.value
            self._news.notify_all()

    async def _take(self, message: Take) -> list[bytes]:
        async with self._news:
            values = self._values(message.rendezvous_id)
            await self._news.wait_for(lambda: all(key in values for key in message.keys))
            return [values[key] for key in message.keys]
