"""Facts of the straggler service."""

from typing import ClassVar

from unicron.contracts.base import Message
from unicron.contracts.ranges import Amount, Count, Label, Name, Number, Text
from unicron.contracts.sentences import after, where

# --- from the straggler service --------------------------------------------------------------------------------------


class RecordingSwitched(Message, kw_only=True, frozen=True):
    """Workers of a task are to record another share of their iterations; said again for nodes that come later.

    Attributes:
        share: of the iterations, 0 (none) to 1 (each).
    """

    SENDER: ClassVar[str] = "straggler"

    task: Name
    share: float

    def __str__(self) -> str:
        return f"{self.task}: {self.share:.3g} of the iterations are recorded"


class StragglerDetected(Message, kw_only=True, frozen=True):
    """A task stays slower than it could be; reported once, until it is over or has another cause.

    Attributes:
        first, last: iterations from which to which it was seen.
        steps: recorded iterations among them that were looked at.
        slowdown: S, mean iteration time as it is over that with every operation at its ideal.
        waste: 1 - 1/S, share of the GPU time that stragglers cost.
        diagnosis: kind of the cause, such as "slow-worker"; "unknown" where none was found.
        node, slot, worker: the culprit; empty or -1 where it is no single worker.
        gain: mean iteration time as it is over that with the cause cured; 0 where that is not known.
        evidence: the figures that the diagnosis rests on, as JSON.
        cure: what to do about it.
        drain: the registry takes the node out of use for it, as if a user had said so.
    """

    SENDER: ClassVar[str] = "straggler"

    task: Name
    epoch: Number
    world_size: Count
    first: Number
    last: Number
    steps: Count
    slowdown: Amount
    waste: float
    diagnosis: Label
    node: Name = ""
    slot: Number = -1
    worker: Name = ""
    gain: Amount = 0.0
    evidence: Text = ""
    cure: Text = ""
    drain: bool = False

    def __str__(self) -> str:
        return (
            f"{self.task} is {self.slowdown:.2f} times as slow as it could be: {self.diagnosis}"
            f"{f' {where(self)}' if self.worker else ''}{', its node is drained' * self.drain}{after(': ', self.cure)}"
        )
