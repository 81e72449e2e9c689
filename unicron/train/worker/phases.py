"""The phases of a worker between two updates and the moves between them; also how it greets an agent."""

from enum import StrEnum
from typing import NamedTuple

import msgspec

from unicron.contracts.worker import Hello, Iterated, Joined, Kept, Progress, Ready, Timed, ToAgent

FORGOTTEN = (Progress, Timed)
"""Messages that are dropped if they can't be sent at once."""


class IterationPhase(StrEnum):
    """How far a worker is with its iteration.

    Attributes:
        NEW: its parameters are the initial ones of its script.
        TAKEN: it has fetched a state, which is loaded once the script is between two iterations.
        BETWEEN: its parameters are updated, and its next iteration has not begun.
        OPEN: it has microbatches to compute, or the gradient to reduce.
        REDUCED: the gradient is reduced; the update comes next.
        DOUBTED: it gave up its state, which is unusable or differs from most replicas', and has to fetch another.
    """

    NEW = "new"
    TAKEN = "taken"
    BETWEEN = "between"
    OPEN = "open"
    REDUCED = "reduced"
    DOUBTED = "doubted"


class Move(StrEnum):
    """A transition of a worker from one phase to another."""

    JOIN = "join"
    TAKE = "take"
    LOAD = "load"
    BEGIN = "begin"
    REDUCE = "reduce"
    UPDATE = "update"
    GIVE_UP = "give_up"


class Due(StrEnum):
    """A duty of all ranks of a membership before the update of their iteration."""

    COMPARE = "compare"
    """Compare their states with those of other replicas."""
    TRY = "try"
    """Reject the state if the gradient is not finite: it was restored from copies, and not computed on since."""
    SAVE = "save"
    """Save the state in their nodes' memory, on the ranks that save."""
    STORE = "store"
    """Write the state to storage, on the ranks that do that."""


ANNOUNCED = (Due.SAVE, Due.STORE)
"""The duties that are announced with the gradient of the iteration before."""


class ReducedValues(NamedTuple):
    """The values that are reduced along with the gradient.

    Attributes:
        loss: mean over the global batch; NaN on a rank that computes none.
        announced: duties for the next state that some rank of this rank's place has announced.
    """

    loss: float
    announced: frozenset[Due]


MOVES = {
    (IterationPhase.NEW, Move.JOIN): IterationPhase.OPEN,
    (IterationPhase.NEW, Move.TAKE): IterationPhase.TAKEN,
    (IterationPhase.TAKEN, Move.JOIN): IterationPhase.TAKEN,
    (IterationPhase.TAKEN, Move.TAKE): IterationPhase.TAKEN,
    (IterationPhase.TAKEN, Move.LOAD): IterationPhase.OPEN,
    (IterationPhase.BETWEEN, Move.BEGIN): IterationPhase.OPEN,
    (IterationPhase.OPEN, Move.JOIN): IterationPhase.OPEN,
    (IterationPhase.OPEN, Move.TAKE): IterationPhase.TAKEN,
    (IterationPhase.OPEN, Move.REDUCE): IterationPhase.REDUCED,
    (IterationPhase.OPEN, Move.GIVE_UP): IterationPhase.DOUBTED,
    (IterationPhase.DOUBTED, Move.TAKE): IterationPhase.TAKEN,
    (IterationPhase.REDUCED, Move.JOIN): IterationPhase.OPEN,
    (IterationPhase.REDUCED, Move.TAKE): IterationPhase.TAKEN,
    (IterationPhase.REDUCED, Move.UPDATE): IterationPhase.BETWEEN,
}
"""All allowed moves."""


def greeting(hello: Hello, message: ToAgent) -> Hello:
    """Return `hello`, which greets the next agent, updated by a message that the worker has sent."""
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
