"""Time, at the edge: the shells read it here, the cores get it with their messages."""

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time."""

    def now(self) -> float:
        """Return Unix seconds."""


class SystemClock:
    """The machine's own clock."""

    def now(self) -> float:
        """Return Unix seconds."""
        return time.time()
