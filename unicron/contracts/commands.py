"""Commands, in the imperative: only the transition service gives them, only agents carry them out.

Every command names its target node and carries the sender's fencing token; an agent refuses a token lower than the
highest it has seen.
"""

from typing import Annotated, ClassVar

from unicron.contracts.base import Message
from unicron.contracts.ranges import Count, Few, Label, Many, Moment, Name, Number, Seconds, Size, Text
from unicron.contracts.sentences import after, where
from unicron.contracts.states import Keeper, ParkedSnapshot, Saver, StateRef
from unicron.contracts.storage import Saving, StoredPart
from unicron.contracts.tasks import Member, ParallelLayout, TaskSpec


class Command(Message, kw_only=True, frozen=True):
    """Base of all commands.

    Attributes:
        token: fencing token of the sender's lease.
        incarnation: the node's, as far as the sender knows; an agent that has joined anew since lets the command pass,
            because what it said when it joined is still on its way to the sender.
    """

    SENDER: ClassVar[str] = "transition"

    node: Name
    token: Size = 0
    incarnation: Label = ""


class StartWorker(Command, kw_only=True, frozen=True):
    """Start a worker process for `spec` in `slot`, under the unique name `worker`.

    Attributes:
        place: part of the model that it builds, for as long as it lives; in which replica, memberships say.
        layout: the shape of that replica.
        cause: why the task needs it; empty where it is one of its first.
        local_slots: slots of the task's workers on this node, this one among them, in the order of their places; empty
            where the memberships say which other workers are on the node.
        wait_s: seconds to wait before that.
        uncarried: why nobody can take the place of a rank of its script; empty where somebody can.
        anew: its script is to begin as it did at first; else it is where no rank has a state to go on from.
        anew_s, trained_s: seconds since it did, and since its loops did: it finds no file that was made since. 0: it
            finds all.
        group, groups: which of the task's nodes this is, in that order, of how many.
    """

    slot: Number
    worker: Name
    task: Name
    spec: TaskSpec
    place: Number = 0
    layout: ParallelLayout = ParallelLayout()
    cause: Text = ""
    wait_s: Seconds = 0.0
    uncarried: Text = ""
    anew: bool = False
    anew_s: Seconds = 0.0
    trained_s: Seconds = 0.0
    local_slots: Annotated[list[Number], Few] = []
    group: Number = 0
    groups: Number = 1

    def __str__(self) -> str:
        places = self.layout.replica_workers
        place = f" for place {self.place} of {places}" if places > 1 else ""
        return f"start {where(self)}{place}"


class StopWorker(Command, kw_only=True, frozen=True):
    """Kill the worker process `worker`, if it lives."""

    slot: Number
    worker: Name
    task: Name
    reason: Text = ""

    def __str__(self) -> str:
        return f"stop {where(self)}{after(': ', self.reason)}"


class DropStates(Command, kw_only=True, frozen=True):
    """Remove states that workers have left behind or saved; nobody is to take them any more.

    Attributes:
        names: of their files.
        workers: all that these have saved is to go, also what is on its way: they are no more.
    """

    task: Name
    names: Annotated[list[Label], Few]
    workers: Annotated[list[Label], Many] = []

    def __str__(self) -> str:
        left = [*self.names, *(f"all of {each}" for each in self.workers)]
        return f"remove what was left behind on {self.node}: {', '.join(left)}"


class SaveStates(Command, kw_only=True, frozen=True):
    """Have some of the task's workers on this node save their states now and then, and no others.

    Attributes:
        savers: those.
    """

    task: Name
    savers: Annotated[list[Saver], Few]

    def __str__(self) -> str:
        return f"save on {self.node}: {', '.join(map(_saver, self.savers)) or 'nothing any more'}"


class CopyState(Command, kw_only=True, frozen=True):
    """Send a copy of a state that lies in this node's memory to another node: this one is to go.

    Attributes:
        state: which.
        keeper: where to.
    """

    task: Name
    state: StateRef
    keeper: Keeper

    def __str__(self) -> str:
        return f"copy {self.state.location.name} from {self.node} to {self.keeper.node}"


