"""Spans in which training's own communication leaves the network idle, learnt from the last iterations (GEMINI)."""

import math
from collections import deque

REMEMBERED = 5
"""Iterations of which the idle spans count: the shortest of them is what is expected."""

LEARNT = 2
"""Whole iterations after which something is expected."""


class IdleSpans:
    """The idle spans of one worker: an iteration has the same ones, in the same order, as the one before.

    The last of an iteration is the one in which the next begins.

    Attributes:
        iteration_s: how long the last iteration took; 0 before the first.
    """

    def __init__(self) -> None:
        self.iteration_s = 0.0
        self._lengths: list[deque[float]] = []
        self._number: int | None = None
        self._since: float | None = None
        self._starts = False
        self._ended = 0
        self._ended_at = 0.0

    def begin_busy(self, now: float) -> None:
        """Record that communication begins."""
        if self._since is not None and self._number is not None:
            if self._number == len(self._lengths):
                self._lengths.append(deque(maxlen=REMEMBERED))
            self._lengths[self._number].append(now - self._since)
        self._since = None

    def begin_idle(self, now: float) -> float:
        """Record that communication has ended; return the time until which none is expected."""
        if self._starts:
            self._starts, self._number = False, 0
        elif self._number is not None:
            self._number += 1
        self._since = now
        if self._number is None or self._ended <= LEARNT:
            return math.inf
        return now + min(self._lengths[self._number]) if self._number < len(self._lengths) else now

    def end_iteration(self, now: float) -> None:
        """Record that an iteration has ended, and with it all communication."""
        if self._ended:
            self.iteration_s = now - self._ended_at
        self._ended, self._ended_at, self._starts = self._ended + 1, now, True
