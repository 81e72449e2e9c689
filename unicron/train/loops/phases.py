"""The phases of a script with regard to its training loops, and the moves between them."""

from collections import deque
from enum import StrEnum


class IllegalMoveError(RuntimeError):
    """The loops of a script are in a phase that has no such move; a mistake of ours."""


class Phase(StrEnum):
    """How far a script is with its loops.

    Attributes:
        BEFORE: no loop that may train has begun.
        TRIED: one that may train has begun, and its state is numbered; the other ranks know nothing of it.
        SEEKING: this rank is on its way to where the others are, or to where a lost one was.
        BETWEEN: no iteration is under way.
        OPEN: one has begun, and its gradient is not reduced.
        REDUCED: its gradient is reduced; an update may follow.
    """

    BEFORE = "before"
    TRIED = "tried"
    SEEKING = "seeking"
    BETWEEN = "between"
    OPEN = "open"
    REDUCED = "reduced"


class Move(StrEnum):
    """A transition of a script from one phase to another."""

    TRY = "try"
    LEAVE = "leave"
    START = "start"
    SEEK = "seek"
    ARRIVE = "arrive"
    BEGIN = "begin"
    REDUCE = "reduce"
    UPDATE = "update"


MOVES = {
    (Phase.BEFORE, Move.TRY): Phase.TRIED,
    (Phase.BEFORE, Move.START): Phase.BETWEEN,
    (Phase.TRIED, Move.LEAVE): Phase.BEFORE,
    (Phase.TRIED, Move.START): Phase.BETWEEN,
    (Phase.BETWEEN, Move.SEEK): Phase.SEEKING,
    (Phase.SEEKING, Move.SEEK): Phase.SEEKING,
    (Phase.SEEKING, Move.ARRIVE): Phase.BETWEEN,
    (Phase.BETWEEN, Move.BEGIN): Phase.OPEN,
    (Phase.OPEN, Move.REDUCE): Phase.REDUCED,
    (Phase.BETWEEN, Move.REDUCE): Phase.REDUCED,
    (Phase.REDUCED, Move.REDUCE): Phase.REDUCED,
    (Phase.REDUCED, Move.BEGIN): Phase.OPEN,
    (Phase.REDUCED, Move.UPDATE): Phase.BETWEEN,
    (Phase.BETWEEN, Move.UPDATE): Phase.BETWEEN,
}
"""All legal moves. A rank that joins within an iteration is between two until it begins that, too; a scaler of the loss
may leave an update out, and an update may follow that no reduced gradient came before."""


class Story:
    """The phase that a script is in, and its last moves.

    Attributes:
        phase: that it is in.
    """

    def __init__(self) -> None:
        self.phase = Phase.BEFORE
        self._last = deque[str](maxlen=12)

    def move(self, move: Move, where: str = "") -> None:
        """Make a move.

        Raises:
            IllegalMoveError: it is none that is legal in this phase; the text tells the last moves.
        """
        if (self.phase, move) not in MOVES:
            told = ", ".join(self._last) or "none"
            raise IllegalMoveError(f"illegal move `{move}` of a script's loops in phase `{self.phase}`; before: {told}")
        self.phase = MOVES[self.phase, move]
        self._last.append(f"{move} {where}".strip())
