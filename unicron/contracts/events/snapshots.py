"""Facts about states that are saved, copied, found and stored."""

from typing import Annotated, ClassVar

from unicron.contracts.base import AgentMessage, Message
from unicron.contracts.events.workers import WorkerFact
from unicron.contracts.ranges import Count, Few, Label, Many, Name, Number, Seconds, Text
from unicron.contracts.sentences import after, where
from unicron.contracts.states import StateRef
from unicron.contracts.storage import Saving, StoredPart, StoredState


class StateKept(WorkerFact, kw_only=True, frozen=True):
    """A worker has left its state behind in its node's memory, where it outlives the worker.

    Attributes:
        epoch: of the membership that it leaves.
    """

    epoch: Number
    state: StateRef

    def __str__(self) -> str:
        return f"{where(self)} leaves its state of iteration {self.state.iteration} behind"


class StateSecured(WorkerFact, kw_only=True, frozen=True):
    """A worker's state is safe: all copies of it are complete for the first time since they were ordered, or failed.

    Attributes:
        nodes: other nodes that have one.
    """

    iteration: Number
    nodes: Annotated[list[Label], Many]

    def __str__(self) -> str:
        return (
            f"{where(self)} saves its state, and that of iteration {self.iteration} is whole"
            f"{after(', also on ', ', '.join(self.nodes))}"
        )


class StateUnprotected(WorkerFact, kw_only=True, frozen=True):
    """A worker that is to save its state can't; it trains on, and older copies stay."""

    reason: Text

    def __str__(self) -> str:
        return f"{where(self)} can't save its state: {self.reason}"


class StateDiverged(WorkerFact, kw_only=True, frozen=True):
    """A worker's state is not what other replicas have of its place: it takes another's, and its copies count no more.

    Attributes:
        epoch: of the membership that compared.
        place: part of the model.
        replica: of the worker.
        digests: of all replicas, in their order: 64 bits of parameters and optimizer state.
        undecided: there is no majority; the state of as many as any other, and of the lowest rank among them, counts.
    """

    epoch: Number
    iteration: Number
    place: Number
    replica: Number
    digests: Annotated[list[Label], Many]
    undecided: bool = False

    def __str__(self) -> str:
        return (
            f"{where(self)} has another state of iteration {self.iteration} than other replicas, and takes theirs: "
            f"{' '.join(self.digests)}{', undecided: the lowest rank counts' * self.undecided}"
        )


class StateUnusable(WorkerFact, kw_only=True, frozen=True):
    """The first gradient on a state that was had from copies is not finite, or is another: an older one is to be taken.

    Attributes:
        epoch: of the membership that took it.
        iteration: of the state.
        copies: where it was had from.
        uncarried: nobody can go on with what ranks of this script leave: none is to be saved, nor taken.
    """

    epoch: Number
    iteration: Number
    copies: Text
    reason: Text
    uncarried: bool = False

    def __str__(self) -> str:
        return f"{self.worker} can't go on from iteration {self.iteration}, which is from {self.copies}: {self.reason}"


class StateRejected(AgentMessage, kw_only=True, frozen=True):
    """A copy of a state is not what its checksum says, and must not be used by anybody.

    Attributes:
        node: that found it out.
        state: the copy.
    """

    task: Name
    state: StateRef
    reason: Text

    def __str__(self) -> str:
        return f"{self.state.location.node} holds a bad copy, found out on {self.node}: {self.reason}"


class StateCopied(AgentMessage, kw_only=True, frozen=True):
    """The answer to `CopyState`: another node has a copy now; or it has none, and why.

    Attributes:
        node: that was to send it.
        state: as it lies at its new node, or would.
        problem: why it does not; empty where it does.
    """

    task: Name
    state: StateRef
    problem: Text = ""

    def __str__(self) -> str:
        return (
            f"{self.state.location.node} keeps "
            f"{'no copy' if self.problem else 'a copy'} of what {self.state.location.worker} left on {self.node}"
            f"{after(': ', self.problem)}"
        )


class StatesFound(AgentMessage, kw_only=True, frozen=True):
    """The answer to `FindStates`: what lies in the memory of a node.

    Attributes:
        search: the number that was asked under.
        states: all copies of the task's states that are whole.
    """

    task: Name
    search: Count
    states: Annotated[list[StateRef], Many]

    def __str__(self) -> str:
        iterations = sorted({f"iteration {ref.iteration}" for ref in self.states})
        return f"{self.node} has of {self.task} {', '.join(iterations) or 'nothing'}"


class PartStored(AgentMessage, kw_only=True, frozen=True):
    """A place's part of a checkpoint is on storage.

    Attributes:
        saving: the attempt that it belongs to.
        part: what was written.
        seconds: that took.
    """

    task: Name
    saving: Saving
    part: StoredPart
    seconds: Seconds

    def __str__(self) -> str:
        return (
            f"{self.node} has written place {self.part.place} of {self.task} to storage: "
            f"iteration {self.saving.iteration}, {self.seconds:.1f} s"
        )


class CheckpointStored(AgentMessage, kw_only=True, frozen=True):
    """A checkpoint is complete on storage, read again and found right.

    Attributes:
        address: as `torch.distributed.checkpoint.load` takes it.
        removed: older ones that were removed for it.
        folder: of it, in the task's.
    """

    task: Name
    iteration: Number
    address: Label
    removed: Annotated[list[Label], Few]
    folder: Label = ""

    def __str__(self) -> str:
        return f"iteration {self.iteration} of {self.task} is on storage: {self.address}"


class CheckpointFailed(AgentMessage, kw_only=True, frozen=True):
    """A checkpoint could not be written to storage, or none could be looked for; the last good one is untouched."""

    task: Name
    reason: Text

    def __str__(self) -> str:
        return f"{self.node} can't use the storage of {self.task}: {self.reason}"


class CheckpointFound(AgentMessage, kw_only=True, frozen=True):
    """The answer to `FindCheckpoint`.

    Attributes:
        search: the number that was asked under.
        stored: the newest that passes its check; None where none does.
        skipped: newer ones that do not, and why.
    """

    task: Name
    search: Count
    stored: StoredState | None
    skipped: Annotated[list[Text], Few]

    def __str__(self) -> str:
        found = f"iteration {self.stored.iteration}" if self.stored else "nothing"
        skipped = after(", and skips ", "; ".join(self.skipped))
        return f"on storage {self.node} finds of {self.task} {found}{skipped}"


class CheckpointOrdered(Message, kw_only=True, frozen=True):
    """A user wants a task's state to be written to storage now.

    Attributes:
        after: the last iteration known to be done; a checkpoint of a later one will do.
    """

    SENDER: ClassVar[str] = "registry"

    task: Name
    after: Number

    def __str__(self) -> str:
        return f"a user wants the state of {self.task} on storage now"
