"""Whether something grows without end, from samples of it. Pure.

What a program uses goes up and down: it loads its data, saves a checkpoint and removes an older one, collects its
garbage. So the time that was watched is cut into parts, and the least of each part counts: that is what was never given
back. It grows without end where each part's least is above the one before, and the last part has grown as much as the
others: what fills a cache grows ever more slowly.
"""

from collections import deque
from collections.abc import Iterable

PARTS, PIECES = 8, 8
"""A window has so many parts, and each of these so many pieces, of each of which the least sample is kept."""

STEADY = 2 / 3
"""The last part has grown at least at this share of the mean pace, and each at half of it."""

BELIEVED = 2.0
"""A trend is believed to go on for so many times as long as it was seen."""

WINDOWS_S = (1800.0, 12 * 3600.0)
"""Windows that are looked at: for what is full within the hour, and for what is within the day. What a checkpoint takes
while it is written must not look like growth without end."""


class Trend:
    """Growth over one window of time.

    Args:
        window_s: its seconds.
    """

    def __init__(self, window_s: float) -> None:
        self._piece_s = window_s / (PARTS * PIECES)
        self._pieces: deque[tuple[float, float]] = deque(maxlen=PARTS * PIECES)

    def add(self, at: float, used: float) -> None:
        """Take a sample in: how much was used at `at`, in seconds, not before the last one's."""
        if self._pieces and at < self._pieces[-1][0] + self._piece_s:
            began, least = self._pieces[-1]
            self._pieces[-1] = began, min(least, used)
        else:
            self._pieces.append((at, used))

    def rate(self) -> float:
        """Return by how much a second it grows without end; 0 where it does not, or was not seen for long enough."""
        pieces = list(self._pieces)
        if len(pieces) < PARTS * PIECES:
            return 0.0
        parts = [pieces[first : first + PIECES] for first in range(0, len(pieces), PIECES)]
        began, least = [part[0][0] for part in parts], [min(used for _, used in part) for part in parts]
        rates = [(least[i + 1] - least[i]) / (began[i + 1] - began[i]) for i in range(PARTS - 1)]
        mean = (least[-1] - least[0]) / (began[-1] - began[0])
        steady = mean > 0 and rates[-1] >= STEADY * mean and min(rates) >= mean / 2
        return mean if steady else 0.0


class Trends:
    """Growth over all windows.

    Attributes:
        used: the newest sample.
    """

    def __init__(self) -> None:
        self._windows = [(window_s, Trend(window_s)) for window_s in WINDOWS_S]
        self.used = 0.0

    def add(self, at: float, used: float) -> None:
        """Take a sample in; see `Trend.add`."""
        self.used = used
        for _, trend in self._windows:
            trend.add(at, used)

    def rates(self) -> list[tuple[float, float]]:
        """Return the windows in which it grows without end, and by how much a second in each."""
        return [(window_s, rate) for window_s, trend in self._windows if (rate := trend.rate())]


def left_s(free: float, rates: Iterable[tuple[float, float]]) -> float | None:
    """Return in how many seconds nothing is left; None where none of the trends reaches that far.

    Args:
        free: what is left now.
        rates: windows in seconds, and the growth a second that was seen in each.
    """
    found = [max(0.0, free) / rate for window_s, rate in rates if free <= BELIEVED * window_s * rate]
    return min(found, default=None)
