"""Whether the memory of workers grows until the kernel ends one, and which is to be replaced before that. Pure."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from unicron_agent.stimuli import Memory
from unicron_agent.watchdogs.trend import Trends, left_s

REPLACED_S = 300.0
"""After one worker of a node was named, so many seconds pass before another is: what it held is free by then."""


class Growing(NamedTuple):
    """A worker whose memory grows without end.

    Attributes:
        used: bytes that it holds.
        rate: bytes a second.
        left: bytes that are left there.
        full_s: seconds until nothing is left, as all that grow here go on; None where that is too far to say.
    """

    used: int
    rate: float
    left: int
    full_s: float | None


class WorkerMemory:
    """Remembers what the workers of a node held."""

    def __init__(self) -> None:
        self._trends: dict[str, Trends] = {}
        self._growing: dict[str, Growing] = {}
        self._replaced_at: float | None = None

    def look(self, memory: Memory, used: Mapping[str, int], now: float) -> dict[str, Growing]:
        """Return the workers whose memory grows without end.

        Args:
            memory: of the machine.
            used: bytes that the workers hold which have begun to train; before that they load what they need.
            now: monotonic seconds.
        """
        for name, each in used.items():
            self._trends.setdefault(name, Trends()).add(now, each)
        growing = {name: rates for name in used if (rates := self._trends[name].rates())}
        sums: dict[float, float] = {}
        for rates in growing.values():
            for window_s, rate in rates:
                sums[window_s] = sums.get(window_s, 0.0) + rate
        full_s = left_s(memory.left, sums.items())
        self._growing = {
            name: Growing(used[name], max(rate for _, rate in rates), memory.left, full_s)
            for name, rates in growing.items()
        }
        return self._growing

    def to_replace(self, name: str, ahead_s: float, now: float) -> Growing | None:
        """Return what there is to say of a worker that is to be replaced at the end of the iteration it has just ended.

        It is the one that grows fastest here, where nothing is left within `ahead_s`; None: go on with it.
        """
        found = self._growing.get(name)
        if found is None or found.full_s is None or found.full_s > ahead_s:
            return None
        if found.rate < max(each.rate for each in self._growing.values()):
            return None
        if self._replaced_at is not None and now - self._replaced_at < REPLACED_S:
            return None
        self._replaced_at = now
        return found

    def keep(self, workers: Collection[str]) -> None:
        """Forget the workers that are gone."""
        self._trends = {name: each for name, each in self._trends.items() if name in workers}
        self._growing = {name: each for name, each in self._growing.items() if name in workers}
