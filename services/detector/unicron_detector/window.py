"""Iteration times of a task against their own recent past (paper section 4.1, figure 6). Pure: no clock, no faust."""

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from unicron.contracts.events import IterationFinished, IterationsSlow

BAND = 1.1
"""Iteration times stay below this multiple of their mean as long as all is well."""

FAILURE = 3.0
"""Beyond this multiple an iteration was interrupted rather than slow; it weighs no more than this in the mean."""

RECENT = 10
"""Iterations that are held against the mean."""

WINDOW = 100
"""Iterations that make up the mean."""

SERIES = 1024
"""Series of iteration times that are remembered; the one that was idle longest goes first."""


@dataclass
class Series:
    """Iteration times of one task at one world size; sums run along, so that each iteration costs the same.

    Attributes:
        recent: seconds of the last iterations.
        past: seconds of those before, at most WINDOW.
        out: whether the recent ones are out of the band, and that has been said.
    """

    recent: deque[float] = field(default_factory=deque)
    past: deque[float] = field(default_factory=deque)
    recent_sum: float = 0.0
    past_sum: float = 0.0
    out: bool = False

    @property
    def mean_s(self) -> float:
        """Mean of the past, 0 where there is none."""
        return self.past_sum / len(self.past) if self.past else 0.0

    @property
    def recent_s(self) -> float:
        """Mean of the recent iterations, 0 where there are none."""
        return self.recent_sum / len(self.recent) if self.recent else 0.0

    def add(self, seconds: float) -> bool:
        """Take an iteration in; return whether the series has left its band just now."""
        self.recent.append(seconds)
        self.recent_sum += seconds
        if len(self.recent) > RECENT:
            self._grow_old()
        was_out, self.out = self.out, self._is_out()
        return self.out and not was_out

    def _grow_old(self) -> None:
        oldest = self.recent.popleft()
        self.recent_sum -= oldest
        if len(self.past) >= RECENT:
            oldest = min(oldest, FAILURE * self.mean_s)
        self.past.append(oldest)
        self.past_sum += oldest
        if len(self.past) > WINDOW:
            self.past_sum -= self.past.popleft()

    def _is_out(self) -> bool:
        """Slow on the whole, and most of them: one iteration with a failure in it is no trend."""
        if len(self.past) < RECENT:
            return False
        limit = BAND * self.mean_s
        return self.recent_s > limit and sum(each > limit for each in self.recent) > len(self.recent) / 2


class Windows:
    """The series of all tasks."""

    def __init__(self) -> None:
        self._series: OrderedDict[tuple[str, int], Series] = OrderedDict()

    def observe(self, finished: IterationFinished) -> IterationsSlow | None:
        """Take an iteration in; return a fact once each time when its task gets slow."""
        key = (finished.task, finished.world_size)
        if finished.iteration == 0:  # the name of an earlier task is used again
            for each in [each for each in self._series if each[0] == finished.task]:
                del self._series[each]
        series = self._series.setdefault(key, Series())
        self._series.move_to_end(key)
        if len(self._series) > SERIES:
            self._series.popitem(last=False)
        if not series.add(finished.seconds):
            return None
        return IterationsSlow(
            task=finished.task, world_size=finished.world_size, mean_s=series.mean_s, recent_s=series.recent_s
        )
