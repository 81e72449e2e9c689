"""Predicts when file systems (bytes and inodes) and the memory of GPUs run full. Pure."""

from collections.abc import Iterable

from unicron_agent.stimuli import Store
from unicron_agent.watchdogs.trend import Trends, left_s

FULL_LOOKS = 6
"""Looks in a row that must find a store nearly full: what is full for a moment is cleared away."""


class Stores:
    """Remembers how stores filled.

    Args:
        ahead_s: seconds ahead in which a store that fills gets an alert.
    """

    def __init__(self, ahead_s: float) -> None:
        self._ahead_s = ahead_s
        self._trends: dict[str, Trends] = {}
        self._full: dict[str, int] = {}

    def look(self, stores: Iterable[Store], now: float) -> list[tuple[Store, str]]:
        """Return the stores that are nearly full, or soon will be, with the sentence that says so.

        Those that were not named are remembered as they were: another look may be at others.

        Args:
            stores: as they are at `now`.
            now: monotonic seconds.
        """
        found = []
        for store in stores:
            if store.total <= 0:
                continue
            trends = self._trends.setdefault(store.name, Trends())
            trends.add(now, store.used)
            full = store.free < store.least_free * store.total
            self._full[store.name] = self._full.get(store.name, 0) + 1 if full else 0
            soon_s = left_s(store.free, trends.rates())
            soon = soon_s is not None and soon_s <= self._ahead_s
            if soon_s is not None and soon:
                found.append((store, f"{_what(store)}, and at this pace it is full in {_span(soon_s)}"))
            elif self._full[store.name] >= FULL_LOOKS:
                found.append((store, _what(store)))
        return found


def _what(store: Store) -> str:
    free = f"{store.free / 2**30:.1f} GiB" if store.unit == "bytes" else f"{store.free:,} {store.unit}"
    return f"{store.name} has {free} left, {store.free / store.total:.1%} of it"


def _span(seconds: float) -> str:
    if seconds >= 86400:
        return f"{seconds / 86400:.1f} days"
    return f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{seconds / 60:.0f} minutes"
