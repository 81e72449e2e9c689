"""The timers of this service: what each waits for, how long, and its name."""

from enum import StrEnum
from typing import NamedTuple

from unicron.contracts import time_limits
from unicron.contracts.base import CancelTimer, SetTimer


class WaitKind(StrEnum):
    """What is waited for."""

    START = "start"
    """A worker, from its start until its model is built."""
    REGROUP = "regroup"
    """The members of a new membership, until all compute in it, states included."""
    VERDICT = "verdict"
    """What the detector says of a membership that its members did not join in time; `about` is its epoch."""

    STATES = "states"
    """Nodes that are gone, with copies of a state that nobody else has: until then they may come back."""
    IDLE = "idle"
    """Slots for a task, as long as its state stays in memory meanwhile."""
    TRIAL = "trial"
    """What comes of a trial that was under way as a rank was lost; or as long as beginning anew would take."""
    AGAIN = "again"
    """The next attempt to write a state to storage whose nodes are to go."""


TIMEOUT_S = {
    WaitKind.START: time_limits.START_S,
    WaitKind.REGROUP: time_limits.REGROUP_S,
    WaitKind.VERDICT: 30.0,
    WaitKind.STATES: time_limits.STATES_S,
    WaitKind.IDLE: time_limits.IDLE_S,
    WaitKind.TRIAL: 30.0,
    WaitKind.AGAIN: 3.0,
}
"""How long each may take."""


class Deadline(NamedTuple):
    """The end of a wait; `about` is a worker, or empty where it is the whole task's."""

    wait: WaitKind
    task: str
    about: str = ""

    @property
    def name(self) -> str:
        """Of its timer; no part of it has a dot in it."""
        return f"{self.wait}.{self.task}.{self.about}".rstrip(".")

    def set(self, after_s: float | None = None) -> SetTimer:
        """Return the request for its timer; the usual one, or after so many seconds."""
        return SetTimer(name=self.name, after_s=TIMEOUT_S[self.wait] if after_s is None else after_s)

    def cancel(self) -> CancelTimer:
        """Return the request that cancels its timer."""
        return CancelTimer(name=self.name)

    @classmethod
    def read(cls, name: str) -> "Deadline":
        """Return the deadline whose timer has this name."""
        wait, task, about = [*name.split("."), ""][:3]
        return cls(WaitKind(wait), task, about)
