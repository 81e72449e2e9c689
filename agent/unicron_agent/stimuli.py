"""What the agent's core hears, and what it has its shell do: the whole interface between the two."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from unicron.contracts.base import Message, Record
from unicron.contracts.commands import CommitCheckpoint, FindCheckpoint, StartWorker
from unicron.contracts.hardware import Gpu
from unicron.contracts.states import Keeper, StateRef
from unicron.contracts.storage import Saving
from unicron.contracts.tasks import ParallelLayout
from unicron.contracts.watchdogs import LogPattern
from unicron.contracts.worker import ToAgent, ToWorker
from unicron_agent.silence import Use
from unicron_agent.watchdogs.memory import Memory
from unicron_agent.watchdogs.stores import Store

# --- in --------------------------------------------------------------------------------------------------------------


class Running(Record, kw_only=True, frozen=True):
    """What is written down of a worker process, so that an agent that comes back finds it.

    Attributes:
        started: start time of the process in clock ticks since boot, which tells a reused process id.
        log: the file that it writes to.
        correlation: chain of the command that it was started by.
        place: part of the model that it was started for.
        layout: the shape of the replica that has this place.
        restarts: whether it runs a program without a session, anew in each membership.
        silence_s: how long it may show no sign of life where nobody watches it; 0: for ever.
        spins: whether its device makes who waits spin.
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
    """The first stimulus: what an earlier agent has left. `ProcessExited` follows for workers that are dead.

    Attributes:
        found: the workers that it has written down.
        kept: names of the states that workers have left behind.
        saved: the states that workers here or elsewhere have saved.
    """

    found: list[Running]
    kept: Collection[str] = ()
    saved: Collection[StateRef] = ()


@dataclass(frozen=True)
class EntryRead:
    """The journal holds `data` on `subject`, read at `at` in Unix seconds."""

    sequence: int
    subject: str
    data: bytes
    at: float


@dataclass(frozen=True)
class WorkerSaid:
    """A worker sent a message."""

    worker: str
    message: ToAgent


@dataclass(frozen=True)
class ProcessStarted:
    """What `StartProcess` asked for was done."""

    worker: str
    pid: int


@dataclass(frozen=True)
class StacksTaken:
    """What `TakeStacks` asked for, a line for each thread."""

    worker: str
    stacks: tuple[str, ...]


@dataclass(frozen=True)
class ProcessExited:
    """A worker's process is gone, or could not be started; code and signal are None where unknown.

    Attributes:
        collectives: a line for each that was under way, where torch has written that.
    """

    worker: str
    exit_code: int | None = None
    signal: int | None = None
    stderr: tuple[str, ...] = ()
    collectives: tuple[str, ...] = ()


@dataclass(frozen=True)
class Published:
    """The bus has taken a fact of this agent into the journal."""

    fact: Message
    sequence: int


@dataclass(frozen=True)
class TokenRead:
    """The answer to `AskToken`: the fencing token of the instance that may give commands now."""

    token: int


@dataclass(frozen=True)
class Reconnected:
    """The bus was away, and is back."""


@dataclass(frozen=True)
class CopySent:
    """What `SendCopy` asked for: a node has a copy now; or why not, if `problem` is not empty.

    Attributes:
        unsound: what was to be copied is not what its checksum says.
    """

    ref: StateRef
    node: str
    problem: str = ""
    unsound: bool = False


@dataclass(frozen=True)
class CopyReceived:
    """A copy of a state that was saved elsewhere lies here; `ref` is None as long as one is being written over."""

    name: str
    ref: StateRef | None


@dataclass(frozen=True)
class StorageUsed:
    """What came of `UseStorage`, as a fact."""

    fact: Message


@dataclass(frozen=True)
class StateUnsound:
    """A copy is not what its checksum says."""

    ref: StateRef
    reason: str


