"""The messages between a worker process and its agent over the node's unix socket.

Each message is a msgpack map behind its length as four bytes, big endian.
"""

from collections.abc import Callable
from typing import Annotated

import msgspec

from unicron.contracts.base import Record
from unicron.contracts.frames import decoder
from unicron.contracts.ranges import Few, Text
from unicron.contracts.states import ParkedSnapshot, StateRef
from unicron.contracts.tasks import Breakage, Member, ParallelLayout, Seat, WorkerPhase
from unicron.contracts.timings import Op
from unicron.exception_texts import cut
from unicron.printable import one_line


class ToAgent(Record, tag_field="type", tag=True, kw_only=True, frozen=True):
    """Base of what a worker says."""


class Hello(ToAgent, kw_only=True, frozen=True):
    """First message of every connection, the ones after an agent's restart included.

    Attributes:
        kept: what it has left behind and not taken back: an agent may die before it has passed that on.
    """

    worker: str
    pid: int
    epoch: int = -1
    iteration: int = -1
    ready: bool = False
    kept: "Kept | None" = None


class Ready(ToAgent, kw_only=True, frozen=True):
    """Model and optimizer are built; the worker waits for its first membership."""


class Progress(ToAgent, kw_only=True, frozen=True):
    """A sign of progress.

    Attributes:
        done: microbatches of this iteration that this worker has finished.
    """

    iteration: int
    phase: WorkerPhase
    done: int


class Iterated(ToAgent, kw_only=True, frozen=True):
    """An iteration is finished, parameters updated.

    Attributes:
        computed_s: mean seconds of a microbatch that this worker computed, 0 where it computed none.
    """

    iteration: int
    epoch: int
    rank: int
    world_size: int
    seconds: float
    loss: float
    computed_s: float = 0.0


class Timed(ToAgent, kw_only=True, frozen=True):
    """The operations of this rank in an iteration; fields as in `events.StepTimed`."""

    iteration: int
    epoch: int
    rank: int
    world_size: int
    began: float
    ops: list[Op]


class Joined(ToAgent, kw_only=True, frozen=True):
    """The worker computes in a new membership; fields as in `events.Regrouped`."""

    epoch: int
    rank: int
    world_size: int
    iteration: int
    kept: int
    recomputed: int
    state_from: str
    seconds: float


class Broken(ToAgent, kw_only=True, frozen=True):
    """The membership can't go on, and no newer one is known yet; fields as in `events.CollectiveFailed`."""

    epoch: int
    iteration: int
    error: str
    broke: Breakage = Breakage.GROUP


class Raised(ToAgent, kw_only=True, frozen=True):
    """An exception left the script."""

    iteration: int
    exception: str
    text: str
    traceback: str


class Finished(ToAgent, kw_only=True, frozen=True):
    """The last iteration is done."""

    iterations: int


class Kept(ToAgent, kw_only=True, frozen=True):
    """The worker has left its state behind and waits for what comes; fields as in `events.StateKept`."""

    epoch: int
    state: StateRef


class Saved(ToAgent, kw_only=True, frozen=True):
    """The worker's state from before the update of this iteration is whole in the node's memory.

    Attributes:
        epoch: of the membership that it was saved in.
        store: it is to be written to storage as well; said once more, when replicas have compared it.
    """

    state: StateRef
    epoch: int
    store: bool = False


class Unprotected(ToAgent, kw_only=True, frozen=True):
    """The worker can't save its state; fields as in `events.StateUnprotected`."""

    reason: str


class Diverged(ToAgent, kw_only=True, frozen=True):
    """The worker gives its state up; fields as in `events.StateDiverged`."""

    epoch: int
    iteration: int
    place: int
    replica: int
    digests: list[str]
    undecided: bool = False


class Unusable(ToAgent, kw_only=True, frozen=True):
    """The worker gives its state up, and so do all; fields as in `events.StateUnusable`."""

    epoch: int
    iteration: int
    copies: str
    reason: str
    uncarried: bool = False


class Drilled(ToAgent, kw_only=True, frozen=True):
    """A drill is over, or a trial has begun; fields as in `events.ScriptDrilled`."""

    iteration: int
    rank: int
    problem: str = ""
    unproven: str = ""
    as_is: bool = False
    undecided: bool = False
    under_way: bool = False


class NotFinite(ToAgent, kw_only=True, frozen=True):
    """A gradient is not finite; fields as in `events.GradientNotFinite`."""

    iteration: int
    epoch: int
    rank: int
    microbatches: list[int]
    rule: str = ""
    suspect: bool = False


class FetchState(ToAgent, kw_only=True, frozen=True):
    """Please fetch the state `ref`."""

    ref: StateRef


class Pong(ToAgent, kw_only=True, frozen=True):
    """Answer to `Ping`.

    Attributes:
        collectives: a line for each that is under way, where that was asked.
    """

    collectives: Annotated[list[Text], Few] | None = None


class ToWorker(Record, tag_field="type", tag=True, kw_only=True, frozen=True):
    """Base of what an agent says."""