class StoreState(Command, kw_only=True, frozen=True):
    """Write a state that lies in this node's memory to storage, for it is not to stay there.

    Attributes:
        state: which.
        saving: the checkpoint that it is a part of.
    """

    task: Name
    state: StateRef
    saving: Saving

    def __str__(self) -> str:
        return f"write {self.state.location.name} on {self.node} to {self.saving.root}"


class ReleaseNode(Command, kw_only=True, frozen=True):
    """Go, since you want to: no worker of this node is counted on, and no state lies on it alone."""

    def __str__(self) -> str:
        return f"nothing on {self.node} is needed any more: it may go"


class FindStates(Command, kw_only=True, frozen=True):
    """Report which states of the task lie in this node's memory.

    Attributes:
        search: a number that the answer repeats.
    """

    task: Name
    search: Count

    def __str__(self) -> str:
        return f"report the states of {self.task} on {self.node}"


class CommitCheckpoint(Command, kw_only=True, frozen=True):
    """Complete a checkpoint on storage, all of whose parts are there, and remove older ones.

    Attributes:
        saving: the attempt.
        parts: what each place has written.
        since: Unix seconds; older checkpoints are an earlier task's of this name, and stay.
    """

    task: Name
    saving: Saving
    parts: Annotated[list[StoredPart], Many]
    since: Moment

    def __str__(self) -> str:
        return f"complete the checkpoint of iteration {self.saving.iteration} of {self.task}"


class FindCheckpoint(Command, kw_only=True, frozen=True):
    """Report the newest checkpoint of the task on storage that passes its check.

    Attributes:
        search: a number that the answer repeats.
        root: directory or URL.
        since: Unix seconds; older checkpoints are an earlier task's of this name, and don't count.
        iteration: if not negative, only the one of this iteration will do, and later ones are put aside for it.
        before: iteration from which on none is to be used; -1: all may be.
    """

    task: Name
    search: Count
    root: Label
    since: Moment
    iteration: Number = -1
    before: Number = -1

    def __str__(self) -> str:
        return f"look at {self.root} for a checkpoint of {self.task}"


class Regroup(Command, kw_only=True, frozen=True):
    """Form epoch `epoch` of the task's membership; interrupts whatever the workers wait for.

    Each node gets its own members only: the size of all these commands together grows with the membership, not with its
    square. The others find them under `rendezvous_id`.

    Attributes:
        rendezvous: host:port of the agent at which the ranks find one another.
        rendezvous_id: under which they do; with the epoch it is unique.
        world_size: of the whole membership.
        members: those on this node.
        ranks: of each of `members`.
        layout: of the whole membership; with a rank it says which replica and place that is. Ranks beyond its replicas
            only take the state of the place that they were started for, from those that leave.
        since: for each of `members`, the epoch since which its replica has been made up of the same workers.
        leaving: the members finish the iteration at hand, leave their states behind, and wait.
        shelf: states that others left behind before, for places whose newer state is lost; sent to rank 0 alone.
        cause: why there is a new one; empty for the first.
    """

    task: Name
    epoch: Number
    rendezvous: Label
    members: Annotated[list[Member], Many]
    rendezvous_id: Label = ""
    world_size: Count = 0
    ranks: Annotated[list[Number], Many] = []
    layout: ParallelLayout = ParallelLayout()
    since: Annotated[list[Number], Many] = []
    leaving: bool = False
    shelf: ParkedSnapshot | None = None
    cause: Text = ""

    def __str__(self) -> str:
        places = map(self.layout.place_name, self.ranks)
        here = ", ".join(
            f"{self.task}:{rank} ({each.worker}{after(' ', place)})"
            for rank, place, each in zip(self.ranks, places, self.members, strict=False)
        )
        leaving = " to leave the states behind" * self.leaving
        return f"form membership {self.epoch} of {self.task}{leaving}, {self.world_size} workers, here {here}"


def _saver(saver: Saver) -> str:
    return f"{saver.worker}{after(' with copies on ', ', '.join(keeper.node for keeper in saver.keepers))}"
