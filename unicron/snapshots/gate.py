"""When pieces of copies are sent: in spans in which training leaves the network idle (GEMINI, SOSP 2023)."""

import math
from collections import deque

from unicron.contracts.traffic import Forecast

LEAST = 64 * 1024
"""Bytes of a piece; a span that has no room for so much is left alone."""

RATES = 8
"""Pieces of which the time they took counts."""

MARGIN_S = 0.005
"""At the end of a span nothing is on its way any more; a process on a busy node takes that long to wake up."""

MOST_ITERATIONS = 20
"""In how many iterations a copy is there, also where spans have no room: a part of it then goes at any time."""

MOST_S = 300.0
"""In how many seconds it is there, where iterations are long."""


class Line:
    """The copies that a node has under way, and how fast they are.

    Attributes:
        on_its_way: bytes.
    """

    def __init__(self) -> None:
        self.on_its_way = 0
        self._rates: deque[float] = deque(maxlen=RATES)

    def arrived(self, size: int, seconds: float) -> None:
        """Note how long a piece took."""
        self._rates.append(size / max(seconds, 1e-6))

    def fits(self, seconds: float) -> float:
        """Return how many bytes more arrive within that time, as the slower quarter of pieces did; one is tried."""
        left_s = max(0.0, seconds - MARGIN_S)
        if not self._rates:
            return LEAST - self.on_its_way if left_s else 0
        return sorted(self._rates)[len(self._rates) // 4] * left_s - self.on_its_way


class Gate:
    """Lets one copy pass, piece by piece.

    Args:
        line: that all copies of the node take.
        size: of the copy in bytes.
        most: bytes of a piece.
        now: in monotonic seconds, as always here.
    """

    def __init__(self, line: Line, size: int, most: int, now: float) -> None:
        self._line, self._left, self._most, self._began = line, size, most, now
        self._part = max(LEAST, math.ceil(size / MOST_ITERATIONS))
        self._passed = 0

    def lets(self, forecast: Forecast, now: float) -> int:
        """Return how large a piece goes now; 0: none does, ask again."""
        least = min(LEAST, self._left)
        idle_s = forecast.idle_until - now
        room = self._most if math.isinf(idle_s) else int(self._line.fits(idle_s))
        if room < least:
            room = self._due(forecast, now)
        piece = max(0, min(room, self._most, self._left))
        self.passes(piece)
        return piece

    def passes(self, size: int) -> None:
        """Note that a piece goes, or has come."""
        self._passed, self._left = self._passed + size, self._left - size

    def holds(self, forecast: Forecast, now: float) -> bool:
        """Return whether who takes a copy has the next piece wait."""
        return self._left > 0 and forecast.idle_until <= now and self._due(forecast, now) <= 0

    def _due(self, forecast: Forecast, now: float) -> int:
        """Return how many bytes are to go now, whatever training does."""
        iteration_s = min(forecast.iteration_s or 1.0, MOST_S / MOST_ITERATIONS)
        return int((now - self._began) / iteration_s) * self._part - self._passed
