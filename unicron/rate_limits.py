"""Rate limits: events beyond a rate are only counted: "4,012 more like this"."""

from collections import Counter
from typing import NamedTuple

OTHERS = "others"
"""All senders together beyond those that are counted separately."""


class Limit(NamedTuple):
    """How much is let through.

    Attributes:
        each: things of one sender in one period.
        overall: of all senders together.
        period_s: seconds.
        senders: that are counted separately; on an open bus names cost a forger nothing.
    """

    each: int
    overall: int
    period_s: float
    senders: int = 1000


LETTERS = Limit(each=10, overall=100, period_s=10.0)
"""Dead letters, and alerts, of one process."""

TELEMETRY = Limit(each=1000, overall=1_000_000, period_s=1.0, senders=65536)
"""Pieces of telemetry that a service takes: an agent beats twice a second, and workers report each iteration. More
nodes than separately counted senders would be given up, since they drown one another."""


class RateLimiter:
    """Counts by sender; the time comes with each call.

    Args:
        limit: how much is let through.
    """

    def __init__(self, limit: Limit) -> None:
        self._limit = limit
        self._seen: Counter[str] = Counter()
        self._overall = 0
        self._held_back: Counter[str] = Counter()
        self._over: Counter[str] = Counter()
        self._ends = 0.0

    def admit(self, sender: str, now: float) -> bool:
        """Return whether one more thing of `sender` is let through at `now`, in seconds; count it if it is not."""
        self._start_period(now)
        if sender not in self._seen and len(self._seen) >= self._limit.senders:
            sender = OTHERS
        self._seen[sender] += 1
        if self._seen[sender] <= self._limit.each and self._overall < self._limit.overall:
            self._overall += 1
            return True
        self._held_back[sender] += 1
        return False

    def held_back(self, now: float) -> dict[str, int]:
        """Return, once, how much of each sender was held back in periods that have ended."""
        self._start_period(now)
        if not self._over:
            return {}
        over, self._over = self._over, Counter()
        return dict(over)

    def _start_period(self, now: float) -> None:
        if now < self._ends and self._ends - now <= self._limit.period_s:  # else the clock was set back
            return
        self._ends = now + self._limit.period_s
        if self._held_back:
            self._over += self._held_back
            self._held_back = Counter()
        self._seen.clear()
        self._overall = 0


def more_text(count: int) -> str:
    """Return a number of things held back, in words."""
    return f"{count:,} more like this"
