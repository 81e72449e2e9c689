"""What the transition service remembers: for each task who should compute, who does, and how far a change has come."""

import msgspec

from unicron.contracts.tasks import SlotRef, TaskSpec, TaskState


class NodeRun(msgspec.Struct, kw_only=True):
    """A node as far as commands are concerned; `incarnation` is the one it last joined under."""

    incarnation: str = ""

    rendezvous: str = msgspec.field(name="store", default="")
    state_server: str = ""
    alive: bool = True


class WorkerRun(msgspec.Struct, kw_only=True):
    """A worker process from its StartWorker to its end.

    Attributes:
        phase: "starting", "ready" (waits for a membership or is in one) or "finished".
        computed: it has been in a membership, so it has its task's state.
    """

    worker: str
    place: SlotRef
    phase: str = "starting"
    computed: bool = False


class TaskRun(msgspec.Struct, kw_only=True):
    """One task's state machine.

    Attributes:
        epoch: of the newest membership ordered, -1 before the first.
        started: counts worker processes, for their names.
        before: how many of them were an earlier task's of this name.
        target: slots that the newest plan gives it, in rank order.
        workers: living worker processes by name.
        group: workers of the newest membership in rank order.
        joined: those of them that have reported that they compute in it.
        met: workers of the newest membership that somebody has joined, so that all of them have met.
        through: workers that have said they are through with the last iteration, living or not.
        broken: the membership must be formed anew even if it stays the same.
        failed_at: Unix seconds of the failure or plan being carried out; None while nothing is.
    """

    spec: TaskSpec
    state: TaskState = TaskState.WAITING
    epoch: int = -1
    started: int = 0
    before: int = 0
    target: list[SlotRef] = []
    workers: dict[str, WorkerRun] = {}
    group: list[str] = []
    joined: set[str] = set()
    met: list[str] = []
    through: set[str] = set()
    broken: bool = False
    failed_at: float | None = None


class TransitionState(msgspec.Struct, kw_only=True):
    """All of it.

    Attributes:
        token: fencing token of the active instance.
        plan: number of the newest plan taken up.
    """

    token: int = 0
    plan: int = 0
    nodes: dict[str, NodeRun] = {}
    tasks: dict[str, TaskRun] = {}
