"""The detector's timers: their names are made and read here and nowhere else."""

from enum import StrEnum
from typing import NamedTuple, Self


class TimerKind(StrEnum):
    """The purpose of a timer."""

    TICK = "tick"
    """Heartbeats are counted."""
    GRACE = "grace"
    """A node whose connection ended should be back by then."""
    HOLD = "hold"
    """The cause of a broken collective should be known by then."""


class DetectorTimer(NamedTuple):
    """A timer.

    Attributes:
        kind: what it is for.
        about: node or task that it is about.
        number: makes its name unique: a timer that was replaced differs from its successor.
    """

    kind: TimerKind
    about: str = ""
    number: int = 0

    def __str__(self) -> str:
        return f"{self.kind}:{self.about}:{self.number}" if self.about else str(self.kind)

    @classmethod
    def read(cls, name: str) -> Self:
        """Return the timer called `name`."""
        kind, _, rest = name.partition(":")
        about, _, number = rest.rpartition(":")
        return cls(TimerKind(kind), about, int(number or 0))
