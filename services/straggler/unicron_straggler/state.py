"""What the straggler service remembers between two messages; the records of a window it does not."""

from typing import Annotated

import msgspec

from unicron.contracts.queries import StragglerWindow
from unicron.contracts.ranges import Count, Number

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]

HISTORY = 20
"""Windows of each task that are kept."""

ENDED = 50
"""Ended tasks that are kept."""


class Limits(msgspec.Struct, kw_only=True, frozen=True):
    """When a cause is reported, and what is done about it.

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


class Task(msgspec.Struct, kw_only=True):
    """A task.

    Attributes:
        share: of its iterations that workers are to record, where somebody has switched that.
        min_workers: fewer can't run it.
        ended: it will not run again.
        cause: diagnosis and culprit of the last window, empty where that was not slow.
        streak: windows in a row with this cause.
        first: iteration at which the streak began.
        steps: iterations that were looked at in the streak.
        alert: the diagnosis that was told; empty while there is none.
        alert_cause: the cause that was told.
        drained: a node was drained for it, and it has not been well since.
        dropped: what was recorded and left out, by reason: iterations, or single records that make no sense.
        missed: how often in a row that was so.
    """

    share: Share | None = None
    min_workers: Count = 1
    ended: bool = False
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


class State(msgspec.Struct, kw_only=True):
    """The state of the core.

    Attributes:
        tasks: by name, in order of submission.
    """

    tasks: dict[str, Task] = {}

    def forget(self) -> None:
        """Drop what is too old: all but the latest of the ended tasks."""
        for name in [name for name, task in self.tasks.items() if task.ended][:-ENDED]:
            del self.tasks[name]
