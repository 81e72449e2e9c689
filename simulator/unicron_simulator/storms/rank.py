"""A modelled rank: the groups that it meets others in, and a process that can be stopped meanwhile."""

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from unicron.contracts.tasks import Seat
from unicron.contracts.worker import NOWHERE, Membership
from unicron.errors import GroupBrokenError
from unicron_simulator.storms.collectives import SimulatedGroup

T = TypeVar("T")

LOOK_S = 0.1
"""How often a rank that forms a group looks whether a newer membership has made it void."""


class SimulatedRank:
    """The part of a worker's shell that concerns other ranks: see `unicron.train.worker.shell.Ranks`.

    Args:
        name: of the worker.
        place: part of the model that it was started for.
        meeting: returns the group that meets at an address under a name, of so many; None where nobody can meet.
        meet_s: until its members have found one another and can compute together.
        lacking: returns why no connection can be made from this machine; empty where one can.

    Attributes:
        paused: the process is stopped by a signal.
        newest: membership that the agent has sent.
        formed: epoch in which the groups inside of its replica were formed; -1 where they are not, or broke.
    """

    def __init__(
        self,
        name: str,
        place: int,
        meeting: Callable[[str, str, int], SimulatedGroup | None],
        meet_s: float,
        lacking: Callable[[], str] = str,
    ) -> None:
        self.name, self.place = name, place
        self.paused, self.newest, self.formed = False, NOWHERE, -1
        self._meeting, self._meet_s, self._lacking = meeting, meet_s, lacking
        self._membership = NOWHERE
        self._group, self._replicas, self._replica = SimulatedGroup(1), SimulatedGroup(1), SimulatedGroup(1)
        self._collectives, self._conferred, self._tallies = 0, 0, 0
        self._changed, self._resumed = asyncio.Event(), asyncio.Event()
        self._through = False

    # --- what happens to it ------------------------------------------------------------------------------------------

    def receive_membership(self, membership: Membership) -> None:
        """Take a newer membership in, which interrupts whatever collective waits."""
        if membership.epoch > self.newest.epoch:
            self.newest = membership
        if not self.paused:
            self._interrupt()

    def _interrupt(self) -> None:
        if self.newest.epoch > self._membership.epoch:
            self._leave(f"{self.name} left for epoch {self.newest.epoch}")
        if self.newest.since > self.formed and not self._through:
            self._break(f"{self.name} left for epoch {self.newest.epoch}")
        self._changed.set()

    def _leave(self, why: str) -> None:
        self._group.end(why)
        self._replicas.end(why)

    def _break(self, why: str) -> None:
        """Take no part in the replica any more, as it was formed."""
        self.formed = -1
        self._replica.end(why)

    def pause(self) -> None:
        """Stop the process, as SIGSTOP does."""
        self.paused = True

    def go_on(self) -> None:
        """Let it go on, as SIGCONT does."""
        self.paused = False
        self._resumed.set()
        self._interrupt()

    async def _pass(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        while self.paused:
            self._resumed.clear()
            await self._resumed.wait()

    # --- memberships -------------------------------------------------------------------------------------------------

    async def await_membership(self, above: int, within_s: float | None = None) -> Membership:
        """Wait for a newer membership, or so many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self.newest.epoch <= above:
                    self._changed.clear()
                    await self._changed.wait()
        if within_s is not None:
            await self._pass(0.0)  # who is stopped waits on
        return self.newest

    def leave(self) -> None:
        """Be with nobody but the replica any more."""
        self._through = True
        self._leave(f"{self.name} is done")

    async def form(self, membership: Membership) -> None:
        """Let the time pass that a group takes to form; a newer membership ends the wait."""
        self._membership = membership
        self._leave(f"{self.name} left for epoch {membership.epoch}")
        self._group, self._replicas, left = SimulatedGroup(1), SimulatedGroup(1), self._meet_s
        self._collectives, self._tallies = 0, 0
        while left > 0 and self.newest.epoch <= membership.epoch:
            await self._pass(min(left, LOOK_S))
            left -= LOOK_S
        layout, seat = membership.layout, membership.seat
        self._group = self._met(membership, "", membership.world_size)
        self._group.watch(partial(self._peer_left, membership.epoch))
        self._replicas = self._group
        if layout.replica_workers > 1 and seat is not None:
            self._replicas = self._met(membership, f"-place-{seat.place}", layout.replicas)
        self._check()

    def _peer_left(self, epoch: int) -> None:
        """A peer is seen to leave."""

    def _met(self, membership: Membership, name: str, size: int) -> SimulatedGroup:
        group = self._meeting(membership.rendezvous, f"{membership.rendezvous_id}-{membership.epoch}{name}", size)
        if size > 1 and (why := self._lacking()):
            if group is not None:
                group.end(f"connection to {self.name} closed by peer")
            raise GroupBrokenError(f"connecting to others: {why}")
        if group is None:
            raise GroupBrokenError("the rendezvous refused the connection")
        return group

    async def form_replica(self, membership: Membership) -> None:
        """Meet the other ranks of the replica; that takes a moment."""
        self._break(f"{self.name} forms its replica anew in epoch {membership.epoch}")
        name, size = f"-replica-{self._seat.replica}", membership.layout.replica_workers
        self._replica, self._conferred = self._met(membership, name, size), 0
        await self._replica.gather("formed", self.place, None)
        await self._pass(self._meet_s)
        self._check()
        self.formed = membership.epoch

    @property
    def _seat(self) -> Seat:
        if self._membership.seat is None:
            raise TypeError(f"{self.name} only takes a state and is in no replica")
        return self._membership.seat

    def _check(self) -> None:
        if self.newest.epoch > self._membership.epoch:
            raise GroupBrokenError("interrupted by a newer membership")

    # --- collectives -------------------------------------------------------------------------------------------------

    async def gather(self, value: T, name: str = "", seconds: float = 0.0) -> list[T]:
        """Wait for the others; a newer membership interrupts that."""
        self._collectives += 1
        return await self._all(self._group, f"{self._collectives} {name}", self._membership.rank, value, seconds)

    async def _over_replicas(self, value: T, name: str, seconds: float = 0.0) -> list[T]:
        """Wait for the ranks with this rank's place in other replicas."""
        if self._replicas is self._group:
            return await self.gather(value, name, seconds)
        return await self._all(self._replicas, name, self._seat.replica, value, seconds)

    async def _all(self, group: SimulatedGroup, name: str, rank: int, value: T, seconds: float) -> list[T]:
        try:
            found = await group.gather(name, rank, value)
        except GroupBrokenError:
            await self._pass(0.001)
            raise
        await self._pass(seconds)
        self._check()
        return found

    async def barrier(self) -> None:
        """Wait for the ranks with this rank's place in other replicas."""
        await self._over_replicas(None, "meet")

    async def gather_across_replicas(self, *numbers: int) -> list[tuple[int, ...]]:
        """Wait for this place's ranks of other replicas."""
        self._tallies += 1
        return await self._over_replicas(numbers, f"tally {self._tallies}")

    async def gather_in_replica(self, *numbers: float) -> list[tuple[float, ...]]:
        """Wait for the other ranks of the replica."""
        self._conferred += 1
        shared: list[tuple[float, ...]] = await self._together(f"confer {self._conferred}", numbers)
        return shared

    async def _together(self, what: str, value: Any) -> list[Any]:
        if self.formed < 0:
            raise GroupBrokenError("a rank of this replica is gone")
        try:
            found = await self._replica.gather(what, self.place, value)
        except GroupBrokenError as error:
            self._break(str(error))
            await self._pass(0.001)
            raise
        await self._pass(0.0)
        return found
