"""Tasks, nodes, slots and workers: the nouns of every message."""

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, NamedTuple

from unicron.contracts import time_limits
from unicron.contracts.base import Record, Word
from unicron.contracts.ranges import Count, Few, Label, Number, Text, Whole
from unicron.contracts.watchdogs import LogPattern


class Seat(NamedTuple):
    """A worker's position in a task's layout.

    Attributes:
        replica: which copy of the model it helps to hold, from 0.
        place: which part of the model it holds, from 0; workers with the same place of different replicas hold the
            same state.
    """

    replica: int
    place: int


class ParallelLayout(Record, kw_only=True, frozen=True):
    """How the workers of a task share the model and the data.

    A *replica* is the smallest set of workers that holds the whole model once: tensor x pipeline x shard workers. Only
    the number of replicas changes while a task runs; the shape of a replica changes by a plan alone.

    Attributes:
        tensor: degree of tensor parallelism.
        pipeline: stages of the pipeline.
        shard: ranks over which a replica's parameters are sharded (FSDP).
        replicas: degree of data parallelism.
    """

    tensor: Whole = 1
    pipeline: Whole = 1
    shard: Whole = 1
    replicas: Whole = 1

    @property
    def replica_workers(self) -> int:
        """Workers of one replica, which is also the number of places."""
        return self.tensor * self.pipeline * self.shard

    @property
    def workers(self) -> int:
        """Workers of all replicas."""
        return self.replica_workers * self.replicas

    def seat(self, rank: int) -> Seat:
        """Return where `rank` sits: ranks count the places of one replica after the other's."""
        return Seat(*divmod(rank, self.replica_workers))

    def place_name(self, rank: int) -> str:
        """Return a rank's replica and place as people read them, r1p0; empty where a replica is one worker."""
        seat = self.seat(rank)
        return "" if self.replica_workers == 1 else f"r{seat.replica}p{seat.place}"

    @property
    def degrees(self) -> str:
        """The shape of a replica as people read it: "tensor 2 x pipeline 2", or "whole models"."""
        named = (("tensor", self.tensor), ("pipeline", self.pipeline), ("shard", self.shard))
        return " x ".join(f"{name} {degree}" for name, degree in named if degree > 1) or "whole models"

    def is_like(self, other: "ParallelLayout") -> bool:
        """Return whether a replica of `other` has the same shape: then their places mean the same."""
        return (self.tensor, self.pipeline, self.shard) == (other.tensor, other.pipeline, other.shard)

    def with_workers(self, workers: int) -> "ParallelLayout":
        """Return this shape with as many whole replicas as `workers` make."""
        return ParallelLayout(
            tensor=self.tensor,
            pipeline=self.pipeline,
            shard=self.shard,
            replicas=workers // self.replica_workers,
        )


class Slot(Record, kw_only=True, frozen=True):
    """One place for one worker on a node.

    Attributes:
        index: number of the slot on its node, from 0.
        kind: "gpu" or "cpu".
        device: UUID of the GPU, empty for a CPU slot.
    """

    index: Number
    kind: Label = "cpu"
    device: Label = ""


class SlotRef(Record, order=True, kw_only=True, frozen=True):
    """A slot of a node."""

    node: Label
    slot: Number

    def __str__(self) -> str:
        return f"{self.node}:{self.slot}"


