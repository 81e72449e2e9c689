"""Iterations that take longer than usual: what agents time, and what the detector makes of it (paper section 4.1)."""

from typing import Annotated, ClassVar

from unicron.contracts.base import AgentMessage, Message, Record
from unicron.contracts.ranges import Amount, Count, Few, Label, Many, Name, Number, Seconds

ALL_SLOW = 1.1
"""Time of a microbatch over the usual one, in the middle of all workers, from which on all are slow."""


class Computed(Record, array_like=True, frozen=True):
    """How long the microbatches of a worker took, as an array rather than a map.

    Attributes:
        rank: in its task.
        place: in its replica.
        seconds: mean of a microbatch, from when the script was given it until its gradient was there; what the script
            does to get its data is part of it, waiting for other replicas is not.
    """

    worker: Name
    rank: Number
    place: Number
    seconds: Seconds


class SlowWorker(Record, kw_only=True, frozen=True):
    """A worker whose microbatches take longer than usual, or than those of others with its place.

    Attributes:
        factor: so many times as long.
    """

    worker: Name
    node: Name
    rank: Number
    factor: Amount


# --- from agents -----------------------------------------------------------------------------------------------------


class ComputeTimed(AgentMessage, kw_only=True, frozen=True):
    """How long the workers of a task on one node compute; of each iteration, or, where these are short, of several.

    Attributes:
        iteration: the last of them.
        workers: those that computed anything.
        pressure: share of the time, lately, for which something that could run on this machine waited for a core.
    """

    task: Name
    epoch: Number
    iteration: Number
    workers: Annotated[list[Computed], Few]
    pressure: Amount = 0.0


# --- from the detector -----------------------------------------------------------------------------------------------


class SlowdownDetected(Message, kw_only=True, frozen=True):
    """A task's iterations left the normal band of 1.1 times their mean (paper section 4.1), and stay out.

    Attributes:
        iteration: at which that was certain.
        usual_s: mean seconds of an iteration before.
        recent_s: mean of the last ones.
        computing: the time of a microbatch over the usual one, as it is in the middle of all workers: above 1.1 all are
            slow; 0 where that is not known.
        workers: those that compute slower than the others, slowest first; empty where all wait for something else.
        busy: nodes whose machines have more to do than they have cores for, where that may be all that it is; that is
            reported once a task.
    """

    SENDER: ClassVar[str] = "detector"

    task: Name
    epoch: Number
    iteration: Number
    world_size: Count
    usual_s: Seconds
    recent_s: Seconds
    computing: Amount = 0.0
    workers: Annotated[list[SlowWorker], Many] = []
    busy: Annotated[list[Name], Many] = []

    @property
    def text(self) -> str:
        """How slow the task is, and which workers are, for a person."""
        if self.workers:
            each = (
                f"{one.worker} (rank {one.rank} on {one.node}) {one.factor:.2f} times as long" for one in self.workers
            )
            who = f"computing takes {', '.join(each)}"
        elif self.computing > ALL_SLOW:
            who = f"all compute {self.computing:.2f} times as long as usual"
        else:
            who = "nobody computes for longer than usual, so they wait for something else"
        text = f"an iteration takes {self.recent_s:.3g} s, not {self.usual_s:.3g} s: {who}"
        if not self.busy:
            return text
        return f"{text}; host busy: more wants to run on {', '.join(self.busy)} than there are cores (reported once)"

    def __str__(self) -> str:
        return f"{self.task} is slow: {self.text}"


class SlowdownEnded(Message, kw_only=True, frozen=True):
    """The slowdown that `SlowdownDetected` reported is over.

    Attributes:
        usual_s: mean seconds of an iteration from now on.
        recent_s: mean of the last ones.
        reason: why, for a person.
    """

    SENDER: ClassVar[str] = "detector"

    task: Name
    epoch: Number
    iteration: Number
    world_size: Count
    usual_s: Seconds
    recent_s: Seconds
    reason: Label

    def __str__(self) -> str:
        return f"{self.task} takes {self.recent_s:.3g} s an iteration: {self.reason}"
