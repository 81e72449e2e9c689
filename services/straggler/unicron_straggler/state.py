"""The state of the straggler service between two messages; it does not have the records of a window."""

from typing import Annotated

import msgspec

from unicron.contracts.answers import StragglerWindow
from unicron.contracts.events import StepTimed
from unicron.contracts.ranges import Count, Number
from unicron.contracts.tasks import Member
from unicron.contracts.timings import DEFAULT_SHARE

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]

HISTORY = 20
"""Windows of each task that are kept."""

ENDED = 50
"""Ended tasks that are kept."""


class StragglerLimits(msgspec.Struct, kw_only=True, frozen=True):
    """The limits from which a cause is reported, and acted upon.

    Attributes:
        window: recorded iterations that are looked at together.
        windows: slow windows in a row, with the same cause, that make an alert, and others in a row that end it.
        threshold: slowdown S above which an iteration and a window are slow.
        drain: whether the node of a slow worker is taken out of use, where the rest of the workers can go on.
    """

    window: int = 10
    windows: int = 2
    threshold: float = 1.1
    drain: bool = False


class WatchedTask(msgspec.Struct, kw_only=True):
    """A task.

    Attributes:
        share: of its iterations that workers are to record, where somebody has switched that.
        closely: the share while its iterations take longer than they did; 0 while they do not.
        min_workers: fewer can't run it.
        ended: it will not run again.
        epoch: of the newest membership that was reported.
        members: its workers, by rank; None where nobody has listened for that yet.
        cause: diagnosis and culprit of the last window, empty where that was not slow.
        streak: windows in a row with this cause.
        first: iteration at which the streak began.
        steps: iterations that were looked at in the streak.
        alert: the diagnosis that was reported; empty while there is none.
        alert_cause: the cause that was reported.
        drained: a node was drained for it, and it has not been well since.
        dropped: what was recorded and left out, by reason: iterations, or single records that make no sense.
        missed: how often in a row that was so.
    """

    share: Share | None = None
    closely: Share = 0.0
    min_workers: Count = 1
    ended: bool = False
    epoch: Number = -1
    members: list[Member] | None = None
    cause: str = ""
    streak: Count = 0
    first: Number = -1
    steps: Count = 0
    alert: str = ""
    alert_cause: str = ""
    history: list[StragglerWindow] = []
    drained: bool = False
    dropped: dict[str, Count] = {}
    missed: Count = 0

    @property
    def usual_share(self) -> float:
        """The share while nothing is the matter."""
        return DEFAULT_SHARE if self.share is None else self.share

    def has(self, timed: StepTimed) -> bool:
        """Return whether a record is one of a member, and of no membership that is not reported yet."""
        if self.members is None:
            return True
        place = (timed.worker, timed.node, timed.slot)
        rank = max(timed.rank, 0)  # nearly always it stands there
        there = (each for some in (self.members[rank : rank + 1], self.members) for each in some)
        return timed.epoch <= self.epoch and any((each.worker, each.node, each.slot) == place for each in there)


class StragglerState(msgspec.Struct, kw_only=True):
    """The state of the core.

    Attributes:
        tasks: by name, in order of submission.
    """

    tasks: dict[str, WatchedTask] = {}

    def forget(self) -> None:
        """Drop what is too old: all but the latest of the ended tasks."""
        for name in [name for name, task in self.tasks.items() if task.ended][:-ENDED]:
            del self.tasks[name]
