"""Facts that a node may publish under its own name about others' affairs, or untrue: of each type one. Pure.

Storms have liars say it, and a table of tests holds each service's core against it.
"""

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

from unicron.contracts.base import Message
from unicron.contracts.events import (
    CheckpointFailed,
    CheckpointFound,
    CheckpointStored,
    CollectiveFailed,
    CommandRefused,
    GradientNotFinite,
    IterationFinished,
    NodeHeartbeat,
    NodeJoined,
    NodeLeaving,
    NodeLeft,
    PartStored,
    PatternMissed,
    Regrouped,
    ScriptDrilled,
    StandbyDied,
    StandbyRevived,
    StateCopied,
    StateDiverged,
    StateKept,
    StateRejected,
    StateSecured,
    StatesFound,
    StateUnprotected,
    StateUnusable,
    StepTimed,
    WorkerAsleep,
    WorkerAway,
    WorkerExited,
    WorkerFinished,
    WorkerGrows,
    WorkerRaised,
    WorkerReady,
    WorkerStalled,
)
from unicron.contracts.hardware import FaultLogged, Gpu, GpusSampled
from unicron.contracts.slowdowns import Computed, ComputeTimed
from unicron.contracts.states import StateLocation, StateRef
from unicron.contracts.storage import Saving, StoredFile, StoredPart, StoredState
from unicron.contracts.tasks import ParallelLayout, Slot, WorkerPhase, WorkerStatus
from unicron.contracts.timings import Op

EPOCHS = (-1, 0, 1, 2, 3, 4, 6, 9, 50, 5000, 10**6)
SEARCHES = (1, 2, 3)
FILE = StoredFile(name="x", size=1, checksum="x")


class Claim(NamedTuple):
    """The subject of a lie.

    Attributes:
        node: that says it, of its own `slot`.
        task, worker: of which it says it.
        home: node on which a copy of the worker's state is said to lie.
        epoch, iteration, search: numbers in it.
        root: where the task's checkpoints lie.
    """

    node: str
    slot: int
    task: str
    worker: str
    home: str
    epoch: int = 0
    iteration: int = 5
    search: int = 1
    root: str = ""

    @property
    def worker_fields(self) -> dict[str, Any]:
        """The fields that every fact about a worker has."""
        return {"node": self.node, "slot": self.slot, "task": self.task, "worker": self.worker}

    def ref(self, name: str) -> StateRef:
        """Return a state that is said to lie at home."""
        location = StateLocation(node=self.home, worker=self.worker, name=name, address=f"{self.home}:1")
        numbers: dict[str, Any] = {"iteration": self.iteration, "place": 0, "size": 0, "checksum": b"a lie"}
        return StateRef(task=self.task, location=location, layout=ParallelLayout(), **numbers)

    @property
    def saved(self) -> StateRef:
        """A state that its worker is said to have saved."""
        return self.ref(f"{self.worker}.0.saved")

    @property
    def kept(self) -> StateRef:
        """A state that its worker is said to have left behind."""
        return self.ref(f"{self.worker}.{self.epoch}.kept")

    @property
    def iteration_fields(self) -> dict[str, Any]:
        """The membership and the iteration, as facts name them."""
        return {"epoch": self.epoch, "iteration": self.iteration}

    @property
    def task_fields(self) -> dict[str, Any]:
        """The fields of a fact about a task."""
        return {"node": self.node, "task": self.task}

    @property
    def status(self) -> WorkerStatus:
        """Its worker as one that lives here."""
        return WorkerStatus(worker=self.worker, task=self.task, slot=self.slot, ready=True, **self.iteration_fields)


def _raised(claim: Claim) -> Message:
    return WorkerRaised(
        **claim.worker_fields, iteration=claim.iteration, exception="ValueError", text="a lie", traceback=""
    )


def _joined(claim: Claim) -> Message:
    names = [claim.saved.location.name, claim.kept.location.name]
    there: dict[str, Any] = {"incarnation": "lie.1", "host": "lie", "slots": [Slot(index=claim.slot)]}
    return NodeJoined(node=claim.node, **there, workers=[claim.status], kept=names)


def _stalled(claim: Claim) -> Message:
    waits: dict[str, Any] = {"phase": WorkerPhase.COMPUTE, "waited_s": 9.0, "limit_s": 1.0, "responsive": False}
    return WorkerStalled(**claim.worker_fields, **claim.iteration_fields, **waits)


def _diverged(claim: Claim) -> Message:
    return StateDiverged(**claim.worker_fields, **claim.iteration_fields, place=0, replica=0, digests=["a", "b"])


def _part(claim: Claim) -> Message:
    saving = Saving(
        root=claim.root, task=claim.task, iteration=claim.iteration, layout=ParallelLayout(), attempt="00000000"
    )
    return PartStored(**claim.task_fields, saving=saving, part=StoredPart(place=0, index=FILE, data=FILE), seconds=1.0)


def _found(claim: Claim) -> Message:
    stored = StoredState(root=claim.root, folder="lie", iteration=claim.iteration, layout=ParallelLayout())
    return CheckpointFound(**claim.task_fields, search=claim.search, stored=stored, skipped=[])


def _timed(claim: Claim) -> Message:
    ops = [Op(kind=0, microbatch=0, start_us=0, duration_us=1)]
    return StepTimed(**claim.worker_fields, **claim.iteration_fields, rank=0, world_size=2, began=1.0, ops=ops)