@dataclass(frozen=True)
class Logged:
    """The kernel's log, a GPU's driver or the output of a worker told of a fault.

    Attributes:
        text: one line.
        status: what it stands for, so that one that is told again and again is known again.
        slot: whose GPU it names, -1 for none.
        pid: of the process that it names, 0 for none.
        author: the worker that wrote it, empty where it was the kernel or the driver.
    """

    text: str
    status: str
    slot: int = -1
    pid: int = 0
    author: str = ""


@dataclass(frozen=True)
class Sampled:
    """What the GPUs count now."""

    gpus: tuple[Gpu, ...]


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
        asleep: of the late workers those whose processes all sleep, with the seconds of CPU that these have used.
        used: what the processes of those workers have used that may be silent.
        pressure: for which share of the time something waits for a core of this machine.
    """

    stopped: Collection[str] = ()
    asleep: Mapping[str, float] = field(default_factory=dict)
    used: Mapping[str, Use] = field(default_factory=dict)
    pressure: float = 0.0


@dataclass(frozen=True)
class Notice:
    """The node is to go in so many seconds, or as soon as nobody needs it any more."""

    seconds: float


@dataclass(frozen=True)
class Leave:
    """The agent is to end, with all its workers."""


Stimulus = (
    Adopted
    | EntryRead
    | WorkerSaid
    | ProcessStarted
    | StacksTaken
    | ProcessExited
    | Published
    | TokenRead
    | Reconnected
    | CopySent
    | CopyReceived
    | StateUnsound
    | StorageUsed
    | Logged
    | Sampled
    | MachineMeasured
    | PatternMatched
    | Tick
    | Notice
    | Leave
)

# --- out -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StartProcess:
    """Start the worker's process; its slot is free. `ProcessStarted` or `ProcessExited` is the answer."""

    command: StartWorker


@dataclass(frozen=True)
class Kill:
    """Kill the process, if it is there."""

    worker: str


@dataclass(frozen=True)
class TakeStacks:
    """Look where the threads of a worker are; `StacksTaken` is the answer."""

    worker: str
    pid: int


@dataclass(frozen=True)
class SendToWorker:
    """Send a message to the worker, if it is connected."""

    worker: str
    message: ToWorker


@dataclass(frozen=True)
class StoreToken:
    """Write the token down where a later agent of this node finds it."""

    token: int


@dataclass(frozen=True)
class AskToken:
    """Read the lease of the transition service; `TokenRead` is the answer, once somebody has it."""


@dataclass(frozen=True)
class ObtainState:
    """Obtain a state, and send the worker a `StateFetched`."""

    worker: str
    ref: StateRef


@dataclass(frozen=True)
class SendCopy:
    """Send a copy of a state that was saved here to another node; `CopySent` is the answer.

    Attributes:
        paced: while training sends nothing, rather than now.
    """

    ref: StateRef
    keeper: Keeper
    paced: bool = True


@dataclass(frozen=True)
class AbandonCopies:
    """Send these nodes no copy of what a worker saved, not even to its end: they are to keep none."""

    worker: str
    nodes: frozenset[str]


class StorePart(Record, kw_only=True, frozen=True):
    """A state that lies here, to be written to storage as a part of a checkpoint.

    Attributes:
        ordered: somebody waits for it; else the next one will do as well.
    """

    ref: StateRef
    saving: Saving
    ordered: bool = False


@dataclass(frozen=True)
class UseStorage:
    """Write to storage or look there, in a process of its own; `StorageUsed` is the answer."""

    job: StorePart | CommitCheckpoint | FindCheckpoint


@dataclass(frozen=True)
class RemoveState:
    """Remove a state that lies here."""

    name: str


Effect = (
    StartProcess
    | Kill
    | TakeStacks
    | SendToWorker
    | StoreToken
    | AskToken
    | ObtainState
    | SendCopy
    | AbandonCopies
    | UseStorage
    | RemoveState
)

Out = list[Message | Effect]
"""What a core answers: facts to publish, and effects to carry out."""
