"""The effects that the agent's core returns, for its shell to carry out."""

from dataclasses import dataclass

from unicron.contracts.base import Message, Record
from unicron.contracts.commands import CommitCheckpoint, FindCheckpoint, StartWorker
from unicron.contracts.states import Keeper, StateRef
from unicron.contracts.storage import Saving
from unicron.contracts.worker import ToWorker


@dataclass(frozen=True)
class StartProcess:
    """Start the worker's process; its slot is free. `ProcessStarted` or `ProcessExited` is the answer."""

    command: StartWorker


@dataclass(frozen=True)
class Kill:
    """Kill the process, if it is there."""

    worker: str


@dataclass(frozen=True)
class StartStandby:
    """Start the warm standby again; `StandbyReady` or `StandbyEnded` is the answer."""


@dataclass(frozen=True)
class TakeStacks:
    """Take the stacks of a worker's threads; `StacksTaken` is the answer."""

    worker: str
    pid: int


@dataclass(frozen=True)
class SendToWorker:
    """Send a message to the worker, if it is connected."""

    worker: str
    message: ToWorker


@dataclass(frozen=True)
class StoreToken:
    """Store the token in a file, where a later agent of this node finds it."""

    token: int


@dataclass(frozen=True)
class ReadToken:
    """Read the lease of the transition service; `TokenRead` is the answer, once an instance holds it."""


@dataclass(frozen=True)
class ObtainState:
    """Fetch a state for a worker, and send it a `StateFetched`."""

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
    """Cancel the copies of a worker's states that are on their way to these nodes."""

    worker: str
    nodes: frozenset[str]


class StorePart(Record, kw_only=True, frozen=True):
    """A state that lies here, to be written to storage as a part of a checkpoint.

    Attributes:
        ordered: a service waits for it; otherwise it may be skipped, as another one follows.
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
    | StartStandby
    | TakeStacks
    | SendToWorker
    | StoreToken
    | ReadToken
    | ObtainState
    | SendCopy
    | AbandonCopies
    | UseStorage
    | RemoveState
)


Out = list[Message | Effect]
"""The result of the core: facts to publish, and effects to carry out."""
