"""Spans of time that are still open, and the pieces that they are closed into."""

from dataclasses import dataclass
from typing import NamedTuple

from unicron.contracts.base import Record
from unicron.observe.accounts.phases import Phase
from unicron.observe.incidents import NONE, IncidentCause


class Key(NamedTuple):
    """An account: a task, empty for slots that no task has, and a cause."""

    task: str
    cause: IncidentCause = NONE

    def without_chain(self) -> "Key":
        """Return the account of all of a kind."""
        return Key(self.task, IncidentCause(self.cause.what, self.cause.node))


Accounts = dict[Key, dict[Phase, float]]
"""Slot-seconds, or seconds of tasks as a whole."""


class SpanPiece(NamedTuple):
    """A part of a span, in Unix seconds."""

    phase: Phase
    cause: IncidentCause
    begin: float
    end: float
    share: float = 1.0


class PhaseSpan(Record, frozen=True, gc=False):
    """A slot, or a task as a whole, was in one phase for one reason.

    Attributes:
        node, slot: where; empty and -1 of a task as a whole.
        worker: that lived in the slot when the phase began, or the last that did; empty before the first.
        task: that the slot counted for.
        begin, end: Unix seconds.
        share: of that time that went to this phase, 0 to 1; less than 1 only in a slowdown.
    """

    node: str
    slot: int
    worker: str
    task: str
    phase: Phase
    begin: float
    end: float
    share: float


@dataclass(slots=True)
class TaskPace:
    """How a task computes at present, which says what its training is worth.

    Attributes:
        again_to: Unix seconds; until then it computes again what it had before.
        again_for: why.
        slow: part of its time that a slowdown costs, 0 to 1.
        slow_for: by whom.
    """

    again_to: float = 0.0
    again_for: IncidentCause = NONE
    slow: float = 0.0
    slow_for: IncidentCause = NONE

    def went_to(self, chain: str) -> bool:
        """Whether part of what is computed may be a cost of a chain."""
        return chain in {self.again_for.chain, self.slow_for.chain}


@dataclass(slots=True)
class Span:
    """Time of a slot, or of a whole task, that has not been closed.

    Attributes:
        since: Unix seconds up to which all is in the accounts.
        cause: of what is no training; of a task that trains, what it is not yet back at full membership from.
        worker: the last that lived in the slot when the phase began.
    """

    since: float
    phase: Phase = Phase.IDLE
    cause: IncidentCause = NONE
    worker: str = ""

    def pieces(self, until: float, pace: TaskPace) -> list[SpanPiece]:
        """Return what the time up to `until` is; together that is all of it, and none of it twice."""
        if until <= self.since:
            return []
        if self.phase is not Phase.TRAINING:
            return [SpanPiece(self.phase, self.cause, self.since, until)]
        found = []
        new = min(max(pace.again_to, self.since), until)
        if new > self.since:
            found.append(SpanPiece(Phase.RECOMPUTED, pace.again_for, self.since, new))
        if until > new:
            found.append(SpanPiece(Phase.TRAINING, self.cause, new, until, 1 - pace.slow))
            if pace.slow:
                found.append(SpanPiece(Phase.SUB_HEALTHY, pace.slow_for, new, until, pace.slow))
        return found
