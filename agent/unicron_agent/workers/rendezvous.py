"""The node's rendezvous server: a small key-value store through which the ranks of a membership find one another.

It runs in the agent, so that it survives each rank.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Hashable

from unicron.addresses import Address
from unicron.contracts.frames import LENGTH, LIMIT, frame, length_of
from unicron.contracts.rendezvous import Challenge, Enter, Put, Take, Taken, ToRendezvous, to_rendezvous
from unicron.errors import InvalidInputError
from unicron.fabric_proofs import nonce
from unicron_agent.fabric import Fabric, RefusalLog

log = logging.getLogger(__name__)

KEPT = 256
"""How many rendezvous are kept; the values of one are needed only while its group is being formed."""

ENTER_S = 5.0
"""How long a rank may take to prove that it belongs here."""

ENTER_BYTES = 8192
"""Largest message of a rank that has not proven yet that it belongs here."""

UNPROVEN = 512
"""Most connections without a proof: one more, and the oldest of them is closed. A rank takes milliseconds to prove."""


class RendezvousServer:
    """Serves all rendezvous at this node.

    Args:
        fabric: authenticates ranks.
    """

    def __init__(self, fabric: Fabric) -> None:
        self._fabric, self._strangers, self._address = fabric, RefusalLog("rendezvous"), ""
        self._values_of: OrderedDict[Hashable, dict[tuple[str, str], bytes]] = OrderedDict()
        self._changed = asyncio.Condition()
        self._unproven: dict[asyncio.StreamWriter, None] = {}

    async def serve(self, host: str) -> tuple[asyncio.Server, str]:
        """Start the server on a free port of `host`; return it and its host:port."""
        server = await asyncio.start_server(self._serve_connection, host, 0)
        self._address = str(Address(host, server.sockets[0].getsockname()[1]))
        return server, self._address

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one rank until it leaves."""
        try:
            if not self._fabric.requires_proof:
                await self._serve_rank(None, reader, writer)
            elif (enter := await self._authenticate(reader, writer)) is not None:
                await self._serve_rank((enter.rendezvous_id, enter.epoch), reader, writer)
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass  # it left, or the agent ends
        except InvalidInputError as error:
            log.warning("somebody at the rendezvous: %s", error)
        finally:
            writer.close()

    async def _authenticate(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Enter | None:
        """Have a rank prove its membership; return the proof, or None if it fails."""
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
        self._strangers.record(host, reason)
        return None

    async def _challenge(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Enter:
        challenge = nonce()
        writer.write(frame(Challenge(nonce=challenge)))
        enter = await _read(reader, ENTER_BYTES)
        if not isinstance(enter, Enter):
            raise InvalidInputError("it showed no proof: name the fabric key in UNICRON_FABRIC_KEY on its node too")
        if not self._fabric.verify_entry(enter, self._address, challenge):
            raise InvalidInputError(
                f"its proof for {enter.rendezvous_id}-{enter.epoch} does not hold: give both nodes the same fabric key"
            )
        return enter

    async def _serve_rank(
        self, membership: Hashable | None, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve a rank: only the membership that it has proven, or, without a fabric key, any rendezvous it names."""
        while True:
            message = await _read(reader)
            if isinstance(message, Put | Take):
                there = message.rendezvous_id if membership is None else membership
                if isinstance(message, Put):
                    await self._put(there, message)
                else:
                    writer.write(frame(Taken(values=await self._take(there, message))))

    def _values(self, membership: Hashable) -> dict[tuple[str, str], bytes]:
        found = self._values_of.setdefault(membership, {})
        self._values_of.move_to_end(membership)
        if len(self._values_of) > KEPT:
            self._values_of.popitem(last=False)
        return found

    async def _put(self, membership: Hashable, message: Put) -> None:
        async with self._changed:
            self._values(membership)[message.rendezvous_id, message.key] = message.value
            self._changed.notify_all()

    async def _take(self, membership: Hashable, message: Take) -> list[bytes]:
        async with self._changed:
            values = self._values(membership)
            wanted = [(message.rendezvous_id, key) for key in message.keys]
            if not message.waits:
                return [values.get(each, b"") for each in wanted]
            await self._changed.wait_for(lambda: all(each in values for each in wanted))
            return [values[each] for each in wanted]


async def _read(reader: asyncio.StreamReader, limit: int = LIMIT) -> ToRendezvous:
    length = length_of(await reader.readexactly(LENGTH.size), limit)
    return to_rendezvous(await reader.readexactly(length))
