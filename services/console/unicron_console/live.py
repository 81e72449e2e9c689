"""Open pages: what changed is worked out once and sent to all who look at it."""

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable

import msgspec

from unicron import vitality
from unicron.contracts.answers import PartHealth
from unicron.contracts.base import Record
from unicron.observe.cluster import ClusterPicture
from unicron_console.pages import Pages

TICK_S = 0.1
"""Least time between two looks for changes; the first change after a pause is sent at once."""

WHOLE_S = 0.2
"""Least time between two pages of the same thing."""

GROWS_S = 1.0
"""How often a page is sent whose figures grow by themselves, and what time went to is worked out anew."""

SHARE = 20
"""Slow work is done at most once in so many times its own duration."""

WAITING = 64
"""Frames that may wait for a reader; a slower reader is closed, and begins with a whole page when it comes back."""

CLUSTER = ("cluster", "")


class PageReader:
    """A reader of a page.

    Attributes:
        frames: that wait for it; None: it was too slow, or all is over.
    """

    def __init__(self) -> None:
        self.frames: asyncio.Queue[str | None] = asyncio.Queue(WAITING)

    def send(self, frame: str) -> bool:
        """Queue a frame; return whether there was room."""
        if self.frames.full():
            while not self.frames.empty():
                self.frames.get_nowait()
            self.frames.put_nowait(None)
            return False
        self.frames.put_nowait(frame)
        return True


