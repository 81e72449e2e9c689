"""The node's rendezvous: a small key-value store where the ranks of a membership find one another.

It lives in the agent, outside the ranks, so that it survives each of them.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Hashable

from unicron.contracts.worker import (
    LENGTH,
    LIMIT,
    Challenge,
    Enter,
    Put,
    Take,
    Taken,
    ToRendezvous,
    frame,
    length_of,
    to_rendezvous,
)
from unicron.errors import InvalidInputError
from unicron.fabric_proofs import nonce
from unicron_agent.fabric import Fabric, Strangers

log = logging.getLogger(__name__)

KEPT = 256
"""Rendezvous that are remembered; what one holds is needed only while its group is being formed."""

ENTER_S = 5.0
"""How long a rank may take to prove that it belongs here."""

ENTER_BYTES = 8192
"""More than a rank says to prove it."""

UNPROVEN = 512
"""Connections that have proven nothing yet: one more, and the oldest of them has to go. A rank takes milliseconds."""


class RendezvousServer:
    """All rendezvous at this node.

    Args:
        fabric: what opens them.
    """

    def __init__(self, fabric: Fabric) -> None:
        self._fabric, self._strangers, self._address = fabric, Strangers("rendezvous"), ""
        self._held: OrderedDict[Hashable, dict[tuple[str, str], bytes]] = OrderedDict()
        self._news = asyncio.Condition()
        self._unproven: dict[asyncio.StreamWriter, None] = {}

    async def serve(self, host: str) -> tuple[asyncio.Server, str]:
        """Start the server on a free port of `host`; return it and its host:port."""
        server = await asyncio.start_server(self._attend, host, 0)
        self._address = f"{host}:{server.sockets[0].getsockname()[1]}"
        return server, self._address

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one rank until it leaves."""
        try:
            if not self._fabric.closed:
                await self._serve(None, reader, writer)
            elif (enter := await self._entered(reader, writer)) is not None:
                await self._serve((enter.rendezvous_id, enter.epoch), reader, writer)
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass  # it left, or the agent ends
        except InvalidInputError as error:
            log.warning("somebody at the rendezvous: %s", error)
        finally:
            writer.close()

    async def _entered(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Enter | None:
        """Have a rank prove of which membership it is; return that, or None where it does not."""
        self._unproven[writer] = None
        if len(self._unproven) > UNPROVEN:
            oldest = next(iter(self._unproven))
            del self._unproven[oldest]
            oldest.transport.abort()
        reason = "it proved nothing"
        try:
            async with asyncio.timeout(ENTER_S):
                return await self._challenge(reader, writer)
        except InvalidInputError as error:
            reason = str(error)
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._unproven.pop(writer, None)
        host, *_ = writer.get_extra_info("peername") or ("somebody",)
        self._strangers.note(host, reason)
        return None

    async def _challenge(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Enter:
        challenge = nonce()
        writer.write(frame(Challenge(nonce=challenge)))
        enter = await _read(reader, ENTER_BYTES)
        if not isinstance(enter, Enter):
            raise InvalidInputError("it showed no proof: name the fabric key in UNICRON_FABRIC_KEY on its node too")
        if not self._fabric.admits(enter, self._address, challenge):
            raise InvalidInputError(
                f"its proof for {enter.rendezvous_id}-{enter.epoch} does not hold: give both nodes the same fabric key"
            )
        return enter

    async def _serve(
        self, membership: Hashable | None, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve a rank of the membership that it has proven, or else at whatever rendezvous it names."""
        while True:
            message = await _read(reader)
            if isinstance(message, Put | Take):
                there = message.rendezvous_id if membership is None else membership
                if isinstance(message, Put):
                    await self._put(there, message)
                else:
                    writer.write(frame(Taken(values=await self._take(there, message))))

    def _values(self, membership: Hashable) -> dict[tuple[str, str], bytes]:
        found = self._held.setdefault(membership, {})
        self._held.move_to_end(membership)
        if len(self._held) > KEPT:
            self._held.popitem(last=False)
        return found

    async def _put(self, membership: Hashable, message: Put) -> None:
        async with self._news:
            self._values(membership)[message.rendezvous_id, message.key] = message.value
            self._news.notify_all()

    async def _take(self, membership: Hashable, message: Take) -> list[bytes]:
        async with self._news:
            values = self._values(membership)
            wanted = [(message.rendezvous_id, key) for key in message.keys]
            if not message.waits:
                return [values.get(each, b"") for each in wanted]
            await self._news.wait_for(lambda: all(each in values for each in wanted))
            return [values[each] for each in wanted]


async def _read(reader: asyncio.StreamReader, limit: int = LIMIT) -> ToRendezvous:
    length = length_of(await reader.readexactly(LENGTH.size), limit)
    return to_rendezvous(await reader.readexactly(length))