class Membership(ToWorker, kw_only=True, frozen=True):
    """A worker's place in a new epoch; interrupts whatever it waits for.

    Attributes:
        rendezvous, rendezvous_id, world_size, layout: as in `commands.Regroup`.
        member: the worker itself, as others need to know it to take its state.
        since: epoch since which the worker's replica has been made up of the same workers.
        leaving, shelf, cause: as in `commands.Regroup`; one rank gets the shelf, and passes it on.
        secrets: what opens the rendezvous (`proofs.epoch_secrets`), from the worker's own agent; empty where all are
            open. Never on the bus, in a log or on a screen.
    """

    epoch: int
    rendezvous: str
    rendezvous_id: str
    rank: int
    world_size: int
    member: Member
    layout: ParallelLayout = ParallelLayout()
    since: int = 0
    leaving: bool = False
    shelf: ParkedSnapshot | None = None
    cause: str = ""
    secrets: list[bytes] = []

    def __repr__(self) -> str:
        """Return it without its secrets."""
        return super(Membership, msgspec.structs.replace(self, secrets=[])).__repr__()

    @property
    def shape(self) -> ParallelLayout:
        """Its layout; where a replica is one worker, there are as many as workers."""
        return self.layout if self.layout.replica_workers > 1 else self.layout.with_workers(self.world_size)

    @property
    def seat(self) -> Seat | None:
        """The worker's replica, and its place in there; None where it only takes its state and computes nothing."""
        return self.shape.seat(self.rank) if self.rank < self.shape.workers else None


CAUSE = "UNICRON_RESTART_CAUSE"
"""The variable with the reason why a program begins again; empty where it does not."""

DRILL = "UNICRON_DRILL"
"""The variable that says to a script in place that a process is to take a rank's place on trial; empty: none is."""

UNCARRIED = "UNICRON_UNCARRIED"
"""The variable with the reason why no other process can take a rank's place in a script; empty where one can."""

ANEW = "UNICRON_ANEW_SINCE"
"""The variable with two moments, where a script may begin once more as it did at first: when it did, and its loops; and
a third word where it does so in any case."""

CODE = "UNICRON_CODE_DIR"
"""The variable with the folder for what is made of a program's source files; no other user writes there."""

STOP_GRACE = "UNICRON_STOP_GRACE_S"
"""The variable with the seconds that a launcher gives its program to end."""

NO_SNAPSHOT_NOW = "unicron: no other process could take the place of this one now: "
"""How what a worker writes begins where it can leave no snapshot; it goes on, and does not end for that."""

SNAPSHOT_AGAIN = "unicron: another process could take the place of this one again"
"""What a worker writes once it can."""

LONGEST_CAUSE = 500
"""Characters of it."""


def printable_cause(cause: str) -> str:
    """Return a cause as a variable may hold it: one line, and nothing that steers a terminal."""
    return cut(one_line(cause), LONGEST_CAUSE)


NOWHERE = Membership(
    epoch=-1, rendezvous="", rendezvous_id="", rank=0, world_size=0, member=Member(worker="", node="", slot=0)
)
"""The state of a worker before its first membership."""


class StateFetched(ToWorker, kw_only=True, frozen=True):
    """The state `name` lies at `path`, checked against its checksum; or `error` says why not.

    Attributes:
        name: of the `StateRef`'s location.
        own: the file is the asker's to remove; else it is the holder's.
    """

    name: str
    path: str = ""
    error: str = ""
    own: bool = False


class Save(ToWorker, kw_only=True, frozen=True):
    """From now on, save the state now and then, or no more; whatever was saved before need not be secured.

    Attributes:
        store_s: seconds from one that is to be written to storage to the next; 0: none is.
        store_asked: another number than before, but 0, has the next one written to storage in any case.
    """

    on: bool
    store_s: float = 0.0
    store_asked: int = 0


class Secured(ToWorker, kw_only=True, frozen=True):
    """All copies of the state that was saved under this name are complete, so the next one may be saved."""

    name: str
    iteration: int


class Sample(ToWorker, kw_only=True, frozen=True):
    """From now on, record each iteration whose number is a multiple of `period`; 0: none."""

    period: int


class RaiseFault(ToWorker, kw_only=True, frozen=True):
    """Chaos: raise an exception in the script.

    Attributes:
        exception: one of `faults.EXCEPTIONS`, as a microbatch ends; empty for one of our own, now.
    """

    exception: str = ""


class ExitFault(ToWorker, kw_only=True, frozen=True):
    """Chaos: exit with this code, now."""

    code: int


class SlowFault(ToWorker, kw_only=True, frozen=True):
    """Chaos: from now on, take that many times as long for each microbatch; 1 ends it."""

    factor: float


class ResetFault(ToWorker, kw_only=True, frozen=True):
    """Chaos: have the collectives break, now."""


class Ping(ToWorker, kw_only=True, frozen=True):
    """Are you there? The worker's control thread answers, whatever its script is doing.

    Attributes:
        collectives: and in which collectives?
    """

    collectives: bool = False


to_agent: Callable[[bytes], ToAgent] = decoder(*ToAgent.__subclasses__())
to_worker: Callable[[bytes], ToWorker] = decoder(*ToWorker.__subclasses__())