CLAIMS: dict[type[Message], Callable[[Claim], Message]] = {
    NodeJoined: _joined,
    NodeLeft: lambda claim: NodeLeft(node=claim.node, incarnation="lie"),
    NodeLeaving: lambda claim: NodeLeaving(node=claim.node, incarnation="lie", seconds=1.0),
    NodeHeartbeat: lambda claim: NodeHeartbeat(node=claim.node, incarnation="lie"),
    StandbyDied: lambda claim: StandbyDied(node=claim.node, how="is a lie", deaths=9, wait_s=1.0, helpless=True),
    StandbyRevived: lambda claim: StandbyRevived(node=claim.node, seconds=1.0),
    ComputeTimed: lambda claim: ComputeTimed(
        node=claim.node,
        task=claim.task,
        **claim.iteration_fields,
        workers=[Computed(worker=claim.worker, rank=0, place=0, seconds=1.0)],
    ),
    GpusSampled: lambda claim: GpusSampled(node=claim.node, gpus=[Gpu(slot=claim.slot)]),
    FaultLogged: lambda claim: FaultLogged(**claim.worker_fields, text="NVRM: Xid (PCI:0000:3b:00): 31, a lie"),
    WorkerReady: lambda claim: WorkerReady(**claim.worker_fields, pid=1),
    WorkerExited: lambda claim: WorkerExited(**claim.worker_fields, exit_code=1),
    WorkerRaised: _raised,
    WorkerStalled: _stalled,
    WorkerAsleep: lambda claim: WorkerAsleep(
        **claim.worker_fields, **claim.iteration_fields, waited_s=1.0, limit_s=2.0
    ),
    WorkerAway: lambda claim: WorkerAway(**claim.worker_fields, **claim.iteration_fields, waited_s=9.0),
    WorkerGrows: lambda claim: WorkerGrows(**claim.worker_fields, **claim.iteration_fields, used=9, left=1, rate=1.0),
    PatternMissed: lambda claim: PatternMissed(**claim.task_fields, pattern="x", limit_s=9.0),
    WorkerFinished: lambda claim: WorkerFinished(**claim.worker_fields, iterations=claim.iteration),
    CollectiveFailed: lambda claim: CollectiveFailed(**claim.worker_fields, **claim.iteration_fields, error="a lie"),
    Regrouped: lambda claim: Regrouped(**claim.worker_fields, **claim.iteration_fields, rank=0, world_size=1),
    StateKept: lambda claim: StateKept(**claim.worker_fields, epoch=claim.epoch, state=claim.kept),
    StateSecured: lambda claim: StateSecured(**claim.worker_fields, iteration=claim.iteration, nodes=[]),
    StateUnprotected: lambda claim: StateUnprotected(**claim.worker_fields, reason="a lie"),
    StateDiverged: _diverged,
    StateUnusable: lambda claim: StateUnusable(
        **claim.worker_fields, **claim.iteration_fields, copies="x", reason="a lie"
    ),
    GradientNotFinite: lambda claim: GradientNotFinite(
        **claim.worker_fields, **claim.iteration_fields, rank=0, microbatches=[0]
    ),
    ScriptDrilled: lambda claim: ScriptDrilled(
        **claim.worker_fields, iteration=claim.iteration, rank=0, problem="a lie", as_is=True
    ),
    StateRejected: lambda claim: StateRejected(**claim.task_fields, state=claim.saved, reason="a lie"),
    StateCopied: lambda claim: StateCopied(**claim.task_fields, state=claim.kept),
    StatesFound: lambda claim: StatesFound(**claim.task_fields, search=claim.search, states=[claim.saved]),
    PartStored: _part,
    CheckpointStored: lambda claim: CheckpointStored(
        **claim.task_fields, iteration=claim.iteration, address="x", removed=[]
    ),
    CheckpointFailed: lambda claim: CheckpointFailed(**claim.task_fields, reason="a lie"),
    CheckpointFound: _found,
    CommandRefused: lambda claim: CommandRefused(**claim.task_fields, command="x", reason="a lie", worker=claim.worker),
    IterationFinished: lambda claim: IterationFinished(
        **claim.worker_fields, **claim.iteration_fields, world_size=1, seconds=9.0, loss=1.0
    ),
    StepTimed: _timed,
}
"""Forged facts by type: every type that a node may publish."""

ABOUT_NODES = {NodeJoined, NodeLeft, NodeLeaving, NodeHeartbeat, StandbyDied, StandbyRevived, GpusSampled}
ABOUT_TASKS = tuple(kind for kind in CLAIMS if kind not in ABOUT_NODES)


def claimed(random: Random, claim: Claim, number: int) -> list[Message]:
    """Return lies of one type about a claim's task: of its worker, of one that never was, or of one that was once.

    Args:
        random: decides what they are.
        claim: whose numbers are chosen here.
        number: of such lies before; it makes invented workers different.
    """
    kind = random.choice(ABOUT_TASKS)
    claim = claim._replace(
        home=random.choice([claim.node, claim.home]),
        epoch=random.choice(EPOCHS),
        iteration=random.choice([0, 1, 33, 50, 5000]),
        search=random.choice(SEARCHES),
    )
    names = [claim.worker, f"{claim.task}-{900 + number}", f"{claim.task}-{random.randint(1, 9)}"]
    lies = [CLAIMS[kind](claim._replace(worker=random.choice(names)))]
    if kind is WorkerRaised:  # the same of two workers is the program's own fault
        lies.append(CLAIMS[kind](claim._replace(worker=f"{claim.task}-{901 + number}")))
    return lies