class ModelSpec(Record, kw_only=True, frozen=True):
    """A transformer trained by Megatron on GPUs, from which T(t, x) can be calculated; one worker is one GPU.

    Attributes:
        layers: transformer layers.
        hidden: hidden size.
        heads: attention heads; they divide the hidden size.
        sequence: tokens of a sequence.
        vocabulary: entries of the (padded) vocabulary.
        batch: sequences of a global batch.
        accelerator: a name in unicron/costmodel/accelerators.toml.
        gpus_per_node: GPUs of a node; tensor-parallel groups stay inside of one.
        anchor_workers: number of workers of the one measurement that scales the model; 0 where there is none.
        anchor_mfu: model FLOPs utilisation measured with them, from 0 to 1.
        padded: whether layers and batch may be padded to what does not divide them (else such sizes are infeasible).
    """

    layers: Whole
    hidden: Whole
    heads: Whole
    sequence: Whole
    vocabulary: Whole
    batch: Whole
    accelerator: Label = "A100"
    gpus_per_node: Whole = 8
    anchor_workers: Whole = 0
    anchor_mfu: float = 0.0
    padded: bool = False


UNCOUNTED = 10**9
"""Iterations of a task that is done when its program says so; none has more."""


class Healing(Word):
    """How the workers of a task come back after a failure."""

    SESSION = "session"
    """Their script has a `Session`: those that live stay, and go on in the iteration that failed."""
    RESTART = "restart"
    """Their script knows nothing of Unicron: it is run again on all of them, and goes on from its own checkpoints."""
    IN_PLACE = "in-place"
    """Their script trains with DistributedDataParallel: survivors keep running, and replacements join them."""
    UNKNOWN = "unknown"


SILENCE_S = time_limits.SILENCE_S
"""As long as torch has a collective wait, where nobody says otherwise."""

SHORTEST_SILENCE_S = 1.0
"""A program is looked at four times within its limit: in less, one that only waits for its turn would seem dead."""


