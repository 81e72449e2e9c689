"""One reading of the journal: an ephemeral push consumer whose deliveries are checked for gaps."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from unicron.bus import topology
from unicron.bus.protocol import Entry

HEARTBEAT_S = 1.0
"""How often the server gives a sign of life while there is nothing to deliver; after two missed ones we start over."""


class Reader:
    """Delivers entries from `after` on, until a gap, silence or an interruption ends it.

    The consumer lives in the server's memory: nothing is left behind, and a restarted server does not know it. Whoever
    uses a reader makes a new one from the last position when this one ends.
    """

    def __init__(self, nc: Client, js: JetStreamContext, filters: Sequence[str], after: int) -> None:
        self._nc = nc
        self._js = js
        self._filters = list(dict.fromkeys(filters))
        self._after = after
        self._messages: asyncio.Queue[Msg | None] = asyncio.Queue()
        self._subscription: Subscription | None = None

    async def open(self) -> None:
        """Subscribe, then let the server deliver."""
        inbox = self._nc.new_inbox()
        self._subscription = await self._nc.subscribe(inbox, cb=self._messages.put)
        await self._js.add_consumer(
            topology.STREAM,
            ConsumerConfig(
                deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
                opt_start_seq=self._after + 1,
                ack_policy=AckPolicy.NONE,
                filter_subjects=self._filters,
                deliver_subject=inbox,
                flow_control=True,
                idle_heartbeat=HEARTBEAT_S,
                mem_storage=True,
                num_replicas=1,
                inactive_threshold=10.0,
            ),
        )

    async def entries(self) -> AsyncIterator[Entry]:
        """Yield entries in order, without a gap; return when that is no longer possible."""
        delivered = 0
        while True:
            try:
                async with asyncio.timeout(2 * HEARTBEAT_S):
                    message = await self._messages.get()
            except TimeoutError:
                return
            if message is None:
                return
            if message.headers and message.headers.get("Status") == "100":
                if not await self._alive(message, delivered):
                    return
                continue
            delivered += 1
            sequence = message.metadata.sequence
            if sequence.consumer != delivered:
                return
            yield Entry(sequence.stream, message.subject, message.data)

    async def _alive(self, message: Msg, delivered: int) -> bool:
        """Answer flow control; return whether the server counts as many deliveries as we do."""
        headers = message.headers or {}
        gate = message.reply or headers.get("Nats-Consumer-Stalled")
        if gate:
            await self._nc.publish(gate)
        counted = headers.get("Nats-Last-Consumer")
        return counted is None or int(counted) == delivered

    def interrupt(self) -> None:
        """End the reading: the connection broke."""
        self._messages.put_nowait(None)

    async def close(self) -> None:
        """Stop listening; the server then drops the consumer by itself."""
        if self._subscription is not None:
            with contextlib.suppress(nats.errors.Error):
                await self._subscription.unsubscribe()
