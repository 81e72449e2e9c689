"""Pending timers of a core. However many there are, the next one is found at once."""

from collections.abc import Mapping
from heapq import heapify, heappop, heappush

from unicron.contracts.base import Record
from unicron.contracts.ranges import Moment


class Timer(Record, kw_only=True, frozen=True):
    """A pending timer; `cause` and `correlation` tie what follows to the chain that asked for it."""

    due: Moment
    cause: str
    correlation: str


class Timers:
    """All that are pending.

    Attributes:
        pending: by name.
        changes: how often one was set or dropped.
    """

    def __init__(self, pending: Mapping[str, Timer]) -> None:
        self.pending = dict(pending)
        self.changes = 0
        self._queue = [(timer.due, name) for name, timer in pending.items()]
        heapify(self._queue)

    def set(self, name: str, timer: Timer) -> None:
        """Add a timer, or replace the one of that name."""
        self.changes += 1
        self.pending[name] = timer
        heappush(self._queue, (timer.due, name))

    def cancel(self, name: str) -> None:
        """Drop a timer, if it is pending."""
        if self.pending.pop(name, None):
            self.changes += 1

    def next_due(self) -> float | None:
        """Return when the next one is due."""
        while self._queue and not self._is_pending(*self._queue[0]):
            heappop(self._queue)
        return self._queue[0][0] if self._queue else None

    def due(self, now: float) -> list[tuple[str, Timer]]:
        """Return, once, those that are due, by name; they stay pending until somebody cancels them."""
        names = set()
        while (at := self.next_due()) is not None and at <= now:
            names.add(heappop(self._queue)[1])
        return [(name, self.pending[name]) for name in sorted(names)]

    def _is_pending(self, due: float, name: str) -> bool:
        return name in self.pending and self.pending[name].due == due
