"""One reading of the journal: what the stream holds, in its order, and again whenever it has grown.

Nothing is made on the server for a reader, so reading needs no right that could hurt others: entries come by direct
gets, and a copy of each new message's headers (the stream's republishing) only says that there is something to get.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from heapq import heapify, heappop, heapreplace
from typing import Any

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from unicron import subjects
from unicron.bus import topology
from unicron.bus.protocol import JournalEntry
from unicron.errors import BusUnavailableError

CHECK_S, REST_S = 2.0, 8.0
"""How often the journal is read without a notice that it has grown: notices may get lost. The longer none arrives, the
rarer the reads, down to every `REST_S`: of an agent for each of 16,384 nodes most are at rest."""

BATCH = 500
"""Entries that one get asks for."""

BATCH_BYTES = 4 * 1024**2
"""Bytes of entries that one get asks for."""

NARROW = 4
"""Filters that are read one by one; with more of them everything is read, and what matches none is left out here."""

LAG_S, LAG_POLL_S = 1.0, 0.002
"""How long a server may lag behind the one that sent the notice, and how often it is polled meanwhile."""

DIGITS = 19
"""A sequence has fewer: on an open bus anybody may send a notice."""

GET = f"$JS.API.DIRECT.GET.{topology.STREAM}"

_NO_ENTRY = "something else than an entry came for us; reading again"

Call = Callable[..., Coroutine[Any, Any, Any]]
"""Sends a request to the server, with its purpose and its subjects for error texts; raises one of our errors."""


def patterns(filters: Sequence[str]) -> list[str]:
    """Return what is asked for to get what matches these filters."""
    found = list(dict.fromkeys(filters))
    return found if len(found) <= NARROW else [subjects.ANY]


class JournalReader:
    """Delivers entries until it is interrupted, or something gets lost on the way.

    A reader that has ended is replaced by a new one at the same positions. Where several servers keep copies of
    the journal any of them answers a get, and it may lag behind the one that sent the notice; so a get is repeated
    until it contains the announced entry, and nothing counts as read that was not seen.

    Args:
        nc: the connection.
        tail: returns the journal's last sequence.
        call: awaits requests.
        filters: of the journal.
        positions: by what is asked for (`patterns` of the filters), up to where everything has been delivered.
    """

    def __init__(
        self,
        nc: Client,
        tail: Callable[[], Awaitable[int]],
        call: Call,
        filters: Sequence[str],
        positions: dict[str, int],
    ) -> None:
        self._nc, self._tail, self._call = nc, tail, call
        self._filters, self._positions = filters, positions
        self._announced: dict[str, int] = {}
        self._grown = asyncio.Event()
        self._interrupted = False
        self._inbox = ""
        self._asked = 0
        self._replies: asyncio.Queue[Msg] = asyncio.Queue()
        self._subscriptions: list[Subscription] = []

    async def open(self) -> None:
        """Subscribe to notices that the journal has grown."""
        self._inbox = self._nc.new_inbox()
        self._subscriptions.append(await self._nc.subscribe(f"{self._inbox}.*", cb=self._replies.put))
        for each in dict.fromkeys(self._filters):
            hint = partial(self._hint, each if each in self._positions else subjects.ANY)
            self._subscriptions.append(await self._nc.subscribe(subjects.stored(each), cb=hint))
        await self._nc.flush()  # the server has refused by then what it does

    async def _hint(self, pattern: str, message: Msg) -> None:
        sequence = (message.headers or {}).get("Nats-Sequence", "")
        if sequence.isascii() and sequence.isdigit() and len(sequence) < DIGITS:
            self._announced[pattern] = max(self._announced.get(pattern, 0), int(sequence))
            self._grown.set()

    async def entries(self) -> AsyncIterator[JournalEntry]:
        """Yield entries in order, without a gap; return when that was interrupted.

        Raises:
            BusUnavailableError: the server does not answer, or not all that it sent has arrived.
        """
        whole, wait = True, CHECK_S  # what came before we listened
        while not self._interrupted:
            self._grown.clear()
            announced, self._announced = self._announced, {}
            if announced or await self._has_more():
                async for entry in self._read_stored(announced, whole=whole):
                    yield entry
                    wait = CHECK_S
            whole = False
            try:
                async with asyncio.timeout(wait):
                    await self._grown.wait()
            except TimeoutError:
                whole, wait = True, max(CHECK_S, min(2 * wait, REST_S))

    async def _has_more(self) -> bool:
        """Whether the journal holds more for us.

        For what comes next a server goes through all that came since our position, which is milliseconds where nothing
        was for us for long. What is the last for us it finds at once; and its end, only the one that leads knows.
        """
        for pattern, after in self._positions.items():
            if await self._call(self._last(pattern), "reading the journal", GET) > after:
                return True
        return False

    async def _read_stored(self, announced: Mapping[str, int], *, whole: bool) -> AsyncIterator[JournalEntry]:
        """Yield the journal's entries up to the announced end, or else up to its own."""
        until = None
        if len(self._positions) > 1:  # the same end for all: else one read later would be ahead of another
            until = max(announced.values(), default=0)
            if whole:
                until = max(until, await self._tail())
        asked = [pattern for pattern in self._positions if whole or pattern in announced]
        readings = [self._matching(pattern, announced.get(pattern, 0), until) for pattern in asked]
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
            self._positions[asked[at]] = sequence
            if self._delivers(asked[at], entry.subject):
                yield entry

    def _delivers(self, pattern: str, subject: str) -> bool:
        """Whether an entry is for us, and for the first time: one that matches two patterns comes twice."""
        first = next((each for each in self._positions if subjects.matches([each], subject)), None)
        return pattern == first and subjects.matches(self._filters, subject)

    async def _matching(self, pattern: str, least: int, until: int | None) -> AsyncIterator[JournalEntry]:
        """Yield what matches one pattern, from what was delivered on.

        Args:
            pattern: of subjects.
            least: sequence that was announced.
            until: sequence at which to end.
        """
        after, latest = self._positions[pattern], asyncio.get_running_loop().time() + LAG_S
        while True:
            entries, more = await self._call(self._batch(pattern, after), "reading the journal", GET)
            for entry in entries:
                if until is not None and entry.sequence > until:
                    return
                after = entry.sequence
                yield entry
            if not more:
                if after >= least or asyncio.get_running_loop().time() > latest:
                    return
                await asyncio.sleep(LAG_POLL_S)

    async def _last(self, pattern: str) -> int:
        """Return the sequence of the last entry that matches, 0 where none does."""
        async with contextlib.aclosing(self._fetch_entries({"last_by_subj": pattern})) as answers:
            async for _, headers in answers:
                if headers.get("Status") == "404":
                    return 0
                sequence = headers.get("Nats-Sequence", "")
                if sequence.isascii() and sequence.isdigit() and len(sequence) < DIGITS:
                    return int(sequence)
                break
        raise BusUnavailableError(_NO_ENTRY)

    async def _batch(self, pattern: str, after: int) -> tuple[list[JournalEntry], bool]:
        """Return some entries that match, and whether there may be more of them."""
        request = {"seq": after + 1, "next_by_subj": pattern, "batch": BATCH, "max_bytes": BATCH_BYTES}
        entries: list[JournalEntry] = []
        pending = "0"
        async with contextlib.aclosing(self._fetch_entries(request)) as answers:
            async for message, headers in answers:
                match headers.get("Status"):
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
                    case _:
                        break
        return entries, False

    async def _fetch_entries(self, request: Mapping[str, object]) -> AsyncGenerator[tuple[Msg, dict[str, str]], None]:
        """Ask a server for entries; yield what comes, with its headers, to the end that these name."""
        self._asked += 1
        reply = f"{self._inbox}.{self._asked}"
        await self._nc.publish(GET, json.dumps(request).encode(), reply=reply)
        async with asyncio.timeout(2 * CHECK_S):
            while True:
                message = await self._replies.get()
                if message.subject != reply:
                    continue  # of a get that was given up
                headers = message.headers or {}
                match headers.get("Status"):
                    case None | "204" | "404":
                        yield message, headers
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


def _entry(message: Msg, headers: dict[str, str]) -> tuple[JournalEntry, int, str]:
    """Return the entry in a reply, the sequence of the one before it among those that were asked for, and what is left.

    Raises:
        BusUnavailableError: it is none: on an open bus anybody may write to our inbox.
    """
    try:
        entry = JournalEntry(int(headers["Nats-Sequence"]), headers["Nats-Subject"], message.data)
        return entry, int(headers.get("Nats-Last-Sequence", 0)), headers["Nats-Num-Pending"]
    except (KeyError, ValueError) as error:
        raise BusUnavailableError(_NO_ENTRY) from error
