"""Loops of a script that are under way, and what a rank leaves of where it is in them."""

from types import FrameType
from typing import Any

from unicron.train.scripts.heard import Heard, Results
from unicron.train.scripts.kinds import NotCarriedError
from unicron.train.scripts.positions import Counted

Chain = list[list[Any]]
"""Loops that are under way, the outermost first: place, how many began before it in the body around it, count, point.

The point is how many statements of its body have been run: 0 at its head.
"""


KEPT = 6
"""Snapshots of a rank: of the end of the iteration before, behind an update, at the ends and heads of bodies since."""


class Record:
    """A rank's own snapshot, of one point.

    Attributes:
        chain: of the loops.
        positions: how far each of them is in what it goes over; empty of a `while` loop.
        snapshots: one for each of them, of the point in its body.
    """

    def __init__(self, chain: Chain, positions: list[bytes], snapshots: list[bytes]) -> None:
        self.chain, self.positions, self.snapshots = chain, positions, snapshots


class At:
    """A loop that is under way.

    Attributes:
        place: file and line at which it begins.
        index: how many loops have begun before it, since the last snapshot of the body around it.
        frame: of what runs it.
        last: line at which it ends; None of a loop that says by itself when it is left.
        count: of the times that its body has begun.
        position: in what it goes over.
        item: what it has just handed out, where that is a number.
        point, snapshot, saved: where in its body the last snapshot was taken, that, and how far the loop was.
        refused: why there is none.
        drawn, heard: what collectives have given, in what it goes over and since that snapshot.
        draws: it is just finding what is next in what it goes over.
        inner: another loop that trains has ended since its body began.
        begun: its body has, on this worker.
    """

    def __init__(self, place: str, index: int, frame: FrameType, last: int | None) -> None:
        self.place, self.index, self.frame, self.last = place, index, frame, last
        self.count = self.point = 0
        self.position: Counted | None = None
        self.item: int | None = None
        self.snapshot, self.refused = b"", None
        self.saved: tuple[int, int | None, list[Results | None] | None] = (0, None, [])
        self.drawn, self.heard, self.draws = Heard(), Heard(), False
        self.inner = self.begun = False

    refused: NotCarriedError | None

    def note(self, point: int) -> None:
        """Note how far it is, as a snapshot is taken."""
        self.point, self.heard = point, Heard()
        self.saved = (self.count, self.item, self.drawn.saved())

    @property
    def where(self) -> list[Any]:
        """Where it was when its last snapshot was taken, as a new rank is told."""
        count, item, drawn = self.saved
        return [self.place, self.index, count, self.point, item, drawn, self.heard.saved()]
