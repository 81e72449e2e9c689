"""Points at which a script took its last snapshots, and the results of collectives since each of them.

A rank that is lost may have left one that is older than those of the others. As long as no gradient was reduced in
between, and no parameter changed, a new rank begins there, and is given what collectives have given since.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any

from unicron.train.loops.active_loops import SNAPSHOTS_KEPT, Chain
from unicron.train.loops.collective_results import KnownResults, Results

Point = dict[str, Any]
"""Locations of the active `loops`, and results of collectives: `outside` of the loops, and `since` the snapshot."""


class SnapshotPoints:
    """The points of a rank, the newest last; at first there is one, before its loops.

    Attributes:
        candidates: points at which a rank that replaces another can begin, the best first.
    """

    def __init__(self) -> None:
        self._points: deque[tuple[Point, KnownResults]] = deque(
            [({"loops": [], "outside": []}, KnownResults())], maxlen=SNAPSHOTS_KEPT
        )
        self.candidates: list[Point] = []

    @property
    def since_last(self) -> KnownResults:
        """Results of collectives since the newest point."""
        return self._points[-1][1]

    def add(self, where: Point, *, alone: bool) -> None:
        """Add a point.

        Args:
            where: its locations.
            alone: no new rank can begin at the older points any more; they are dropped.
        """
        left = KnownResults(self.since_last.remaining)
        if alone:
            self._points.clear()
        self._points.append((where, left))

    def record_result(self, results: Results | None) -> None:
        """Append the results of a collective, for all points."""
        for _, since in self._points:
            since.record(results)

    def reset_to(self, where: Point, since: KnownResults) -> None:
        """Replace all points by one of another rank."""
        self._points = deque([(where, since)], maxlen=SNAPSHOTS_KEPT)

    def reachable_points(self) -> list[Point]:
        """Return the newest point, followed by the older ones at which a new rank could begin."""
        last, *before = [{**where, "since": since.to_list()} for where, since in reversed(self._points)]
        return [last, *filter(is_reachable, before)]

    def candidate_chains(self) -> Iterable[Chain]:
        """Yield the chains of loops of the candidates."""
        return map(chain_at, self.candidates)

    def candidate(self, chain: Chain) -> Point:
        """Return the candidate with this chain of loops."""
        return next(each for each in self.candidates if chain_at(each) == chain)


def chain_at(point: Point) -> Chain:
    """Return the chain of loops of a point, as a record has it."""
    return [each[:4] for each in point["loops"]]


def is_reachable(point: Point) -> bool:
    """Return whether the results of all collectives on the way to a point, and since, are known."""
    places = [point["outside"], point["since"], *(heard for loop in point["loops"] for heard in loop[5:])]
    return all(each is not None and all(results is not None for results in each) for each in places)
