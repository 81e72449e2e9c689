"""The shell of the worker's core for scripts that are healed in place.

Where each rank has the whole model, it is a replica of its own, and survivors keep what they have. Where `fully_shard`
has spread the model, all ranks are one replica. What a lost rank had is then only in copies of what all have
saved, so all begin again from those.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch._C._distributed_c10d import Work

from unicron.contracts.states import ParkedSnapshot, StateRef
from unicron.contracts.tasks import ParallelLayout
from unicron.contracts.worker import Joined, Membership
from unicron.errors import GroupBrokenError, InvalidInputError
from unicron.train.carry.files import Files
from unicron.train.groups.rendezvous import Rendezvous
from unicron.train.inplace.buckets import EITHER_WAY
from unicron.train.inplace.groups import ScriptGroups
from unicron.train.inplace.records import UNKNOWN, Records
from unicron.train.inplace.script_rendezvous import CONTINUES, SCRIPT_PART
from unicron.train.loops.collective_results import pack_results, unpack_results
from unicron.train.loops.loops import Loops
from unicron.train.session.gradients import TorchGradients
from unicron.train.session.ranks import TorchRanks
from unicron.train.session.states import TorchStates
from unicron.train.snapshots.state import Fetcher
from unicron.train.worker.channel import AgentChannel
from unicron.train.worker.iteration import WorkerCore
from unicron.train.worker.phases import Due, IterationPhase
from unicron.train.worker.redistribute import Resumption, Standing
from unicron.train.worker.timing import PlannedCollection

COMPARED_ITERATIONS = 3
"""Iterations; what a scheduler does behind an update shows in the next but one."""

MOVED = (
    "parameters were changed since the last snapshot, and not by an update, as by a first step of two, or by averages "
    "that are swapped in for a validation: no process could begin there"
)

RANK_LOST = "a rank is gone, and with it its part of the model: all begin again, from what was saved last in memory"


class WholeCore(WorkerCore):
    """A worker whose microbatch is always its own: that which has the number of its rank."""

    _ranks: "WholeRanks"

    def _plan(self, standings: list[Standing]) -> Resumption:
        first = standings[0].shapes
        if other := next((each.shapes for each in standings if each.shapes != first), None):
            raise InvalidInputError(
                f"ranks have not made the same things before their loop, and would have to replace each other: {first} "
                f"and {other}; make models, optimizers, schedulers and averages on all ranks"
            )
        plan = super()._plan(standings)
        missing = {microbatch for each in plan.todo for microbatch in each}
        todo = tuple((rank,) if rank in missing else () for rank in range(len(standings)))
        # at first nobody needs anything: all have made their models alike, and whatever else differs is to differ
        sources = plan.sources if plan.established else ((),) * len(standings)
        return replace(plan, todo=todo, sources=tuple(map(self._prefer_in_loops, sources)))

    def _prefer_in_loops(self, sources: tuple[int, ...]) -> tuple[int, ...]:
        """Return the sources that are in their loops, if any: those know more results of collectives."""
        return tuple(each for each in sources if each in self._ranks.in_loops) or sources


class SpreadCore(WorkerCore):
    """A worker whose replica is all ranks. It goes to one membership only."""

    async def _regroup(self, broke: float) -> None:
        if self.phase is not IterationPhase.NEW:
            raise ConnectionAbortedError(RANK_LOST)
        await super()._regroup(broke)

    async def _join(self) -> Joined:
        if self._ranks.formed != self.epoch:  # somebody was lost since the script's group was formed
            raise ConnectionAbortedError(RANK_LOST)
        return await super()._join()


class WholeRanks(TorchRanks):
    """The ranks to one that has the whole model: to the core it is a replica, though it is a place to all others.

    Args:
        channel: to the agent.
        groups: of the script.
        loops: of the script.
        records: of the ranks.
        files: of the script.

    Attributes:
        in_loops: ranks of the membership that were in their loops before it.
    """

    def __init__(
        self, channel: AgentChannel | None, groups: ScriptGroups, loops: Loops, records: Records, files: Files
    ) -> None:
        super().__init__(channel, 0)
        self.in_loops = frozenset[int]()
        self._script_groups, self._loops, self._records, self._read = groups, loops, records, files.read
        self._fetcher = Fetcher(channel)
        self._takeover_refusal = ""

    def refuse(self, why: str) -> None:
        """Have all ranks begin again in the next membership, which they are told the reason of."""
        self._takeover_refusal = why

    async def await_membership(self, above: int, within_s: float | None = None) -> Membership:
        """Block until there is a membership newer than epoch `above`, or so many seconds have passed."""
        membership = await super().await_membership(above, within_s)
        return msgspec.structs.replace(membership, layout=ParallelLayout(replicas=membership.world_size))

    async def form(self, membership: Membership) -> None:
        """Form the gradient group and the group of the script's own collectives anew.

        Raises:
            ConnectionAbortedError: results of collectives are not known that a new rank needs, so all ranks restart.
        """
        setup = self._script_groups.setup
        if setup is not None and self._loops.is_reachable:
            Rendezvous(membership, SCRIPT_PART).set(f"{membership.rank}", CONTINUES + setup)
        elif self._script_groups.ended.in_loops:  # else all ranks are new, and nobody has to be given anything
            raise ConnectionAbortedError(UNKNOWN)
        await super().form(membership)
        if self._script_groups.epoch != membership.epoch:
            self._script_groups.form(membership.epoch, lambda: Rendezvous(membership, "-script"))
            self._script_groups.strict = True
        await self._reconcile_collectives(membership)

    async def _reconcile_collectives(self, membership: Membership) -> None:
        """Exchange results of collectives that have ended on some ranks, and broke or never began on others.

        Raises:
            ConnectionAbortedError: a new rank could not take over the one that it replaces, so all ranks restart.
        """
        ended = self._script_groups.ended
        standings = await self.gather_across_replicas(ended.count, ended.in_loops)
        self.in_loops = frozenset(rank for rank, (_, joined) in enumerate(standings) if joined)
        if ended.in_loops:
            new = [rank for rank, (_, joined) in enumerate(standings) if not joined]
            refused, closed = self._records.move_to(membership, new), self._loops.closed_reason if new else ""
            shown, read = self._records.shown if new else "", self._read.changed_reason() if new else ""
            written = (MOVED if self._records.moved() else self._loops.taker.written()) if new else ""
            self._takeover_refusal = self._takeover_refusal or shown or refused or closed or written or read
            if new:
                self._records.iterations_compared = COMPARED_ITERATIONS
        chains = self._loops.reachable_chains  # the newest is empty where a new rank begins at the top
        known = self._loops.replay.points.chains()
        lacks = self._records.lacks_of_lost(chains, known) if ended.in_loops and chains[0] else ""
        said = await self.gather((self._takeover_refusal, lacks))
        in_vain = next((why for why, _ in said if why), "")
        if not in_vain and self.in_loops and all(said[rank][1] for rank in self.in_loops):
            in_vain = said[min(self.in_loops)][1]
        if in_vain:
            with contextlib.suppress(GroupBrokenError):
                await self.gather(b"")  # all have the reason before the first of them ends
            self._takeover_refusal = in_vain  # which ranks that have not received it yet get with the next membership
            raise ConnectionAbortedError(f"all ranks begin again: {in_vain}")
        if not ended.in_loops and membership.shelf is not None and not any(joined for _, joined in standings):
            self._records.distribute(membership, self._saved_records(membership, membership.shelf))
        counts = [count for count, joined in standings if joined]
        fewest, most = min(counts, default=0), max(counts, default=0)
        ended.set_ahead(fewest, [])
        if fewest < most:
            given = await self.gather(pack_results(ended.results_after(fewest)) if ended.in_loops else b"")
            ended.set_ahead(fewest, max(map(unpack_results, filter(None, given)), key=len))

    def _saved_records(self, membership: Membership, shelf: ParkedSnapshot) -> Iterator[dict[str, Any]]:
        for place in range(membership.world_size):
            refs = [ref for ref in shelf.states if ref.place == place]
            try:
                yield self._fetcher.fetch(refs, membership.epoch)["objects"]["record"]
            finally:
                self._fetcher.remove_files()


class ScriptStates(TorchStates):
    """The state of a rank, saved only where another process could take over its script.

    Args:
        channel: to the agent.
        ranks: that this one is among.
        groups: of the script.
        loops: of the script.
        records: of the ranks.
    """

    def __init__(
        self, channel: AgentChannel | None, ranks: TorchRanks, groups: ScriptGroups, loops: Loops, records: Records
    ) -> None:
        super().__init__(channel, ranks)
        self._script_groups, self._loops, self._records = groups, loops, records
        self._have_moved = False

    def save(self, iteration: int) -> None:
        """Have a thread save the state, if it is one to go on from; at once where parameters have moved before."""
        carried = not self._records.refusal and self._script_groups.state_dict()["setup"] is not None
        if carried and self._loops.is_reachable and self._loops.taker.beside.are_alike:
            super().save(iteration)
            if self._have_moved and self._saver is not None:
                self._saver.wait()

    def digest(self) -> None:
        """Have no states compared: in the midst of an iteration a script may have its own values anywhere.

        No rank's state is overwritten because it is not as another's. They are compared between iterations
        (`unicron.train.inplace.alike`).
        """

    def _is_whole(self) -> bool:
        """Return whether parameters have stayed what they were; a script may change them as they are copied."""
        self._have_moved |= self._records.moved()
        return not self._records.moved()

    def describe(self, iteration: int) -> StateRef:
        """Return what a state is to all others, to whom this rank is a place of the only replica."""
        ref = super().describe(iteration)
        layout = ParallelLayout(replicas=0, shard=self._ranks.membership.world_size)
        return msgspec.structs.replace(ref, place=int(os.environ["UNICRON_PLACE"]), layout=layout)


class WholeGradients(TorchGradients):
    """The gradients of a rank with the whole model.

    Sums of two are the same in any order. More ranks sum what torch sums, all of it as one bucket to the core.

    Args:
        ranks: that sum them.
        states: of this one.
        microbatches: of an iteration; each rank has one.
        pieces: returns what torch sums at once.
    """

    def __init__(
        self,
        ranks: TorchRanks,
        states: TorchStates,
        microbatches: int,
        pieces: Callable[[], list[list[torch.nn.Parameter]]],
    ) -> None:
        super().__init__(ranks, None, microbatches, PlannedCollection(0))
        self._states, self._pieces_of_torch = states, pieces
        self._sent = list[tuple[torch.Tensor, list[int], Work | None]]()

    def prepare(self, parameters: Iterable[torch.nn.Parameter], *more: Any, **named: Any) -> None:
        """Take the parameters whose gradients they are, what goes along first."""
        super().prepare(parameters, *more, **named)
        if self._microbatches > EITHER_WAY:
            self._slices = [slice(0, len(self._reduced))]
            self._numbers = {id(each): number for number, each in enumerate(self._parameters)}

    def _begin(self, bucket: int) -> Work | None:
        if self._microbatches <= EITHER_WAY:
            return super()._begin(bucket)
        self._reduced.copy_(self._accumulated)
        for those in self._pieces_of_torch():
            numbers = [self._numbers[id(each)] for each in those]
            parts = [self._as_laid_out(number).reshape(-1) for number in numbers]
            piece = torch.cat(parts).to(those[0].dtype.to_real())
            self._sent.append((piece, numbers, self._ranks.group.begin_all_reduce(piece)))
        beside = self._reduced[self._ends[-2] :]
        work = self._ranks.group.begin_all_reduce(beside)
        if work is not None:
            self._active[bucket] = work
        return work

    async def reduce(self, bucket: int) -> None:
        """Wait for the sum; what was accumulated stays."""
        while self._sent:
            piece, numbers, work = self._sent.pop(0)
            if work is not None:
                self._ranks.group.finish(work)
            parts = torch.split(piece, [self._sums[number].numel() for number in numbers])
            for number, part in zip(numbers, parts, strict=True):
                out = self._as_laid_out(number)
                out.copy_(part.view(out.shape))
        await super().reduce(bucket)

    def _as_laid_out(self, number: int) -> torch.Tensor:
        """Return what is reduced of a parameter's gradient, its dimensions in the order that they have in memory."""
        parameter, found = self._parameters[number], self._sums[number]
        strides = parameter.stride()
        order = sorted(range(parameter.dim()), key=lambda dimension: -strides[dimension])
        return found.permute(*order, *range(parameter.dim(), found.dim()))

    def abandon(self) -> None:
        """Give up what was begun and not waited for."""
        sent, self._sent = self._sent, []
        for _, _, work in sent:
            with contextlib.suppress(GroupBrokenError):
                if work is not None:
                    self._ranks.group.finish(work)
        super().abandon()

    def announce(self, due: Due) -> None:
        """Say what is due as the first rank does, once its last state is safe: so all save in the same iterations."""
        if int(os.environ["UNICRON_PLACE"]) == 0 and self._states.secured:
            super().announce(due)
