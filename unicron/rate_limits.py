"""What comes too often is let through only so often, and the rest is counted: "4,012 more like this"."""

from collections import Counter
from typing import NamedTuple

OTHERS = "others"
"""All senders together beyond those that are told apart."""


class Limit(NamedTuple):
    """How much is let through.

    Attributes:
        each: things of one sender in one period.
        overall: of all senders together.
        period_s: seconds.
        senders: that are told apart; on an open bus names cost a forger nothing.
    """

    each: int
    overall: int
    period_s: float
    senders: int = 1000


LETTERS = Limit(each=10, overall=100, period_s=10.0)
"""Dead letters, and alerts, of one process."""

TELEMETRY = Limit(each=1000, overall=1_000_000, period_s=1.0, senders=65536)
"""Pieces of telemetry that a service takes: an agent beats twice a second, and workers tell each iteration. More nodes
than senders that are told apart would be given up, since they drown one another."""


class Floods:
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
        self._turn(now)
        if sender not in self._seen and len(self._seen) >= self._limit.senders:
            sender = OTHERS
        self._seen[sender] += 1
        if self._seen[sender] <= self._limit.each and self._overall < self._limit.overall:
            self._overall += 1
            return True
        self._held_back[sender] += 1
        return False

    def over(self, now: float) -> dict[str, int]:
        """Return, once, how much of each sender was held back in periods that have ended."""
        self._turn(now)
        if not self._over:
            return {}
        over, self._over = self._over, Counter()
        return dict(over)

    def _turn(self, now: float) -> None:
        if now < self._ends and self._ends - now <= self._limit.period_s:  # else the clock was set back
            return
        self._ends = now + self._limit.period_s
        if self._held_back:
            self._over += self._held_back
            self._held_back = Counter()
        self._seen.clear()
        self._overall = 0


def more(count: int) -> str:
    """Return a number of things held back, in words."""
    return f"{count:,} more like this"
