"""Connections to the bus in memory on which messages are late, get lost, come twice, or don't come at all."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from random import Random
from typing import TypeVar

from unicron import codec, subjects
from unicron.bus.protocol import Handler, JournalEntry, Revisioned, TelemetryEntry
from unicron.clock import VirtualClock
from unicron.contracts.base import Record
from unicron.errors import BusUnavailableError
from unicron.service.commit import Commit
from unicron.service.commit_store import join_parts
from unicron_simulator.storms.bus import MemoryBucket, MemoryBus, MemoryWorld

T = TypeVar("T")

TIMEOUT_S = 0.4
"""Virtual seconds after which a call that got no answer counts as failed."""

REMEMBERED = 200
"""Pieces of telemetry that liars can say again."""


class Weather(Record, kw_only=True, frozen=True):
    """How bad the network is; the default is calm.

    Attributes:
        delay_s: longest usual delay of a message.
        late: chance that a message takes a hundred times as long.
        lost_calls: chance that a call never arrives.
        lost_acks: chance that a call arrives but its answer does not.
        doubled: chance that an append arrives once more, later.
        lost_telemetry: chance that a piece of telemetry reaches one of its listeners not at all.
    """

    delay_s: float = 0.002
    late: float = 0.0
    lost_calls: float = 0.0
    lost_acks: float = 0.0
    doubled: float = 0.0
    lost_telemetry: float = 0.0


class CrashedError(Exception):
    """The process that uses this connection is gone; nothing that it still tries has any effect."""


class Journal(list[JournalEntry]):
    """The journal's entries; observers get each at once."""

    def __init__(self, watch: Callable[[JournalEntry], None]) -> None:
        super().__init__()
        self._watch = watch

    def append(self, entry: JournalEntry) -> None:
        """Add an entry."""
        super().append(entry)
        self._watch(entry)


class Commits(MemoryBucket):
    """The bucket of states; observers get each write at once, and the commit that it completes.

    Attributes:
        compares: whether it does compare before it sets; a broken one does not.
    """

    def __init__(self, clock: VirtualClock, watch: Callable[[str, bytes, Commit | None], None]) -> None:
        super().__init__("state", clock, None)
        self._on_write = watch
        self.compares = True

    async def update(self, key: str, value: bytes, last: int) -> int:
        """Write over revision `last`."""
        if not self.compares:
            stored = self._current(key)
            last = stored.revision if stored else 0
        revision = await super().update(key, value, last)
        commit = None
        if "." not in key:  # the others are parts of commits
            root = codec.decode(value, Commit)
            commit = join_parts(
                root, [self._part(f"{key}.{part.number}", part.revision) for part in root.head + root.parts]
            )
        self._on_write(key, value, commit)
        return revision

    def _part(self, key: str, revision: int) -> bytes:
        """Return the part as it was written, also where somebody has written over it since."""
        there = (self._current(key), self._former.get(key))
        return next(
            (each for each in there if each and each.revision == revision), there[0] or Revisioned(b"", 0)
        ).value


class Network:
    """The state that all links share: the bus in memory, the weather, and subscribers to telemetry.

    Attributes:
        recent_telemetry: the last pieces of telemetry.
    """

    def __init__(self, world: MemoryWorld, seed: int, weather: Weather) -> None:
        self.world = world
        self.seed = seed
        self.weather = weather
        self.hearing: list[tuple[Link, Callable[[str], object], asyncio.Queue[TelemetryEntry]]] = []
        self.recent_telemetry: deque[TelemetryEntry] = deque(maxlen=REMEMBERED)
        self._made = 0

    def link(self, name: str) -> "Link":
        """Return a new connection for the process `name`."""
        self._made += 1
        return Link(self, name, Random(f"{self.seed}:{name}:{self._made}"))

    def publish_telemetry(self, random: Random, subject: str, data: bytes) -> None:
        """Send telemetry: to each listener for itself, so that it is lost and overtaken differently for each."""
        for link, wanted, inbox in self.hearing:
            if link.reachable and wanted(subject) and random.random() >= self.weather.lost_telemetry:
                asyncio.get_running_loop().call_later(
                    random.uniform(0, 5 * self.weather.delay_s), inbox.put_nowait, TelemetryEntry(subject, data)
                )


