"""What the ranks of scripts that are healed in place are to the worker's core.

Where each has the whole model, it is a replica of its own, and who lives keeps what it has. Where `fully_shard` has
spread the model, all ranks are one replica. What a lost rank had is then nowhere else but in copies of what all have
saved, so all begin again from those.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec

from unicron.contracts.states import ParkedSnapshot, StateRef
from unicron.contracts.tasks import ParallelLayout
from unicron.contracts.worker import Joined, Membership
from unicron.errors import InvalidInputError
from unicron.train.groups.rendezvous import Rendezvous
from unicron.train.scripts.groups import ScriptGroups, packed, unpacked
from unicron.train.scripts.loops import Loops
from unicron.train.scripts.meeting import GOES_ON, STANDS
from unicron.train.scripts.records import Records
from unicron.train.session.gradients import TorchGradients
from unicron.train.session.ranks import TorchRanks
from unicron.train.session.states import TorchStates
from unicron.train.snapshots.state import Fetcher
from unicron.train.worker.channel import Channel
from unicron.train.worker.iteration import WorkerCore
from unicron.train.worker.phases import Due, Phase
from unicron.train.worker.redistribute import Resumption, Standing
from unicron.train.worker.timing import PlannedCollection

WATCHED = 3
"""Iterations; what a scheduler does behind an update shows in the next but one."""

GONE = "a rank is gone, and with it its part of the model: all begin again, from what was saved last in memory"


class WholeCore(WorkerCore):
    """A worker whose microbatch is always its own: that which has the number of its rank."""

    _ranks: "WholeRanks"

    def _plan(self, standings: list[Standing]) -> Resumption:
        first = standings[0].shapes
        if other := next((each.shapes for each in standings if each.shapes != first), None):
            raise InvalidInputError(
                f"ranks have not made the same things before their loop, and would have to replace each other: {first} "
                f"and {other}; make models, optimizers, schedulers and averages on all ranks, or set `heal: restart`"
            )
        plan = super()._plan(standings)
        missing = {microbatch for each in plan.todo for microbatch in each}
        todo = tuple((rank,) if rank in missing else () for rank in range(len(standings)))
        return replace(plan, todo=todo, sources=tuple(map(self._best, plan.sources)))

    def _best(self, sources: tuple[int, ...]) -> tuple[int, ...]:
        """Return those that are in their loops: what others have taken and not begun with says less of collectives."""
        return tuple(each for each in sources if each in self._ranks.joined) or sources


class SpreadCore(WorkerCore):
    """A worker whose replica is all ranks. It goes to one membership only."""

    async def _regroup(self, broke: float) -> None:
        if self.phase is not Phase.NEW:
            raise ConnectionAbortedError(GONE)
        await super()._regroup(broke)

    async def _join(self) -> Joined:
        if self._ranks.formed != self.epoch:  # somebody was lost since the script's group was formed
            raise ConnectionAbortedError(GONE)
        return await super()._join()


class WholeRanks(TorchRanks):
    """The ranks to one that has the whole model: to the core it is a replica, though it is a place to all others.

    Args:
        channel: to the agent.
        groups: of the script.
        loops: of the script.
        records: of the ranks.

    Attributes:
        joined: ranks of the membership that were in their loops before it.
    """

    def __init__(self, channel: Channel, groups: ScriptGroups, loops: Loops, records: Records) -> None:
        super().__init__(channel, 0)
        self.joined = frozenset[int]()
        self._script_groups, self._loops, self._records = groups, loops, records
        self._fetcher = Fetcher(channel)
        self._in_vain = ""

    async def await_membership(self, above: int) -> Membership:
        """Block until there is a membership newer than epoch `above`."""
        membership = await super().await_membership(above)
        return msgspec.structs.replace(membership, layout=ParallelLayout(replicas=membership.world_size))

    async def form(self, membership: Membership) -> None:
        """Meet the others, and form the group of the script's own collectives anew.

        Raises:
            ConnectionAbortedError: a new rank could not be given what collectives gave, so that all are to begin again.
        """
        setup = self._script_groups.setup
        if setup is None or not self._loops.reachable:
            raise ConnectionAbortedError(
                "what a collective of this script gave before its loop, or since its last snapshot, can't be given to "
                "a new rank: it was more than 1 MiB, or not the same on all ranks"
            )
        Rendezvous(membership, STANDS).set(f"{membership.rank}", GOES_ON + setup)
        await super().form(membership)
        if self._script_groups.epoch != membership.epoch:
            self._script_groups.form(membership.epoch, lambda: Rendezvous(membership, "-script"))
            self._script_groups.strict = True
        await self._even_out(membership)

    async def _even_out(self, membership: Membership) -> None:
        """Have ranks know what those collectives gave that have ended on others, and broke or never began here.

        Raises:
            ConnectionAbortedError: a new rank could not become the one that it replaces.
        """
        ended = self._script_groups.ended
        told = await self.tally(ended.count, ended.joined)
        self.joined = frozenset(rank for rank, (_, joined) in enumerate(told) if joined)
        if ended.joined:
            new = [rank for rank, (_, joined) in enumerate(told) if not joined]
            refused, closed = self._records.go_on(membership, new), self._loops.closed if new else ""
            self._in_vain = self._in_vain or refused or closed
            if new:
                self._records.watched = WATCHED
        if in_vain := next(filter(None, await self.gather(self._in_vain.encode())), b""):
            self._in_vain = in_vain.decode()  # where others do not hear of it any more, they are told next time
            raise ConnectionAbortedError(
                f"all ranks begin again, as a new one could not take a lost one's place: {self._in_vain}"
            )
        if not ended.joined and membership.shelf is not None and not any(joined for _, joined in told):
            self._records.hand_out(membership, self._saved_records(membership, membership.shelf))
        counts = [count for count, joined in told if joined]
        fewest, most = min(counts, default=0), max(counts, default=0)
        ended.know(fewest, [])
        if fewest < most:
            given = await self.gather(packed(ended.since(fewest)) if ended.joined else b"")
            ended.know(fewest, max(map(unpacked, filter(None, given)), key=len))

    def _saved_records(self, membership: Membership, shelf: ParkedSnapshot) -> Iterator[dict[str, Any]]:
        for place in range(membership.world_size):
            refs = [ref for ref in shelf.states if ref.place == place]
            try:
                yield self._fetcher.fetch(refs, membership.epoch)["objects"]["record"]
            finally:
                self._fetcher.let_go()


class ScriptStates(TorchStates):
    """The state of a rank, to be saved where somebody could come to where its script is.

    Args:
        channel: to the agent.
        ranks: that this one is among.
        groups: of the script.
        loops: of the script.
        records: of the ranks.
    """

    def __init__(
        self, channel: Channel, ranks: TorchRanks, groups: ScriptGroups, loops: Loops, records: Records
    ) -> None:
        super().__init__(channel, ranks)
        self._script_groups, self._loops, self._records = groups, loops, records

    def save(self, iteration: int) -> None:
        """Have a thread save the state, if it is one to go on from."""
        carried = not self._records.refused and self._script_groups.state_dict()["setup"] is not None
        if carried and self._loops.reachable:
            super().save(iteration)

    def described(self, iteration: int) -> StateRef:
        """Return what a state is to all others, to whom this rank is a place of the only replica."""
        ref = super().described(iteration)
        layout = ParallelLayout(replicas=0, shard=self._ranks.membership.world_size)
        return msgspec.structs.replace(ref, place=int(os.environ["UNICRON_PLACE"]), layout=layout)


class WholeGradients(TorchGradients):
    """The gradients of a rank with the whole model.

    Args:
        ranks: that sum them.
        states: of this one.
        microbatches: of an iteration.
    """

    def __init__(self, ranks: TorchRanks, states: TorchStates, microbatches: int) -> None:
        super().__init__(ranks, None, microbatches, PlannedCollection(0))
        self._states = states

    def announce(self, due: Due) -> None:
        """Say what is due as the first rank does, once its last state is safe: so all save in the same iterations."""
        if int(os.environ["UNICRON_PLACE"]) == 0 and self._states.secured:
            super().announce(due)
