"""One reading of the journal: what the stream holds, in its order, and again whenever it has grown.

Nothing is made on the server for a reader, so reading needs no right that could hurt others: entries come by direct
gets, and a copy of each new message's headers (the stream's republishing) only says that there is something to get.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from heapq import heapify, heappop, heapreplace
from typing import Any

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext

from unicron import subjects
from unicron.bus import topology
from unicron.bus.protocol import Entry
from unicron.errors import BusUnavailableError

CHECK_S = 2.0
"""How often the journal is read without being told that it has grown: what tells it may get lost."""

BATCH = 500
"""Entries that one get asks for."""

BATCH_BYTES = 4 * 1024**2
"""Bytes of entries that one get asks for."""

NARROW = 3
"""Filters that are read one by one; with more of them everything is read, and what matches none is left out here."""

_GET, _INFO = f"$JS.API.DIRECT.GET.{topology.STREAM}", f"$JS.API.STREAM.INFO.{topology.STREAM}"

Call = Callable[..., Coroutine[Any, Any, Any]]
"""Awaits a request to the server, told what it is for and on which subjects, and raises one of our errors."""


class Reader:
    """Delivers entries behind `position` until it is interrupted, or something gets lost on the way.

    Whoever uses a reader makes a new one from the last position when this one ends.

    Attributes:
        position: up to here everything that matches has been delivered.
    """

    def __init__(self, nc: Client, js: JetStreamContext, call: Call, filters: Sequence[str], after: int) -> None:
        self._nc, self._js, self._call = nc, js, call
        self._filters = list(dict.fromkeys(filters))
        self.position = after
        self._grown = asyncio.Event()
        self._interrupted = False
        self._inbox = ""
        self._asked = 0
        self._replies: asyncio.Queue[Msg] = asyncio.Queue()
        self._subscriptions: list[Subscription] = []

    async def open(self) -> None:
        """Subscribe to what tells that the journal has grown."""
        self._inbox = self._nc.new_inbox()
        self._subscriptions.append(await self._nc.subscribe(f"{self._inbox}.*", cb=self._replies.put))
        for each in self._filters:
            self._subscriptions.append(await self._nc.subscribe(subjects.stored(each), cb=self._hint))
        await self._nc.flush()  # the server has refused by then what it does

    async def _hint(self, _: Msg) -> None:
        self._grown.set()

    async def entries(self) -> AsyncIterator[Entry]:
        """Yield entries in order, without a gap; return when that was interrupted.

        Raises:
            BusUnavailableError: the server does not answer, or not all that it sent has arrived.
        """
        while not self._interrupted:
            self._grown.clear()
            async for entry in self._stored():
                yield entry
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_S):
                    await self._grown.wait()

    async def _stored(self) -> AsyncIterator[Entry]:
        """Yield what the stream holds behind the position."""
        if not 1 < len(self._filters) <= NARROW:
            [pattern] = self._filters if len(self._filters) == 1 else [subjects.ANY]
            async for entry in self._matching(pattern, None):
                self.position = entry.sequence
                if len(self._filters) == 1 or subjects.matches(self._filters, entry.subject):
                    yield entry
            return
        # The same end for all: else one read later would be ahead of another.
        stream = await self._call(self._js.stream_info(topology.STREAM), "reading the journal's end", _INFO)
        until = stream.state.last_seq
        readings = [self._matching(each, until) for each in self._filters]
        heads = []
        for at, reading in enumerate(readings):
            with contextlib.suppress(StopAsyncIteration):
                entry = await anext(reading)
                heads.append((entry.sequence, at, entry))
        heapify(heads)
        while heads:
            sequence, at, entry = heads[0]
            try:
                following = await anext(readings[at])
                heapreplace(heads, (following.sequence, at, following))
            except StopAsyncIteration:
                heappop(heads)
            if sequence > self.position:  # one that matches two filters comes twice
                self.position = sequence
                yield entry
        self.position = max(self.position, until)

    async def _matching(self, pattern: str, until: int | None) -> AsyncIterator[Entry]:
        """Yield what matches one filter, up to the sequence `until`."""
        after, more = self.position, until is None or until > self.position
        while more:
            entries, more = await self._call(self._batch(pattern, after), "reading the journal", _GET)
            for entry in entries:
                after = entry.sequence
                if until is not None and after > until:
                    return
                yield entry

    async def _batch(self, pattern: str, after: int) -> tuple[list[Entry], bool]:
        """Return some entries that match, and whether there may be more of them."""
        self._asked += 1
        reply = f"{self._inbox}.{self._asked}"
        request = {"seq": after + 1, "next_by_subj": pattern, "batch": BATCH, "max_bytes": BATCH_BYTES}
        await self._nc.publish(_GET, json.dumps(request).encode(), reply=reply)
        entries: list[Entry] = []
        pending = "0"
        async with asyncio.timeout(2 * CHECK_S):
            while True:
                message = await self._replies.get()
                headers = message.headers or {}
                match headers.get("Status"):
                    case _ if message.subject != reply:
                        continue  # of a get that was given up
                    case None:
                        entry, before, pending = _entry(message, headers)
                        if entries and before != entries[-1].sequence:
                            raise BusUnavailableError(
                                f"an entry after {entries[-1].sequence} was lost on its way; reading it again"
                            )
                        entries.append(entry)
                    case "204":
                        if entries and headers.get("Nats-Last-Sequence") != str(entries[-1].sequence):
                            raise BusUnavailableError("the last entry was lost on its way; reading it again")
                        return entries, pending != "0"
                    case "404":
                        return entries, False
                    case "503":
                        raise nats.errors.NoRespondersError
                    case status:
                        said = headers.get("Description", "")
                        raise BusUnavailableError(f"the server gives no entries: {status} {said}")

    def interrupt(self) -> None:
        """End the reading: the connection broke."""
        self._interrupted = True
        self._grown.set()

    async def close(self) -> None:
        """Stop listening."""
        for subscription in self._subscriptions:
            with contextlib.suppress(nats.errors.Error):
                await subscription.unsubscribe()


def _entry(message: Msg, headers: dict[str, str]) -> tuple[Entry, int, str]:
    """Return the entry in a reply, the sequence of the one before it among those that were asked for, and what is left.

    Raises:
        BusUnavailableError: it is none: on an open bus anybody may write to our inbox.
    """
    try:
        entry = Entry(int(headers["Nats-Sequence"]), headers["Nats-Subject"], message.data)
        return entry, int(headers.get("Nats-Last-Sequence", 0)), headers["Nats-Num-Pending"]
    except (KeyError, ValueError) as error:
        raise BusUnavailableError("something else than an entry came for us; reading again") from error
