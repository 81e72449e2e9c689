"""Queues of an agent's facts and telemetry on their way to the bus."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import partial

import msgspec

from unicron import codec, subjects
from unicron.aio import retry_until_available
from unicron.bus.protocol import Bus
from unicron.clock import Clock
from unicron.contracts.base import Message
from unicron.errors import BusUnavailableError, InvalidInputError

log = logging.getLogger(__name__)


class Outbox:
    """Publishes facts to the journal in order; they wait while the bus is away.

    Telemetry does not wait behind facts, and may be lost.

    Attributes:
        clock: of this node.
        unpublished: how many facts the bus has not taken yet.
    """

    def __init__(
        self, bus: Bus, clock: Clock, node: str, boot: str, on_sent: Callable[[], None] = lambda: None
    ) -> None:
        self._bus, self.clock, self._node, self._boot = bus, clock, node, boot
        self._on_sent = on_sent
        self._facts: asyncio.Queue[Message] = asyncio.Queue()
        self._telemetry: asyncio.Queue[Message] = asyncio.Queue()
        self._count = 0
        self.unpublished = 0

    def put(self, fact: Message) -> None:
        """Queue a fact or telemetry; without a correlation it begins a chain."""
        self._count += 1
        identity = f"{self._boot}-{self._count}"
        stamped = msgspec.structs.replace(
            fact,
            id=identity,
            at=self.clock.now(),
            source=self._node,
            correlation=fact.correlation or identity,
        )
        if isinstance(fact, subjects.TELEMETRY):
            self._telemetry.put_nowait(stamped)
        else:
            self.unpublished += 1
            self._facts.put_nowait(stamped)

    async def publish(self, published: Callable[[Message, int], object]) -> None:
        """Publish facts until cancelled; `published` is called with each and its place in the journal."""
        while True:
            fact = await self._facts.get()
            append = partial(self._bus.append, subjects.for_message(fact), codec.encode(fact), fact.id)
            try:
                sequence = await retry_until_available(append, f"publishing {type(fact).__name__}")
            except InvalidInputError as error:  # it will never be taken, and the next must not wait for that
                log.error("can't say %s: %s", type(fact).__name__, error)  # noqa: TRY400
                self.unpublished -= 1
            else:
                self.unpublished -= 1
                published(fact, sequence)

    async def send_telemetry(self) -> None:
        """Send telemetry until cancelled: if heartbeats waited for the journal, the node would be declared lost."""
        while True:
            telemetry = await self._telemetry.get()
            with contextlib.suppress(BusUnavailableError):
                await self._bus.publish_telemetry(subjects.for_message(telemetry), codec.encode(telemetry))
                self._on_sent()
