"""The active loops of a script, and the snapshot that a rank publishes of where it is in them."""

from types import FrameType
from typing import Any

from unicron.train.carry.kinds import NotCarriedError
from unicron.train.loops.collective_results import KnownResults, Results
from unicron.train.loops.positions import Counted

Chain = list[list[Any]]
"""Loops that are under way, the outermost first: place, how many began before it in the body around it, count, point.

The point is how many statements of its body have been run: 0 at its head.
"""


SNAPSHOTS_KEPT = 6
"""Snapshots kept of a rank: of the end of the iteration before, after an update, at ends and heads of bodies since."""


class LoopSnapshot:
    """A rank's own snapshot, of one point.

    Attributes:
        chain: of the loops.
        positions: how far each of them is in what it goes over; empty of a `while` loop.
        snapshots: one for each of them, of the point in its body.
    """

    def __init__(self, chain: Chain, positions: list[bytes], snapshots: list[bytes]) -> None:
        self.chain, self.positions, self.snapshots = chain, positions, snapshots


class ActiveLoop:
    """A loop that is running.

    Attributes:
        place: file and line at which it begins.
        index: how many loops have begun before it, since the last snapshot of the body around it.
        frame: of what runs it.
        last: line at which it ends; None of a loop that says by itself when it is left.
        count: of the times that its body has begun.
        iterator: over its items; None of a `while` loop.
        item: the one whose body runs, where that is an integer.
        point, snapshot, at_snapshot: where in its body the last snapshot was taken, that, and how far the loop was.
        refusal: why there is none.
        iterator_results, body_results: results of collectives run by its iterator, and by its body since that snapshot.
        is_drawing: its iterator is just finding the next item.
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
        self.had_inner_loop = self.has_begun = False

    refusal: NotCarriedError | None

    def record_point(self, point: int) -> None:
        """Record how far it is, as a snapshot is taken at a point of its body."""
        self.point, self.body_results = point, KnownResults()
        self.at_snapshot = (self.count, self.item, self.iterator_results.to_list())

    @property
    def location(self) -> list[Any]:
        """Its position when its last snapshot was taken, as it is sent to a new rank."""
        count, item, drawn = self.at_snapshot
        return [self.place, self.index, count, self.point, item, drawn, self.body_results.to_list()]
