"""Facts about tasks: orders, plans, failures and how they stand."""

from typing import Annotated, ClassVar

from unicron.contracts.base import Message
from unicron.contracts.failures import DetectionMethod, FailureStatus, Severity
from unicron.contracts.plans import Plan, TaskShare
from unicron.contracts.ranges import Count, Many, Name, Number, Seconds, Text
from unicron.contracts.sentences import after
from unicron.contracts.tasks import Member, TaskSpec, TaskState


class TaskSubmitted(Message, kw_only=True, frozen=True):
    """A user launched a task."""

    SENDER: ClassVar[str] = "registry"

    task: Name
    spec: TaskSpec

    def __str__(self) -> str:
        workers = f"{self.spec.min_workers} to {self.spec.max_workers} workers"
        return f"{self.task} submitted: weight {self.spec.weight:g}, {workers}"


class TaskPaused(Message, kw_only=True, frozen=True):
    """A user wants a task to have no slots, or to be planned for again.

    Attributes:
        paused: the former.
    """

    SENDER: ClassVar[str] = "registry"

    task: Name
    paused: bool = True

    def __str__(self) -> str:
        return f"a user {'pauses' if self.paused else 'resumes'} {self.task}"


class TaskRewound(Message, kw_only=True, frozen=True):
    """A user wants a task to go on from an earlier checkpoint on storage.

    Attributes:
        iteration: of the checkpoint; later ones no longer count.
    """

    SENDER: ClassVar[str] = "registry"

    task: Name
    iteration: Number

    def __str__(self) -> str:
        return f"a user wants {self.task} to go back to iteration {self.iteration}"


class TaskRemoved(Message, kw_only=True, frozen=True):
    """A user took a task away."""

    SENDER: ClassVar[str] = "registry"

    task: Name

    def __str__(self) -> str:
        return f"{self.task} removed"


class FailureDetected(Message, kw_only=True, frozen=True):
    """A failure, classified (paper table 1).

    Attributes:
        severity: what it will take to cure it.
        method: how it was found.
        status: what kind of failure it is.
        task, node, slot, worker: whom it hit; empty or -1 where not applicable.
        reason: one line for a person.
        escalated: severity before it was raised, None where it was not.
        attempt: how many failures of this kind the window holds, this one included.
        epoch: membership that broke, where that is known; a later one is not concerned.
        wait_s: seconds for which nothing is tried: a server outside of the cluster refuses, and would again.
    """

    SENDER: ClassVar[str] = "detector"

    severity: Severity
    method: DetectionMethod
    status: FailureStatus
    task: Name = ""
    node: Name = ""
    slot: Number = -1
    worker: Name = ""
    reason: Text = ""
    escalated: Severity | None = None
    attempt: Count = 1
    epoch: Number = -1
    wait_s: Seconds = 0.0

    def __str__(self) -> str:
        who = self.worker or self.task  # a worker's name has its task's
        whom = "" if who and self.reason.startswith(who) else who
        return (
            f"sev{self.severity.value} {' '.join(filter(None, (self.status, whom, self.node)))}"
            f"{f', raised from sev{self.escalated.value}' if self.escalated else ''}{after(': ', self.reason)}"
        )


class TaskBroken(Message, kw_only=True, frozen=True):
    """The task's own program is at fault, as it seems: to start it again would be in vain, and nothing is.

    It raised the same at the same iteration again, fails on several nodes, never passes an iteration (`no progress`),
    or its loss has not been finite for long.
    """

    SENDER: ClassVar[str] = "detector"

    task: Name
    reason: Text
    traceback: Text = ""

    def __str__(self) -> str:
        return f"the program of {self.task} is at fault: {self.reason}"


class PlanDecided(Message, kw_only=True, frozen=True):
    """The planner's answer to an event; the transition service carries it out."""

    SENDER: ClassVar[str] = "planner"

    plan: Plan

    def __str__(self) -> str:
        return (
            f"plan {self.plan.number} after {self.plan.trigger}: "
            f"{' '.join(map(_share, self.plan.shares))}{' (prepared)' * self.plan.prepared}"
        )


class TaskStateChanged(Message, kw_only=True, frozen=True):
    """A task went from one state to another.

    Attributes:
        members: its newest membership in rank order, also where it has to leave its slots: see `computing`.
        traceback: of the user's own error, where that ended the task.
    """

    SENDER: ClassVar[str] = "transition"

    task: Name
    state: TaskState
    epoch: Number = -1
    members: Annotated[list[Member], Many] = []
    reason: Text = ""
    traceback: Text = ""

    @property
    def computing(self) -> list[Member]:
        """The workers that compute, in rank order; of a task that waits or has ended, none."""
        return [] if self.state is TaskState.WAITING or self.state.ended else self.members

    def __str__(self) -> str:
        workers = f" on {len(self.computing)} workers" if self.computing else ""
        return f"{self.task} is {self.state}{workers}{after(': ', self.reason)}"


class TaskRecovered(Message, kw_only=True, frozen=True):
    """A task is back at full membership after a failure or a new plan.

    Attributes:
        seconds: since the failure was detected.
    """

    SENDER: ClassVar[str] = "transition"

    task: Name
    epoch: Number
    workers: Count
    seconds: Seconds

    def __str__(self) -> str:
        return f"{self.task} is back at {self.workers} worker{'s' * (self.workers != 1)}"


def _share(share: TaskShare) -> str:
    tells = share.layout.replica_workers > 1 and share.layout.shard != len(share.slots)  # one shard each does not
    return f"{share.task}={len(share.slots)}{f' ({share.layout.degrees})' if share.slots and tells else ''}"
