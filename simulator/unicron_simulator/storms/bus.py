"""The bus in one process: the same contract as on NATS, for simulations and for fast tests.

A `MemoryWorld` takes the place of the server; each `MemoryBus` is a connection to it. Time comes from the world's
clock, so that a world can live in virtual time.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from unicron import subjects
from unicron.bus.protocol import Bus, Handler, JournalEntry, Revisioned, TelemetryEntry
from unicron.clock import Clock
from unicron.errors import BusUnavailableError, ConflictError, NobodyAnswersError

Inbox = asyncio.Queue[TelemetryEntry | None]


class MemoryBucket:
    """A key-value bucket; see `Bucket`. Entries vanish `ttl_s` seconds after they were written."""

    def __init__(self, name: str, clock: Clock, ttl_s: float | None) -> None:
        self._name = name
        self._clock = clock
        self._ttl_s = ttl_s
        self._entries: dict[str, tuple[Revisioned, float]] = {}
        self._former: dict[str, Revisioned] = {}
        self._revision = 0

    def stored(self) -> list[str]:
        """Return all keys."""
        return sorted(self._entries)

    async def get(self, key: str) -> Revisioned | None:
        """Return the value, or None."""
        await asyncio.sleep(0)
        return self._current(key)

    async def before(self, key: str, revision: int) -> Revisioned | None:
        """Return what stood there before that revision, or None."""
        await asyncio.sleep(0)
        former = self._former.get(key)
        return former if former and former.revision < revision else None

    async def create(self, key: str, value: bytes) -> int:
        """Write a key that must not exist."""
        return await self.update(key, value, 0)

    async def update(self, key: str, value: bytes, last: int) -> int:
        """Write over revision `last`."""
        await asyncio.sleep(0)
        self._check(key, last)
        self._revision += 1
        if former := self._current(key):
            self._former[key] = former
        self._entries[key] = (Revisioned(value, self._revision), self._clock.now())
        return self._revision

    async def delete(self, key: str, last: int = 0) -> None:
        """Remove the key."""
        await asyncio.sleep(0)
        if last:
            self._check(key, last)
        self._revision += 1
        self._former.pop(key, None)
        self._entries.pop(key, None)

    def _current(self, key: str) -> Revisioned | None:
        stored, written = self._entries.get(key, (None, 0.0))
        expired = self._ttl_s is not None and self._clock.now() - written >= self._ttl_s
        return None if expired else stored

    def _check(self, key: str, last: int) -> None:
        stored = self._current(key)
        if (stored.revision if stored else 0) != last:
            raise ConflictError(f"{self._name}/{key} was written by somebody else in between")


class MemoryWorld:
    """The state that all connections share.

    Attributes:
        journal: all entries, in order.
        ids: sequence of each message by its id.
        followers: to be set when the journal grows, in this order: a simulation repeats itself exactly.
        subscriptions: subscriptions to telemetry: a filter, and a receiver.
        handlers: the services that answer queries, by subject.
        buckets: by name.
    """

    def __init__(self, clock: Clock, lease_ttl_s: float = 2.0) -> None:
        self.journal: list[JournalEntry] = []
        self.ids: dict[tuple[str, str], int] = {}
        self.followers: dict[asyncio.Event, None] = {}
        self.subscriptions: list[tuple[Callable[[str], object], Inbox]] = []
        self.handlers: dict[str, list[Handler]] = {}
        self.buckets = {"state": MemoryBucket("state", clock, None), "lease": MemoryBucket("lease", clock, lease_ttl_s)}

    def connect(self) -> Bus:
        """Return a new connection."""
        return MemoryBus(self)


class MemoryBus:
    """A connection to a `MemoryWorld`; see `Bus`."""

    def __init__(self, world: MemoryWorld) -> None:
        self._world = world
        self._closed = False
        self._stops: list[Callable[[], Awaitable[None]]] = []
        # in the order in which they came: that of a set is by addresses, another in each process
        self._followers: dict[asyncio.Event, None] = {}
        self._inboxes: dict[Inbox, None] = {}

    async def append(self, subject: str, data: bytes, message_id: str) -> int:
        """Put a message into the journal."""
        await self._turn()
        world = self._world
        if not subjects.matches(subjects.KEPT, subject):
            raise BusUnavailableError(f"storing on {subject}: no stream for it; use a subject of the journal")
        known = subject, message_id
        if known not in world.ids:
            world.journal.append(JournalEntry(len(world.journal) + 1, subject, data))
            world.ids[known] = len(world.journal)
            for follower in world.followers:
                follower.set()
        return world.ids[known]

    async def follow(self, filters: Sequence[str], after: int) -> AsyncIterator[JournalEntry]:
        """Read the journal in order."""
        grown, position, wanted = asyncio.Event(), after, subjects.matcher(filters)
        self._world.followers[grown] = None
        self._followers[grown] = None
        try:
            while not self._closed:
                grown.clear()
                while position < len(self._world.journal) and not self._closed:
                    position += 1
                    entry = self._world.journal[position - 1]
                    if wanted(entry.subject):
                        await asyncio.sleep(0)
                        yield entry
                if not self._closed:
                    await grown.wait()
        finally:
            self._world.followers.pop(grown, None)
            self._followers.pop(grown, None)

    async def silent_servers(self) -> list[str]:
        """Return that there is none."""
        return []

    async def tail(self) -> int:
        """Return the last sequence of the journal."""
        await self._turn()
        return len(self._world.journal)

    async def last(self, filters: Sequence[str]) -> int:
        """Return the last sequence of the journal that matches."""
        await self._turn()
        wanted = subjects.matcher(filters)
        return next((each.sequence for each in reversed(self._world.journal) if wanted(each.subject)), 0)

    async def publish_telemetry(self, subject: str, data: bytes) -> None:
        """Send telemetry."""
        await self._turn()
        for wanted, inbox in self._world.subscriptions:
            if wanted(subject):
                inbox.put_nowait(TelemetryEntry(subject, data))

    async def receive_telemetry(self, filters: Sequence[str]) -> AsyncIterator[TelemetryEntry]:
        """Receive telemetry."""
        inbox: Inbox = asyncio.Queue()
        subscription = (subjects.matcher(filters), inbox)
        self._world.subscriptions.append(subscription)
        self._inboxes[inbox] = None
        try:
            while (entry := await inbox.get()) is not None:
                yield entry
        finally:
            self._world.subscriptions.remove(subscription)
            self._inboxes.pop(inbox, None)

    async def serve(self, subject: str, name: str, handler: Handler) -> Callable[[], Awaitable[None]]:  # noqa: ARG002
        """Answer queries; several who serve the same subject share them."""
        await self._turn()
        handlers = self._world.handlers.setdefault(subject, [])
        handlers.append(handler)

        async def stop() -> None:
            if handler in handlers:
                handlers.remove(handler)

        self._stops.append(stop)
        return stop

    async def ask(self, subject: str, data: bytes, timeout_s: float) -> bytes:
        """Send a query."""
        await self._turn()
        handlers = self._world.handlers.get(subject)
        owner = subject.rsplit(".", 1)[-1]
        if not handlers:
            raise NobodyAnswersError(f"nobody answers on {subject}; is {owner} running?")
        handlers.append(handler := handlers.pop(0))
        try:
            return await asyncio.wait_for(handler(data), timeout_s)
        except TimeoutError as error:
            raise BusUnavailableError(f"asking {owner}: no answer in time") from error
        except Exception as error:
            raise BusUnavailableError(f"{owner} could not answer: {error}") from error

    def bucket(self, name: str) -> MemoryBucket:
        """Return the bucket `name`."""
        return self._world.buckets[name]

    async def flush(self) -> None:
        """Return: what was sent has arrived."""
        await self._turn()

    async def close(self) -> None:
        """End all that this connection serves, follows and hears."""
        self._closed = True
        for stop in self._stops:
            await stop()
        for follower in self._followers:
            follower.set()
        for inbox in self._inboxes:
            inbox.put_nowait(None)

    async def reconnected(self) -> AsyncIterator[float]:
        """Yield nothing: memory is never out of reach."""
        inbox: Inbox = asyncio.Queue()
        self._inboxes[inbox] = None
        while await inbox.get() is not None:
            yield 0.0

    async def _turn(self) -> None:
        """Let others run, as a call over the network does."""
        await asyncio.sleep(0)
        if self._closed:
            raise BusUnavailableError("this connection is closed; make a new one")
