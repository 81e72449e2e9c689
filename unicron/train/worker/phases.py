"""Where a worker stands between two updates, and what takes it from there to where; also how it greets an agent."""

from enum import StrEnum
from typing import NamedTuple

import msgspec

from unicron.contracts.worker import Hello, Iterated, Joined, Kept, Progress, Ready, Timed, ToAgent

FORGOTTEN = (Progress, Timed)
"""What nobody needs to hear any more when it could not be said at once."""


class Phase(StrEnum):
    """Where a worker stands.

    Attributes:
        NEW: its parameters are those that its script made.
        TAKEN: it has taken another's state, which waits to be loaded until the script is between two iterations.
        BETWEEN: its parameters are updated, and its next iteration has not begun.
        OPEN: it has microbatches to compute, or the gradient to reduce.
        REDUCED: the gradient is whole; the update comes next.
        DOUBTED: it gave its state up, which is not what most replicas have or no good, and is to take another.
    """

    NEW = "new"
    TAKEN = "taken"
    BETWEEN = "between"
    OPEN = "open"
    REDUCED = "reduced"
    DOUBTED = "doubted"


class Move(StrEnum):
    """What takes a worker from one phase to the next."""

    JOIN = "join"
    TAKE = "take"
    LOAD = "load"
    BEGIN = "begin"
    REDUCE = "reduce"
    UPDATE = "update"
    GIVE_UP = "give_up"


class Due(StrEnum):
    """What all ranks of a membership are to do before the update of their iteration."""

    COMPARE = "compare"
    """Hold their states against those of other replicas."""
    TRY = "try"
    """Break off if the gradient is not finite: their state is from copies, and nobody has gone on from it yet."""
    SAVE = "save"
    """Save it in the memory of their nodes, as far as they save."""
    STORE = "store"
    """Have it written to storage, as far as they write there."""


ANNOUNCED = (Due.SAVE, Due.STORE)
"""What is announced with the gradient of the iteration before."""


class Outcome(NamedTuple):
    """What is reduced besides gradients.

    Attributes:
        loss: mean over the global batch; NaN on a rank that computes none.
        announced: what some rank with this rank's place says is due with the next state.
    """

    loss: float
    announced: frozenset[Due]


MOVES = {
    (Phase.NEW, Move.JOIN): Phase.OPEN,
    (Phase.NEW, Move.TAKE): Phase.TAKEN,
    (Phase.TAKEN, Move.JOIN): Phase.TAKEN,
    (Phase.TAKEN, Move.TAKE): Phase.TAKEN,
    (Phase.TAKEN, Move.LOAD): Phase.OPEN,
    (Phase.BETWEEN, Move.BEGIN): Phase.OPEN,
    (Phase.OPEN, Move.JOIN): Phase.OPEN,
    (Phase.OPEN, Move.TAKE): Phase.TAKEN,
    (Phase.OPEN, Move.REDUCE): Phase.REDUCED,
    (Phase.OPEN, Move.GIVE_UP): Phase.DOUBTED,
    (Phase.DOUBTED, Move.TAKE): Phase.TAKEN,
    (Phase.REDUCED, Move.JOIN): Phase.OPEN,
    (Phase.REDUCED, Move.TAKE): Phase.TAKEN,
    (Phase.REDUCED, Move.UPDATE): Phase.BETWEEN,
}
"""All moves that there are."""


def greeting(hello: Hello, message: ToAgent) -> Hello:
    """Return how a worker that greeted with `hello` greets its next agent, once it has said `message`."""
    match message:
        case Ready():
            return msgspec.structs.replace(hello, ready=True)
        case Joined(epoch=epoch, iteration=iteration):
            return msgspec.structs.replace(hello, epoch=epoch, iteration=iteration, kept=None)
        case Kept():
            return msgspec.structs.replace(hello, kept=message)
        case Iterated(iteration=iteration):
            return msgspec.structs.replace(hello, iteration=iteration + 1)
    return hello
