"""The active loops of a script, and the snapshot that a rank publishes of where it is in them."""

from collections.abc import Iterable
from types import FrameType
from typing import Any, NamedTuple

from unicron.train.carry.kinds import NotCarriedError
from unicron.train.loops.collective_results import KnownResults, Results
from unicron.train.loops.positions import Counted

HEAD, DRAWING = 0, -1
"""Points of a loop: the head of its body; it is just finding the next item, which is what trains."""

SNAPSHOTS_KEPT = 6
"""Snapshots kept of a rank: of the end of the iteration before, after an update, at ends and heads of bodies since."""


class LoopPlace(NamedTuple):
    """Where a script is in one of its loops.

    Attributes:
        place: file and line at which the loop begins.
        nth: how often the loop at that place has begun before, since the last snapshot of the body around it.
        round: of its body: how often that has begun.
        point: how many statements of its body, and of branches in it, have been passed; or `HEAD`, or `DRAWING`.
    """

    place: str
    nth: int
    round: int
    point: int

    def is_loop(self, place: str, nth: int) -> bool:
        """Return whether this is the loop that begins at a place, for the time of this number."""
        return (self.place, self.nth) == (place, nth)


Chain = list[LoopPlace]
"""Places in the loops that are under way, the outermost first."""


class LoopLocation(NamedTuple):
    """What a new rank is given to come to a place in a loop.

    Attributes:
        where: that is.
        item: the one whose body runs, where items are numbers that tell how far it is.
        drawn: results of collectives run to find its items; None where they are not known.
        results: of those run in its body since the last snapshot.
    """

    where: LoopPlace
    item: int | None
    drawn: list[Results | None] | None
    results: list[Results | None] | None

    def to_list(self) -> list[Any]:
        """Return it as plain values."""
        return [*self.where, self.item, self.drawn, self.results]

    @classmethod
    def from_list(cls, values: Iterable[Any]) -> "LoopLocation":
        """Return what `to_list` has made plain values of."""
        place, nth, round_, point, *rest = values
        return cls(LoopPlace(place, nth, round_, point), *rest)


class LoopSnapshot:
    """A rank's own snapshot, of one point.

    Attributes:
        chain: of the loops.
        positions: how far each of them is in what it goes over; empty of a `while` loop.
        snapshots: one for each of them, of the point in its body.
    """

    def __init__(self, chain: Iterable[Iterable[Any]], positions: list[bytes], snapshots: list[bytes]) -> None:
        self.chain = [LoopPlace(*each) for each in chain]
        self.positions, self.snapshots = positions, snapshots


class ActiveLoop:
    """A loop that is running.

    Attributes:
        place: file and line at which it begins.
        index: how often it has begun before, since the last snapshot of the body around it.
        frame: of what runs it.
        last: line at which it ends; None of a loop that says by itself when it is left.
        count: of the times that its body has begun.
        iterator: over its items; None of a `while` loop.
        item: the one whose body runs, where that is a number that tells how far it is.
        point, snapshot, at_snapshot: where in its body the last snapshot was taken, that, and how far the loop was.
        refusal: why there is none.
        iterator_results, body_results: results of collectives run by its iterator, and by its body since that snapshot.
        results_around: how many of those are also kept by the loop around it, as long as it is not known to train.
        is_drawing: its iterator is just finding the next item.
        is_fed: what its iterator does to find items trains; its body does not.
        trains: its body has trained, or its iterator.
        body_trained: its body has trained by itself since that snapshot.
        had_inner_loop: another loop that trains has ended since its body began.
        has_begun: its body has begun, on this worker.
    """

    def __init__(self, place: str, index: int, frame: FrameType, last: int | None) -> None:
        self.place, self.index, self.frame, self.last = place, index, frame, last
        self.count = self.point = 0
        self.iterator: Counted | None = None
        self.item: int | None = None
        self.snapshot, self.refusal = b"", None
        self.at_snapshot: tuple[int, int | None, list[Results | None] | None] = (0, None, [])
        self.iterator_results, self.body_results, self.is_drawing = KnownResults(), KnownResults(), False
        self.results_around = 0
        self.had_inner_loop = self.has_begun = self.is_fed = self.trains = self.body_trained = False

    refusal: NotCarriedError | None

    def record_point(self, point: int) -> None:
        """Record how far it is, as a snapshot is taken at a point of its body."""
        self.point, self.body_results, self.body_trained = point, KnownResults(), False
        self.at_snapshot = (self.count, self.item, self.iterator_results.to_list())

    @property
    def location(self) -> LoopLocation:
        """Its position when its last snapshot was taken; of one that is fed, its present one."""
        if self.is_fed:
            drawn = self.iterator_results.to_list()
            return LoopLocation(LoopPlace(self.place, self.index, self.count, DRAWING), None, drawn, [])
        count, item, drawn = self.at_snapshot
        where = LoopPlace(self.place, self.index, count, self.point)
        return LoopLocation(where, item, drawn, self.body_results.to_list())