class TaskSpec(Record, kw_only=True, frozen=True):
    """A task as a user submits it.

    Attributes:
        name: unique; letters, digits, '-' and '_'.
        command: program and arguments; a Python script is forked from the warm standby.
        weight: w(t) of equation 2; 0.5 to 2.0 recommended, positive required.
        min_workers: T_necessary, below which the task earns nothing and waits.
        max_workers: most workers the task can use.
        unit: workers come in multiples of it.
        microbatches: microbatches of a global batch, shared out over the workers.
        iterations: optimizer steps until the task is finished.
        workdir: working directory of the workers, on their node.
        env: environment variables for the workers.
        flops_per_iteration: model FLOPs of one iteration, which turns measured iteration times into FLOP/s.
        throughput: T(t, x), workers -> achieved aggregate FLOP/s; empty where unknown.
        model: what is trained, where T(t, x) is to be calculated for sizes that nobody measured.
        checkpoints: directory or URL (such as s3://bucket/folder) that every node sees, to which the state is written
            once in a while; empty: none.
        checkpoint_s: seconds from one such checkpoint to the next; 0: as failures and the time to write one call for.
        resume: begin with the newest checkpoint there that an earlier task of this name has written, if there is one.
        layout: shape of one replica; how many replicas there are is for the plan to say.
        layouts: shape of one replica by number of workers, where it depends on that: then these are the sizes that are
            allowed, and `layout` does not count.
        heal: how the workers come back after a failure.
        silence_s: seconds after which a script without a session is taken to hang if none of its ranks shows any life;
            0: never.
        drill: beside a script that is healed in place a process takes a rank's place on trial; if that computes
            something else, all begin again whenever a rank is lost.
        stop_grace_s: seconds from the SIGTERM that asks the others of a script without a session to end, where one has
            failed, to the SIGKILL.
        within_domain: its tensor-parallel groups run in one NVLink domain each, or not at all; as long as no domain of
            any node is known, as without.
        watch_log: what its workers are to write.
        commit: of the folder of its script when it was submitted, for people; empty where that is not known.
    """

    name: Label
    command: Annotated[list[Text], Few]
    weight: float = 1.0
    min_workers: Whole = 1
    max_workers: Whole = 1
    unit: Whole = 1
    microbatches: Whole = 1
    iterations: Whole = 1
    workdir: Label = ""
    env: dict[str, str] = {}
    flops_per_iteration: float = 1.0
    throughput: dict[int, float] = {}
    model: ModelSpec | None = None
    checkpoints: Label = ""
    checkpoint_s: float = 0.0
    resume: bool = False
    layout: ParallelLayout = ParallelLayout()
    layouts: dict[int, ParallelLayout] = {}
    heal: Healing = Healing.SESSION
    silence_s: float = SILENCE_S
    drill: bool = True
    stop_grace_s: float = 30.0
    within_domain: bool = False
    watch_log: Annotated[list[LogPattern], Few] = []
    commit: Label = ""

    def shape(self, workers: int) -> ParallelLayout:
        """Return the layout of so many workers."""
        return self.layouts.get(workers, self.layout).with_workers(workers)

    def sizes_like(self, shape: ParallelLayout) -> Sequence[int]:
        """Worker counts that are allowed with replicas of this shape, ascending."""
        return [size for size in self.sizes if self.shape(size).is_like(shape)] if self.layouts else self.sizes

    @property
    def sizes(self) -> Sequence[int]:
        """Worker counts that are allowed, ascending: whole replicas, in multiples of `unit`."""
        if self.layouts:
            allowed = range(self.min_workers, self.max_workers + 1)
            return sorted(size for size in self.layouts if size in allowed and size % self.unit == 0)
        step = math.lcm(self.unit, self.layout.replica_workers)
        return range(-(-self.min_workers // step) * step, self.max_workers + 1, step)


class TaskState(StrEnum):
    """The state of a task. WAITING: submitted, and no plan gives it its minimum of workers yet."""

    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    RECOVERING = "recovering"
    RECONFIGURING = "reconfiguring"
    FINISHED = "finished"
    FAILED = "failed"
    REMOVED = "removed"

    @property
    def ended(self) -> bool:
        """Whether the task will never run again."""
        return self in {TaskState.FINISHED, TaskState.FAILED, TaskState.REMOVED}


class NodeState(StrEnum):
    """The state of a node."""

    UP = "up"
    DRAINING = "draining"
    LOST = "lost"
    LEFT = "left"


class WorkerPhase(Word):
    """The phase of a worker process."""

    STARTING = "starting"
    """Building its model."""
    WAITING = "waiting"
    """For a membership, or for a state."""
    COMPUTE = "compute"
    REDUCE = "reduce"
    STEP = "step"
    """Updating its parameters."""
    BETWEEN = "between"
    """Whatever its script does between two iterations, such as an evaluation."""
    FINISHED = "finished"
    UNKNOWN = "unknown"


class Breakage(Word):
    """The error that made a worker wait for a new membership."""

    GROUP = "group"
    """A collective or the forming of a group: a peer or a link is gone."""
    STATE = "state"
    """No source could hand over the state that it needs."""
    LACK = "lack"
    """Likewise, as a machine lacks room for it, or something else that the transfer takes; told by who needs it."""
    UNKNOWN = "unknown"


class WorkerStatus(Record, kw_only=True, frozen=True):
    """A living worker process as its agent sees it.

    Attributes:
        worker: unique name of this process, given by the transition service.
        epoch: membership epoch it last joined, -1 before the first.
        iteration: iteration it is computing, -1 while it has no state.
        ready: whether its model and optimizer are built.
        place: part of the model that it was started for.
        layout: the shape of the replica that has this place.
    """

    worker: Label
    task: Label
    slot: Number
    pid: Count = 0
    epoch: Number = -1
    iteration: Number = -1
    ready: bool = False
    place: Number = 0
    layout: ParallelLayout = ParallelLayout()


class Member(Record, kw_only=True, frozen=True):
    """One rank of a membership; its rank is its position in the list.

    Attributes:
        state_server: host:port of its agent's gRPC state server.
    """

    worker: Label
    node: Label
    slot: Number
    state_server: Label = ""

    @property
    def place(self) -> SlotRef:
        """The slot that this member runs in."""
        return SlotRef(node=self.node, slot=self.slot)
