"""The interfaces of the worker's core to its shell, by three concerns, and how its flows are run.

Flows of the core are coroutines, and the shell decides how they wait: a process blocks in each call and suspends
nowhere (`run`), the simulator awaits virtual time.
"""

from collections.abc import Coroutine, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from unicron.contracts.states import StateRef
from unicron.contracts.storage import StoredState
from unicron.contracts.worker import Membership, ToAgent
from unicron.train.worker.phases import Due, ReducedValues

T = TypeVar("T")


class Ranks(Protocol):
    """The other ranks, and the line to the agent, which says who they are.

    Whatever concerns other ranks raises `GroupBrokenError` where the group broke or a newer membership interrupts.
    """

    @property
    def place(self) -> int:
        """Part of the model that this process has built."""

    @property
    def formed(self) -> int:
        """Epoch in which the groups inside of the replica were formed; -1 where they are not, or broke."""

    @property
    def newest(self) -> Membership:
        """The newest membership that the agent has sent; `NOWHERE` before the first."""

    @property
    def is_asynchronous(self) -> bool:
        """Whether collectives that ended may have given noise, as one of their ranks was interrupted."""

    def now(self) -> float:
        """Return the seconds of a clock that only goes forward."""

    def send(self, message: ToAgent) -> None:
        """Send a message to the agent; while it is away, keep what is not `phases.FORGOTTEN`."""

    async def await_membership(self, above: int, within_s: float | None = None) -> Membership:
        """Wait for a membership with an epoch greater than `above`, or so many seconds; return the newest."""

    async def form(self, membership: Membership) -> None:
        """Leave the group there is, and meet the other ranks of `membership`."""

    async def form_replica(self, membership: Membership) -> None:
        """Meet the other ranks of one's replica, in the groups that the model holds."""

    def leave(self) -> None:
        """Give up the groups that span replicas; from here on no newer membership interrupts anything."""

    async def gather(self, value: T) -> list[T]:
        """Return what every rank gives; `value` is one that msgspec can encode."""

    async def gather_in_replica(self, *numbers: float) -> list[tuple[float, ...]]:
        """Return the numbers of every rank of the replica, by place."""

    async def gather_across_replicas(self, *numbers: int) -> list[tuple[int, ...]]:
        """Return the numbers of the ranks with this place, in the order of their replicas."""

    async def barrier(self) -> None:
        """Wait until the ranks with this place have come here."""

    async def confirm(self) -> None:
        """Wait until all ranks with this place have seen their reduces end."""

    async def settle(self) -> None:
        """Wait until what was computed within the replica has ended on this rank's GPU."""


class States(Protocol):
    """The state of this worker, on its way to other workers, to its node's memory and to storage, and from there."""

    @property
    def saves(self) -> bool:
        """Whether the agent wants the state saved, in every iteration that is long enough."""

    @property
    def save_cost_s(self) -> float:
        """Seconds of a processor that it takes to save a state."""

    @property
    def secured(self) -> bool:
        """Whether all copies of the state that was saved last are whole, so that older ones may go."""

    @property
    def store_s(self) -> float:
        """How many seconds after one state that goes to storage the next is to; 0 where none is."""

    @property
    def store_asked(self) -> int:
        """Another number than before, but 0, has the next state go to storage in any case."""

    def save(self, iteration: int) -> None:
        """Begin to save the state from before the update of `iteration`, and go on meanwhile."""

    async def await_saved(self) -> None:
        """Wait until the state is saved: the update may change it."""

    def store(self) -> None:
        """Have what was saved last written to storage."""

    @property
    def saves_model(self) -> bool:
        """Whether the model is to be in a file before anybody is through."""

    async def save_model(self) -> None:
        """Write that file, together with the other ranks of the replica; return when it is there.

        Raises:
            OSError: it can't be written.
        """

    def digest(self) -> int | None:
        """Return 64 bits, as a signed number, of this rank's state, the same where the states are.

        None, on all ranks, where states may differ and are not to be compared.
        """

    async def export(self, place: int, iteration: int, *, taken: bool = False, kept: bool = False) -> StateRef:
        """Export the state from before the update of `iteration` to others: the one fetched, if `taken`, or its own.

        One that is `kept` outlives this process.

        Raises:
            StateTransferError: it can't be written.
        """

    def remove_export(self, ref: StateRef) -> None:
        """Remove an exported state."""

    async def fetch(self, sources: Sequence[Sequence[StateRef]]) -> None:
        """Fetch a state and keep it until `load`.

        Args:
            sources: the parts that it is put together from, as many as are needed, each from the first of its copies
                that can be had. One is enough from a rank of the same place of the same layout.

        Raises:
            StateTransferError: it can't be had.
        """

    def read_stored(self, stored: StoredState) -> None:
        """Read a state from storage, as far as it is needed, and keep it until `load`.

        Raises:
            StateTransferError: it can't be had.
        """

    def load(self) -> None:
        """Load the fetched state into the protected objects."""

    def keep_others(self) -> None:
        """Keep a copy of what is protected besides parameters and their moments, until `restore_others`."""

    def restore_others(self) -> None:
        """Restore that copy."""


class Gradients(Protocol):
    """The gradient of a global batch: summed over microbatches, then, bucket by bucket, over the replicas."""

    @property
    def buckets(self) -> int:
        """Number of buckets of the gradient."""

    @property
    def shapes(self) -> str:
        """A digest of what there is of it, the same on all ranks of a place."""

    def clear(self) -> None:
        """Set the accumulated gradient to zero."""

    def accumulate(self) -> None:
        """Add the gradient of the microbatch just computed, and its loss."""

    def discard(self) -> None:
        """Drop the gradient of the microbatch just computed."""

    async def keep_pace(self, behind: int) -> None:
        """Wait until no more than `behind` of the microbatches that were computed are still under way on a GPU."""

    @property
    def is_sum_finite(self) -> object:
        """Something whose truth value is whether all that is accumulated is finite; evaluating it waits for the GPU."""

    def announce(self, due: Due) -> None:
        """Announce to all replicas, with the gradient, what is to be done with the next state."""

    def begin(self, iteration: int, buckets: Sequence[int]) -> None:
        """Begin to sum these buckets of the accumulated gradient of `iteration` over the replicas, in this order."""

    async def reduce(self, bucket: int) -> None:
        """Wait for the sum of a bucket that was begun."""

    def abandon(self) -> None:
        """Give up the buckets that were begun and not waited for: their group broke."""

    async def share(self, bucket: int, replica: int) -> None:
        """Give the reduced bucket of `replica` to all replicas."""

    @property
    def finite(self) -> bool:
        """Whether the reduced gradient and the mean loss are."""

    @property
    def outcome(self) -> ReducedValues:
        """The values that were reduced besides gradients, in the reduce that is over."""

    def publish(self, *, void: bool = False) -> None:
        """Make the reduced gradient that of the parameters; a `void` one makes it zero."""

    def update(self, *, void: bool = False) -> None:
        """Update the parameters, or with a `void` gradient leave them as they are."""


class Shell(NamedTuple):
    """All of what the core has done for it."""

    ranks: Ranks
    states: States
    gradients: Gradients


def run(flow: Coroutine[Any, Any, T]) -> T:
    """Run a flow of the core whose shell blocks instead of suspending."""
    try:
        flow.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise TypeError("the shell suspended a flow; one that is run like this must block")
