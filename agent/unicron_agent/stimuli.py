"""The stimuli that the agent's shell passes to the core."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from unicron.contracts.base import Message, Record
from unicron.contracts.hardware import Gpu
from unicron.contracts.states import StateRef
from unicron.contracts.tasks import ParallelLayout
from unicron.contracts.watchdogs import AlertKind, LogPattern
from unicron.contracts.worker import ToAgent
from unicron_agent.life_signs import ProcessUse


class WorkerProcess(Record, kw_only=True, frozen=True):
    """The record of a worker process in a file, from which a restarted agent adopts it.

    Attributes:
        started: start time of the process in clock ticks since boot; it differs if the process id was reused.
        log: the file that it writes to.
        correlation: chain of the command that started it.
        place: part of the model that it was started for.
        layout: the shape of the replica that has this place.
        restarts: whether it runs a program without a session, again in each membership.
        silence_s: how long it may show no sign of life while unwatched; 0: for ever.
        spins: whether its threads spin while they wait for its device.
        checkpoints: where its task's are written.
        watch_log: what its task is to write.
    """

    worker: str
    task: str
    slot: int
    pid: int
    started: int = 0
    log: str = ""
    correlation: str = ""
    place: int = 0
    layout: ParallelLayout = ParallelLayout()
    restarts: bool = False
    silence_s: float = 0.0
    spins: bool = False
    checkpoints: str = ""
    watch_log: list[LogPattern] = []


@dataclass(frozen=True)
class Adopted:
    """The first stimulus: what an earlier agent left. `ProcessExited` follows for workers that are dead.

    Attributes:
        found: the recorded workers.
        kept: names of the states that workers left behind.
        saved: the states that workers here or elsewhere have saved.
    """

    found: list[WorkerProcess]
    kept: Collection[str] = ()
    saved: Collection[StateRef] = ()


@dataclass(frozen=True)
class EntryRead:
    """The journal holds `data` on `subject`."""

    sequence: int
    subject: str
    data: bytes


@dataclass(frozen=True)
class WorkerMessage:
    """A worker sent a message."""

    worker: str
    message: ToAgent


@dataclass(frozen=True)
class ProcessStarted:
    """The process that `StartProcess` ordered is running."""

    worker: str
    pid: int


@dataclass(frozen=True)
class StacksTaken:
    """The stacks that `TakeStacks` ordered, a line for each thread."""

    worker: str
    stacks: tuple[str, ...]


@dataclass(frozen=True)
class ProcessExited:
    """A worker's process has ended, or could not be started; code and signal are None where unknown.

    Attributes:
        collectives: a line for each collective that was under way, if torch dumped them.
    """

    worker: str
    exit_code: int | None = None
    signal: int | None = None
    stderr: tuple[str, ...] = ()
    collectives: tuple[str, ...] = ()


@dataclass(frozen=True)
class StandbyReady:
    """The warm standby, which forks workers, can do so now."""


@dataclass(frozen=True)
class StandbyEnded:
    """The warm standby has ended, or could not be started; `StartStandby` is the answer.

    Attributes:
        how: in words that follow its name.
    """

    how: str


@dataclass(frozen=True)
class Published:
    """A fact of this agent is in the journal."""

    fact: Message
    sequence: int


@dataclass(frozen=True)
class TokenRead:
    """The answer to `ReadToken`: the fencing token of the instance that may give commands now."""

    token: int


@dataclass(frozen=True)
class Reconnected:
    """The bus was away, and is back."""


@dataclass(frozen=True)
class CopySent:
    """The result of `SendCopy`: the node has a copy, or `problem` says why not.

    Attributes:
        unsound: the original does not match its checksum.
    """

    ref: StateRef
    node: str
    problem: str = ""
    unsound: bool = False


@dataclass(frozen=True)
class CopyReceived:
    """A copy of another node's state is complete here; `ref` is None when one begins to be overwritten."""

    name: str
    ref: StateRef | None


@dataclass(frozen=True)
class StorageUsed:
    """The result of `UseStorage`, as a fact."""

    fact: Message


@dataclass(frozen=True)
class TrialEnded:
    """A process that was on trial in the place of a worker, which has ended meanwhile, is through; as a fact."""

    fact: Message


@dataclass(frozen=True)
class StateUnsound:
    """A fetched state does not match its checksum."""

    ref: StateRef
    reason: str


@dataclass(frozen=True)
class Logged:
    """A line of the kernel's log, a GPU's driver or a worker's output reports a fault.

    Attributes:
        text: the line.
        status: the status of a failure that the rules give it; repeats are recognized by it.
        slot: the slot of the GPU that it names, -1 for none.
        pid: the process that it names, 0 for none.
        author: the worker that wrote it, empty for the kernel and the driver.
    """

    text: str
    status: str
    slot: int = -1
    pid: int = 0
    author: str = ""


@dataclass(frozen=True)
class Sampled:
    """Counters of all GPUs were read."""

    gpus: tuple[Gpu, ...]


class Memory(NamedTuple):
    """The memory of a machine, or of the container that the workers are in.

    Attributes:
        left: bytes that can still be had.
        total: bytes.
    """

    left: int
    total: int


class Store(NamedTuple):
    """Something that holds so much.

    Attributes:
        kind: of the alert about it.
        name: what and where it is, in words.
        used, total: in bytes, or a number.
        least_free: share of it below which it counts as nearly full.
        unit: "bytes" or what else is counted.
    """

    kind: AlertKind
    name: str
    used: int
    total: int
    least_free: float
    unit: str = "bytes"

    @property
    def free(self) -> int:
        """The free share."""
        return max(0, self.total - self.used)


@dataclass(frozen=True)
class MachineMeasured:
    """How full this machine is.

    Attributes:
        stores: its file systems.
        memory: of the machine or its container; None where that is not known.
        used: bytes of memory that workers hold, by name.
    """

    stores: tuple[Store, ...]
    memory: Memory | None
    used: Mapping[str, int]


@dataclass(frozen=True)
class PatternMatched:
    """A worker wrote lines that match a pattern of its task.

    Attributes:
        index: of the pattern.
        wrong: the first of them in which the number that it captures is none; empty where there is no such.
    """

    worker: str
    index: int
    wrong: str = ""


@dataclass(frozen=True)
class Tick:
    """Some time has passed.

    Attributes:
        stopped: workers whose processes are stopped now.
        asleep: seconds of CPU used so far, by late worker whose processes all sleep.
        used: what processes have used so far, by worker that may be silent.
        pressure: share of the time in which something waits for a core of this machine.
    """

    stopped: Collection[str] = ()
    asleep: Mapping[str, float] = field(default_factory=dict)
    used: Mapping[str, ProcessUse] = field(default_factory=dict)
    pressure: float = 0.0


@dataclass(frozen=True)
class DepartureNotice:
    """The node is to go in so many seconds, or as soon as it is released."""

    seconds: float


@dataclass(frozen=True)
class Shutdown:
    """The agent is to end, with all its workers."""


Observation = Logged | Sampled | MachineMeasured | PatternMatched | TrialEnded
"""Observations of the machine, of the output of a worker, or of a trial."""

Stimulus = (
    Adopted
    | EntryRead
    | WorkerMessage
    | ProcessStarted
    | StacksTaken
    | ProcessExited
    | StandbyReady
    | StandbyEnded
    | Published
    | TokenRead
    | Reconnected
    | CopySent
    | CopyReceived
    | StateUnsound
    | StorageUsed
    | TrialEnded
    | Logged
    | Sampled
    | MachineMeasured
    | PatternMatched
    | Tick
    | DepartureNotice
    | Shutdown
)