class Hub:
    """Sends pages to their readers.

    Attributes:
        behind: entries of the journal that are still to be read.
        ailing: a line for each part of the cluster through which nothing gets.
        parts: the journal and the services, as they were last.
        away: Unix seconds of when the bus has answered last, where it does not now; else 0.
    """

    def __init__(self, picture: ClusterPicture, clock: Callable[[], float]) -> None:
        self.picture, self.pages, self.behind = picture, Pages(picture), 0
        self._clock = clock
        self.away, self._answered_at = 0.0, clock()
        self.ailing: list[str] = []
        self.parts: list[PartHealth] = []
        self._asked = -math.inf
        self._readers: defaultdict[tuple[str, str], set[PageReader]] = defaultdict(set)
        self._news = asyncio.Event()
        self._sent_position = 0
        self._sent: dict[tuple[str, str], float] = {}
        self._stale: set[tuple[str, str]] = set()
        self._accounted, self._account_s = 0.0, GROWS_S
        self._suspected: set[str] = set()
        self._cluster = ""

    def now(self) -> float:
        """Return the Unix seconds of what is answered now: while the bus is away, of when it was last there."""
        return self.away or self._clock()

    @property
    def silent_s(self) -> float:
        """Seconds for which the bus has not answered; 0 where it does."""
        return self._clock() - self.away if self.away else 0.0

    def __len__(self) -> int:
        return sum(map(len, self._readers.values()))

    def ask(self) -> list[str]:
        """Return a line for each part through which nothing gets, to one who will ask again."""
        self._asked = self._clock()
        return self.ailing

    def is_watched(self, for_s: float) -> bool:
        """Return whether somebody looks at a page, or has asked within so many seconds for what ails."""
        return len(self) > 0 or self._clock() - self._asked < for_s

    def wake(self) -> None:
        """Say that something may have changed."""
        self._news.set()

    def set_available(self, *, available: bool) -> None:
        """Send all readers that the bus has ceased to answer, or answers again."""
        self._answered_at = self._clock() if available else self._answered_at
        if available == (not self.away):
            return
        self.away = 0.0 if available else self._answered_at
        for topic in list(self._readers):
            self._send(topic, self._away_frame())
        self.wake()

    def set_health(self, parts: list[PartHealth]) -> None:
        """Show through which parts of the cluster nothing gets."""
        self.parts = parts
        ailing = [vitality.sentence(part) for part in parts if part.problem]
        if ailing != self.ailing:
            self.ailing = ailing
            self.picture.changed.add(("health", ""))
            self.wake()

    def _away_frame(self) -> str:
        return msgspec.json.encode({"away": self.away}).decode()

    # --- readers -----------------------------------------------------------------------------------------------------

    def subscribe(self, topic: tuple[str, str]) -> PageReader | None:
        """Let somebody look at a page; it gets the whole of it first. None where there is no such thing."""
        frame = self._whole(topic)
        if frame is None:
            return None
        reader = PageReader()
        self._readers[topic].add(reader)
        reader.send(frame)
        if self.away:
            reader.send(self._away_frame())
        return reader

    def unsubscribe(self, topic: tuple[str, str], reader: PageReader) -> None:
        """Send nothing to a reader any more."""
        self._readers[topic].discard(reader)
        if not self._readers[topic]:
            del self._readers[topic]
            self._sent.pop(topic, None)

    def page(self, topic: tuple[str, str]) -> Record | None:
        """Return a page as it is now; None where there is no such thing."""
        kind, name = topic
        now = self.now()
        match kind:
            case "cluster":
                return msgspec.structs.replace(self.pages.cluster(now, self.behind), ailing=self.ailing)
            case "task":
                return self.pages.task(name, now)
            case "failure":
                return self.pages.failure(name, now)
            case "node":
                return self.pages.node(name, now)
            case _:
                return None

    def _whole(self, topic: tuple[str, str]) -> str | None:
        if topic != CLUSTER:
            page = self.page(topic)
            return None if page is None else msgspec.json.encode({"whole": page}).decode()
        self._tick()  # all that changed so far is in it, and earlier readers must not miss that
        if not self._cluster:  # made once for all who come at the same time, as after a restart
            self._cluster = msgspec.json.encode({"whole": self.page(topic)}).decode()
        return self._cluster

    # --- ticks -------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Send what changes, for ever."""
        while True:
            try:
                async with asyncio.timeout(GROWS_S):
                    await self._news.wait()
            except TimeoutError:
                pass
            self._news.clear()
            if not self.away:
                self._tick()
            await asyncio.sleep(TICK_S)

    def caught_up(self) -> None:
        """Send all readers the whole page, once the journal is read."""
        self.behind = 0
        self._account()
        self._sent_position = self.picture.position
        self._cluster = ""
        self.picture.changed.clear()
        for topic in list(self._readers):
            self._send(topic, self._whole(topic))

    def _tick(self) -> None:
        now = self.now()
        self._notice_suspects(now)
        if now - self._accounted >= self._account_s and not self.behind:
            self._account()
        changed, self.picture.changed = self.picture.changed, set()
        if changed or self.behind:
            self._cluster = ""
        if self.behind:
            changed = {("event", "")} if changed else changed
        if changed and CLUSTER in self._readers:
            page = self.pages.changes(now, changed, self._sent_position)
            page = msgspec.structs.replace(page, behind=self.behind, ailing=self.ailing)
            self._send(CLUSTER, msgspec.json.encode({"changes": page}).decode())
        self._sent_position = self.picture.position
        self._stale |= changed
        self._send_pages(now)

    def _send_pages(self, now: float) -> None:
        """Send the pages of what changed, and of what grows."""
        for topic in list(self._readers):
            since = now - self._sent.get(topic, 0.0)
            if topic == CLUSTER or since < WHOLE_S:
                continue
            if topic in self._stale or since >= GROWS_S:
                self._sent[topic] = now
                frame = self._whole(topic)
                self._send(
                    topic, frame or msgspec.json.encode({"gone": f"there is no such {topic[0]} any more"}).decode()
                )
        self._stale = {topic for topic in self._stale if topic in self._readers and self._sent.get(topic) != now}

    def _send(self, topic: tuple[str, str], frame: str | None) -> None:
        for reader in list(self._readers[topic]):
            if frame is not None and not reader.send(frame):
                self.unsubscribe(topic, reader)

    def _notice_suspects(self, now: float) -> None:
        """A node is suspected for a while, and nobody says when that is over."""
        nodes = self.picture.nodes
        self._suspected |= {
            name
            for kind, name in self.picture.changed
            if kind == "node" and name in nodes and nodes[name].suspected_until
        }
        over = {name for name in self._suspected if name not in nodes or nodes[name].suspected_until <= now}
        self._suspected -= over
        self.picture.changed |= {("node", name) for name in over}

    def _account(self) -> None:
        began = self.now()
        self.pages.account(began)
        self._accounted = self.now()
        self._account_s = max(GROWS_S, SHARE * (self._accounted - began))
        self._cluster = ""
