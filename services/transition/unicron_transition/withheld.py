"""What is said of a task and not done, in the form in which it is stored."""

import msgspec

from unicron.contracts.commands import (
    CommitCheckpoint,
    CopyState,
    DropStates,
    FindCheckpoint,
    FindStates,
    Regroup,
    ReleaseNode,
    SaveStates,
    StartWorker,
    StopWorker,
    StoreState,
)
from unicron.contracts.plans import TaskShare

Order = (
    StartWorker
    | StopWorker
    | Regroup
    | ReleaseNode
    | SaveStates
    | DropStates
    | CopyState
    | StoreState
    | FindStates
    | FindCheckpoint
    | CommitCheckpoint
)


class Withheld(msgspec.Struct, kw_only=True):
    """What would have been done about one task.

    Attributes:
        orders: in their order. As long as there are any, no order about the task leaves; the service goes on as if
            they were on their way.
        timers: names of those that ran out meanwhile; what they wait for was not ordered yet.
        share: what the newest plan gives the task, where that is not what it has.
    """

    orders: list[Order] = []
    timers: list[str] = []
    share: TaskShare | None = None
