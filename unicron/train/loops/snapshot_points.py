"""Points at which a script took its last snapshots, and the results of collectives since each of them.

A rank that is lost may have left one that is older than those of the others. As long as no gradient was reduced in
between, and no parameter changed, a new rank begins there, and is given what collectives have given since.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from unicron.train.loops.active_loops import SNAPSHOTS_KEPT, Chain, LoopLocation
from unicron.train.loops.collective_results import KnownResults, Results


class Point(NamedTuple):
    """A point at which a new rank can begin.

    Attributes:
        loops: locations in the active loops.
        outside: results of collectives run outside of the loops; None where they are not known.
        since: of those since the snapshot.
    """

    loops: list[LoopLocation]
    outside: list[Results | None] | None
    since: list[Results | None] | None = None

    @property
    def chain(self) -> Chain:
        """The chain of loops, as a record has it."""
        return [each.where for each in self.loops]

    @property
    def is_reachable(self) -> bool:
        """Whether the results of all collectives on the way there, and since, are known."""
        places = [self.outside, self.since, *(given for each in self.loops for given in each[2:])]
        return all(each is not None and all(results is not None for results in each) for each in places)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {"loops": [each.to_list() for each in self.loops], "outside": self.outside, "since": self.since}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Point":
        """Return what `to_dict` has made plain values of."""
        return cls([LoopLocation.from_list(each) for each in values["loops"]], values["outside"], values["since"])


class SnapshotPoints:
    """The points of a rank, the newest last; at first there is one, before its loops.

    Attributes:
        candidates: points at which a rank that replaces another can begin, the best first.
    """

    def __init__(self) -> None:
        self._points: deque[tuple[Point, KnownResults]] = deque([(Point([], []), KnownResults())], SNAPSHOTS_KEPT)
        self.candidates: Sequence[Point] = []

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
        self._points = deque([(where, since)], SNAPSHOTS_KEPT)

    def reachable_points(self) -> list[Point]:
        """Return the newest point, followed by the older ones at which a new rank could begin."""
        last, *before = [where._replace(since=since.to_list()) for where, since in reversed(self._points)]
        return [last, *(each for each in before if each.is_reachable)]

    def chains(self) -> list[Chain]:
        """Return the chains of loops of all points, whether or not a new rank can come there."""
        return [where.chain for where, _ in self._points]

    def candidate_chains(self) -> Iterable[Chain]:
        """Yield the chains of loops of the candidates."""
        return (each.chain for each in self.candidates)

    def candidate(self, chain: Chain) -> Point:
        """Return the candidate with this chain of loops."""
        return next(each for each in self.candidates if each.chain == chain)
