"""The other ranks of a real worker, in torch's process groups, and the line to its agent."""

import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import msgspec
import torch

from unicron.contracts.tasks import ParallelLayout
from unicron.contracts.traffic import forecast_name
from unicron.contracts.worker import NOWHERE, Iterated, Membership, ToAgent
from unicron.errors import GroupBrokenError, InvalidInputError
from unicron.snapshots.memory import SnapshotMemory
from unicron.train.groups.group import Group
from unicron.train.groups.rendezvous import Rendezvous
from unicron.train.worker.channel import AgentChannel
from unicron.train.worker.timing import Recorder
from unicron.train.worker.traffic import Traffic

if TYPE_CHECKING:
    from unicron.train.groups.inner import InnerGroups

T = TypeVar("T")


class TorchRanks:
    """See `unicron.train.worker.shell.Ranks`. Its calls block, and none suspends.

    Args:
        channel: to the agent; None outside a cluster.
        place: part of the model that this process builds.
        inner: the groups inside of the replica, if there are any yet.

    Attributes:
        membership: that was formed last.
        group: of those with this place.
        recorder: of what this rank does when.
    """

    group: Group
    recorder: Recorder

    def __init__(self, channel: AgentChannel | None, place: int, inner: "InnerGroups | None" = None) -> None:
        self.place, self.membership = place, NOWHERE
        self.peer_left: Callable[[int], None] = lambda _: None
        self._channel, self._inner = channel, inner
        name = forecast_name(os.environ["UNICRON_SLOT"]) if channel is not None else ""
        self._traffic = Traffic(SnapshotMemory.of_worker().folder / name if name else None)

    def prepare(self, device: torch.device) -> None:
        """Take in where the model is; from here on newer memberships interrupt collectives."""
        self.group = Group(device, self._traffic, self.peer_left)
        self.recorder = Recorder(device)
        if self._channel is not None:
            self._channel.on_membership, self._channel.on_reset = self._interrupt, self._reset

    def inner(self, layout: ParallelLayout) -> "InnerGroups":
        """Return the groups inside of the replica, which are made at the first call."""
        if self._inner is None:
            from unicron.train.groups.inner import InnerGroups  # noqa: PLC0415 torch's meshes take half a second to import

            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            self._inner = InnerGroups(layout, self.place, device, self._traffic)
        return self._inner

    @property
    def replica(self) -> "InnerGroups":
        """The inner groups of the replica.

        Raises:
            GroupBrokenError: there are none.
        """
        if self._inner is None:
            raise GroupBrokenError("this worker is no part of a replica")
        return self._inner

    def _interrupt(self, membership: Membership) -> bool:
        """Leave what a newer membership replaces; the replica's own groups only where a rank of it was replaced."""
        left = self.group.abort_below(membership.epoch)
        return (self._inner is not None and self._inner.interrupt(membership.since)) or left

    def _reset(self) -> None:
        """Have all collectives break, as if each peer had reset its connection."""
        self.group.abort_below(sys.maxsize)
        if self._inner is not None:
            self._inner.interrupt(sys.maxsize)

    @property
    def is_cut(self) -> bool:
        """Whether some of its groups were left, or broke by themselves."""
        return self.group.is_cut or (self._inner is not None and self._inner.is_cut)

    def mute(self, *, muted: bool = True) -> None:
        """Let the script's own collectives run into nothing: the other ranks of the replica are elsewhere in it."""
        if self._inner is not None:
            self._inner.muted = muted

    # --- the agent ---------------------------------------------------------------------------------------------------

    def now(self) -> float:
        """Return the monotonic seconds."""
        return time.monotonic()

    def send(self, message: ToAgent) -> None:
        """Send a message to the agent; an iteration that was recorded is followed by its record."""
        if self._channel is None:
            return
        self._channel.send(message)
        if isinstance(message, Iterated):
            self._traffic.end_iteration()
            if timed := self.recorder.end(message.iteration, message.epoch, message.rank, message.world_size):
                self._channel.send(timed)

    @property
    def newest(self) -> Membership:
        """The newest membership that the agent has sent."""
        return self._channel.newest if self._channel is not None else NOWHERE

    async def await_membership(self, above: int, within_s: float | None = None) -> Membership:
        """Block until there is a membership newer than epoch `above`, or so many seconds have passed."""
        self.recorder.drop()
        self._traffic.reset()
        if self._channel is None:
            raise RuntimeError("a collective failed outside a cluster")
        return self._channel.await_membership(above, within_s)

    # --- groups ------------------------------------------------------------------------------------------------------

    async def form(self, membership: Membership) -> None:
        """Build the process groups of `membership`."""
        shape = membership.layout
        if shape.replica_workers > 1 and self._inner is None:
            raise InvalidInputError(
                f"layout of the task: {shape.tensor} x {shape.pipeline} x {shape.shard} workers share a replica, but "
                "this script trains a whole model: build it on session.mesh, or set tensor, pipeline and shard to 1"
            )
        self.membership = membership
        self.group.form(membership)

    async def form_replica(self, membership: Membership) -> None:
        """Build the process groups inside of the replica."""
        replica = membership.rank // membership.shape.replica_workers
        self.replica.form(membership.epoch, lambda: Rendezvous(membership, f"-replica-{replica}"))

    @property
    def formed(self) -> int:
        """Epoch in which the groups inside of the replica were formed."""
        return -1 if self._inner is None else self._inner.epoch

    def leave(self) -> None:
        """Give up the groups of replicas; those inside of one stay, to put results together, and report failures."""
        self.group.leave()
        self._traffic.reset()
        if self._inner is not None:
            self._inner.strict = True

    async def gather(self, value: T) -> list[T]:
        """Return what every rank gives."""
        rows = self.group.gather(msgspec.msgpack.encode(value))
        return [msgspec.msgpack.decode(row, type=type(value)) for row in rows]

    async def gather_in_replica(self, *numbers: float) -> list[tuple[float, ...]]:
        """Return what every rank of the replica says."""
        return self.replica.gather(numbers)

    async def gather_across_replicas(self, *numbers: int) -> list[tuple[int, ...]]:
        """Return what this place's rank of every replica says."""
        return self.group.gather_across_replicas(numbers)

    async def barrier(self) -> None:
        """Wait for those with this place."""
        self.group.barrier()

    @property
    def is_asynchronous(self) -> bool:
        """Whether a GPU does them."""
        return self.group.on_streams

    async def confirm(self) -> None:
        """Wait for the GPU, and for what others say of theirs."""
        self.group.confirm()

    async def settle(self) -> None:
        """Wait for the GPU."""
        self.replica.synchronize()