class Link:
    """One connection; a `Bus`.

    Attributes:
        name: of the process that uses it.
        dead: the process crashed.
        cut: the network between it and the bus is interrupted.
    """

    def __init__(self, network: Network, name: str, random: Random) -> None:
        self.name = name
        self.dead = False
        self.cut = False
        self._network = network
        self._bus = MemoryBus(network.world)
        self._random = random
        self._healed = asyncio.Event()
        self._outages: list[asyncio.Queue[float]] = []
        self._cut_at = 0.0
        self._writes_left: float | None = None
        self._on_crash: Callable[[], None] = lambda: None

    @property
    def reachable(self) -> bool:
        """Whether anything gets through."""
        return not (self.dead or self.cut)

    # --- faults ------------------------------------------------------------------------------------------------------

    def crash_after(self, writes: float, on_crash: Callable[[], None]) -> None:
        """Crash the process at one of its next writes: at half of one it has not arrived, at a whole one it has."""
        self._writes_left, self._on_crash = writes, on_crash

    async def crash(self) -> None:
        """Let nothing of the process get through any more."""
        self.dead = True
        self._healed.set()
        self._network.hearing = [each for each in self._network.hearing if each[0] is not self]
        await self._bus.close()

    def interrupt(self) -> None:
        """Cut the connection."""
        self.cut, self._cut_at = True, asyncio.get_running_loop().time()
        self._healed.clear()

    def heal(self) -> None:
        """End the interruption; the process gets its length."""
        if self.cut and not self.dead:
            self.cut = False
            self._healed.set()
            for outages in self._outages:
                outages.put_nowait(asyncio.get_running_loop().time() - self._cut_at)

    # --- how a message travels ---------------------------------------------------------------------------------------

    async def _travel(self, loss: float) -> None:
        weather = self._network.weather
        slow = self._random.random() < weather.late
        await asyncio.sleep(self._random.random() * weather.delay_s * (100 if slow else 1))
        if self.cut or self._random.random() < loss:
            await asyncio.sleep(TIMEOUT_S)
            self._alive()
            raise BusUnavailableError(f"{self.name} got no answer in time")
        self._alive()

    def _alive(self) -> None:
        if self.dead:
            raise CrashedError(f"{self.name} is gone")

    def _count(self) -> None:
        """Count half a write, and crash where that was the last."""
        if self._writes_left is not None:
            self._writes_left -= 0.5
            if self._writes_left <= 0:
                self.dead, self._writes_left = True, None
                self._on_crash()
        self._alive()

    async def call(self, effect: Callable[[], Awaitable[T]], *, write: bool = False) -> T:
        """Carry `effect` out at the bus and return its answer, if both arrive."""
        self._alive()
        if write:
            self._count()
        await self._travel(self._network.weather.lost_calls)
        answer = await effect()
        if write:
            self._count()
        await self._travel(self._network.weather.lost_acks)
        return answer

    # --- the bus -----------------------------------------------------------------------------------------------------

    async def append(self, subject: str, data: bytes, message_id: str) -> int:
        """Put a message into the journal."""
        if self._random.random() < self._network.weather.doubled:
            asyncio.get_running_loop().call_later(
                self._random.uniform(0.1, 5.0), self._again, subject, data, message_id
            )
        return await self.call(lambda: self._bus.append(subject, data, message_id), write=True)

    def _again(self, subject: str, data: bytes, message_id: str) -> None:
        if (subject, message_id) in self._network.world.ids or not self.dead:
            task = asyncio.ensure_future(MemoryBus(self._network.world).append(subject, data, message_id))
            task.add_done_callback(lambda _: None)

    async def follow(self, filters: Sequence[str], after: int) -> AsyncIterator[JournalEntry]:
        """Read the journal in order, each entry a little late."""
        async for entry in self._bus.follow(filters, after):
            while self.cut:
                self._alive()
                await self._healed.wait()
            if self._random.random() < 0.2:
                await asyncio.sleep(self._random.uniform(0, self._network.weather.delay_s))
            self._alive()
            yield entry

    async def last(self, filters: Sequence[str]) -> int:
        """Return the last sequence of the journal that matches; the weather spares this, too."""
        await self.tail()
        return await self._bus.last(filters)

    async def silent_servers(self) -> list[str]:
        """Return that there is none."""
        return []

    async def tail(self) -> int:
        """Return the last sequence of the journal; the weather spares this."""
        self._alive()
        if self.cut:
            await asyncio.sleep(TIMEOUT_S)
            self._alive()
            raise BusUnavailableError(f"{self.name} got no answer in time")
        return await self._bus.tail()

    async def publish_telemetry(self, subject: str, data: bytes) -> None:
        """Send telemetry."""
        self._alive()
        await asyncio.sleep(0)
        if not self.cut:
            self._network.recent_telemetry.append(TelemetryEntry(subject, data))
            self._network.publish_telemetry(self._random, subject, data)

    async def receive_telemetry(self, filters: Sequence[str]) -> AsyncIterator[TelemetryEntry]:
        """Receive telemetry."""
        inbox: asyncio.Queue[TelemetryEntry] = asyncio.Queue()
        self._network.hearing.append((self, subjects.matcher(filters), inbox))
        while True:
            yield await inbox.get()

    async def serve(self, subject: str, name: str, handler: Handler) -> Callable[[], Awaitable[None]]:
        """Answer queries."""
        return await self.call(lambda: self._bus.serve(subject, name, handler))

    async def ask(self, subject: str, data: bytes, timeout_s: float) -> bytes:
        """Send a query."""
        return await self.call(lambda: self._bus.ask(subject, data, timeout_s))

    def bucket(self, name: str) -> "LinkedBucket":
        """Return the bucket `name`."""
        return LinkedBucket(self, self._bus.bucket(name), counts=name == "state")

    async def flush(self) -> None:
        """Wait for the server."""
        await self.call(self._bus.flush)

    async def close(self) -> None:
        """Say goodbye."""
        await self.crash()

    async def reconnected(self) -> AsyncIterator[float]:
        """Yield how long each interruption lasted, after its end."""
        outages: asyncio.Queue[float] = asyncio.Queue()
        self._outages.append(outages)
        while True:
            yield await outages.get()


class LinkedBucket:
    """A bucket at the other end of a link."""

    def __init__(self, link: Link, bucket: MemoryBucket, *, counts: bool) -> None:
        self._link = link
        self._bucket = bucket
        self._counts = counts

    async def get(self, key: str) -> Revisioned | None:
        """Return the value."""
        return await self._link.call(lambda: self._bucket.get(key))

    async def before(self, key: str, revision: int) -> Revisioned | None:
        """Return what stood there before that revision."""
        return await self._link.call(lambda: self._bucket.before(key, revision))

    async def create(self, key: str, value: bytes) -> int:
        """Write a key that must not exist."""
        return await self._link.call(lambda: self._bucket.create(key, value), write=self._counts)

    async def update(self, key: str, value: bytes, last: int) -> int:
        """Write over revision `last`."""
        return await self._link.call(lambda: self._bucket.update(key, value, last), write=self._counts)

    async def delete(self, key: str, last: int = 0) -> None:
        """Remove the key."""
        await self._link.call(lambda: self._bucket.delete(key, last))
