"""How a worker moves from one membership to the next, and keeps its state and the progress of its iteration."""

from collections.abc import Sequence
from typing import NoReturn

import msgspec

from unicron.contracts.states import COPIES, StateRef
from unicron.contracts.tasks import Breakage, Seat, WorkerPhase
from unicron.contracts.worker import NOWHERE, Broken, Joined, Kept, Progress, Unprotected
from unicron.errors import GroupBrokenError, LackError, StateLostError, StateTransferError, tells_lack
from unicron.train.worker import redistribute
from unicron.train.worker.duties import Duties
from unicron.train.worker.exchange import Exchange
from unicron.train.worker.finite import Finite, Rule
from unicron.train.worker.phases import MOVES, IterationPhase, Move
from unicron.train.worker.redistribute import Resumption, Standing
from unicron.train.worker.replica import Replica
from unicron.train.worker.shell import Shell

FIRST_S, LONGEST_S = 1.0, 60.0
"""The first and the longest wait until a state is exported again for which a machine lacked room."""


class RegroupingCore:
    """The part of a worker's core that joins memberships: what it has, and how it resumes with the others.

    Args:
        shell: computes, communicates and moves states for the core.
        iterations: number of updates to make in all.
        microbatches: number of microbatches of a global batch.
        alone: there is no cluster; this process computes everything.
        rule: what to do about a gradient that is not finite; None: nothing.

    Attributes:
        phase: changes by the table `MOVES` only.
        iteration: the one that it computes, or the first that it has not computed.
        membership: the one that it is in or last tried to join.
        todo: microbatches of the iteration that it has to compute.
        done: microbatches in its accumulated gradient.
        established: whether some member had a state when this membership was formed.
    """

    def __init__(
        self, shell: Shell, iterations: int, microbatches: int, *, alone: bool = False, rule: Rule | None = None
    ) -> None:
        self.phase = IterationPhase.BETWEEN if alone else IterationPhase.NEW
        self.iteration = 0
        self.membership = msgspec.structs.replace(NOWHERE, world_size=1)
        self.todo: list[int] = []
        self.done: set[int] = set()
        self.established = False
        self._ranks, self._states, self._gradients = shell
        self._iterations, self._microbatches = iterations, microbatches
        self._reduced: list[bool] = []
        self._apart = frozenset[tuple[int, int]]()
        self._kept: StateRef | None = None
        self._reported = -2
        self._last = iterations + 1
        self._duties, self._finite = Duties(*shell), Finite(shell.ranks, shell.gradients, rule)
        self._replica = Replica(shell.ranks, shell.states)

    @property
    def has_state(self) -> bool:
        """Whether it has the state of its task, loaded or not."""
        return self.phase not in {IterationPhase.NEW, IterationPhase.DOUBTED}

    @property
    def epoch(self) -> int:
        """The epoch of the membership that it is in or last tried to join; -1 before the first."""
        return self.membership.epoch

    @property
    def seat(self) -> Seat:
        """Its replica and its place; a rank that only takes a state is in a replica beyond the ones that compute."""
        return self.membership.seat or Seat(self.membership.layout.replicas, self._ranks.place)

    def _move(self, move: Move) -> None:
        self.phase = MOVES[self.phase, move]

    def _drop(self) -> None:
        """Discard the accumulated and reduced gradients."""
        self._gradients.clear()
        self._finite.clear()
        self.done, self._reduced = set(), [False] * self._gradients.buckets

    async def _has_newer_membership(self) -> bool:
        """Return whether to leave for a newer membership, as all ranks of a replica do before the same microbatch."""
        try:
            return await self._replica.newest_epoch() > self.epoch
        except GroupBrokenError as error:
            self._report(error)
            return True

    def _progress(self, phase: WorkerPhase) -> None:
        self._ranks.send(Progress(iteration=self.iteration, phase=phase, done=len(self.done)))

    def _report(self, error: GroupBrokenError | StateTransferError) -> None:
        """Report to the agent what broke, unless a newer membership, which has interrupted it, is the reason."""
        broke = Breakage.STATE if isinstance(error, StateTransferError) else Breakage.GROUP
        own = isinstance(error, LackError | GroupBrokenError)  # what others lack is theirs to report
        broke = Breakage.LACK if own and tells_lack(str(error)) else broke
        again = broke is Breakage.GROUP and self._reported == self.epoch  # a peer that left breaks collectives, too
        if self._ranks.newest.epoch > self.epoch or again:
            return
        self._reported = self.epoch
        self._ranks.send(Broken(epoch=self.epoch, iteration=self.iteration, error=_first_line(error), broke=broke))

    # --- a new membership --------------------------------------------------------------------------------------------

    async def _regroup(self, broke: float) -> None:
        """Wait for newer memberships until one is joined; `broke` is when the last one ended (monotonic seconds)."""
        while True:
            self._progress(WorkerPhase.WAITING)
            membership = await self._ranks.await_membership(self.epoch)
            self.membership = msgspec.structs.replace(membership, layout=membership.shape)
            self._replica.size = self.membership.layout.replica_workers
            if self._kept is not None:  # others take it only where this worker does not go on
                self._states.remove_export(self._kept)
                self._kept = None
            try:
                joined = await self._join()
            except (GroupBrokenError, StateTransferError) as error:
                self._report(error)
                continue
            self._ranks.send(msgspec.structs.replace(joined, seconds=self._ranks.now() - broke))
            self._progress(WorkerPhase.COMPUTE)
            return

    async def _join(self) -> Joined:
        """Form the groups, gather what each rank has, work out how to resume, and exchange what ranks lack."""
        if self._replica.broken and self._ranks.is_asynchronous:
            self._drop()  # what this rank computed last may have come of noise, though it took no notice
        self._gradients.abandon()
        await self._ranks.form(self.membership)
        standings = await self._ranks.gather(self._standing())
        try:
            plan = self._plan(standings)
        except StateTransferError as error:
            self._end_if_left_behind(standings, error)
            raise
        self.established = plan.established
        if not plan.established and any(each.doubted for each in standings):
            self._refuse_to_begin_anew()
        state_from = await self._exchange_states(plan, standings)
        self._duties.join(plan, standings)
        if plan.stale[self.membership.rank]:
            self._drop()
        # all leave behind the same iteration: this one where nothing of it is done yet, else it is finished first
        self._last = plan.iteration + (plan.kept > 0) if self.membership.leaving else self._iterations + 1
        if self.membership.seat is not None:
            await self._share(plan.bucket_from[self.seat.place])
            self.todo = list(plan.todo[self.seat.replica])
            await self._replica.form(self.membership, standings, self.seat.replica)  # last: others wait for all before
        self._move(Move.JOIN)
        return Joined(
            epoch=self.epoch,
            rank=self.membership.rank,
            world_size=self.membership.world_size,
            iteration=plan.iteration,
            kept=plan.kept,
            recomputed=plan.recomputed,
            state_from=state_from,
            seconds=0.0,
        )

    async def _share(self, sources: Sequence[int | None]) -> None:
        """Copy buckets that some rank has reduced already; `sources` has that rank for each bucket, or None.

        A copy counts once all ranks have confirmed it: until then only its source surely has it.
        """
        for bucket, source in enumerate(sources):
            self._reduced[bucket] = source == self.membership.rank
            if source is not None:
                await self._gradients.share(bucket, self.membership.layout.seat(source).replica)
        if any(source is not None for source in sources):
            await self._ranks.confirm()
        self._reduced = [source is not None for source in sources]

    def _plan(self, standings: list[Standing]) -> Resumption:
        plan = redistribute.resume(standings, self._microbatches, self.membership.layout)
        if plan.iteration < self._iterations:
            return plan
        return redistribute.resume(standings, 0, self.membership.layout)

    def _end_if_left_behind(self, standings: Sequence[Standing], error: StateTransferError) -> None:
        """End this worker if all places have states, but twice in a row from before different updates.

        The last replicas broke on both sides of an update, and no membership would bring these states together. Once a
        place has no state, saved copies are looked for. At the first time, other members may still be on their way.

        Raises:
            StateLostError: so it is, and this worker's state is the oldest.
        """
        states = frozenset((each.place, each.iteration) for each in standings if each.has_state)
        again, self._apart = states == self._apart, states
        whole = len({place for place, _ in states}) == self._replica.size
        if again and whole and self.has_state and self.iteration == min(iteration for _, iteration in states):
            raise StateLostError(f"{error}; this worker, which is behind, is to be started anew") from error

    def _standing(self) -> Standing:
        return Standing(
            node=self.membership.member.node,
            iteration=self.iteration,
            has_state=self.has_state,
            done=frozenset(self.done),
            todo=tuple(self.todo),
            buckets=tuple(self._reduced),
            place=self._ranks.place,
            formed=self._ranks.formed,
            shapes=self._gradients.shapes,
            shelf=self.membership.shelf,
            due=self._duties.due,
            doubted=self.phase is IterationPhase.DOUBTED,
        )

    # --- states ------------------------------------------------------------------------------------------------------

    async def _exchange_states(self, plan: Resumption, standings: Sequence[Standing]) -> str:
        """Hand states to the ranks that lack one; return the worker whose state this rank took, empty if none.

        A rank that took one has the duties that come with it, even if the membership breaks before others have theirs.

        Raises:
            StateTransferError: some rank could take it from none of its sources; all ranks raise this.
        """
        exchange = Exchange(
            self._ranks, self._states, self.membership, self.seat.place, plan, taken=self.phase is IterationPhase.TAKEN
        )
        try:
            await exchange.carry_out(lambda: self._progress(WorkerPhase.WAITING))
        finally:
            if exchange.restored_from:
                await self._states.await_saved()  # what is loaded would get into it
                self._move(Move.TAKE)
                self._drop()
                self.todo, self.iteration = [], plan.iteration
                self._duties.join(plan, standings, taken=True)
        return exchange.restored_from

    def _refuse_to_begin_anew(self) -> NoReturn:
        """Refuse to begin the task anew when the only state was given up: its copies have not been searched yet."""
        if self.phase is IterationPhase.DOUBTED:
            raise StateLostError(
                f"nobody here has place {self._ranks.place} of iteration {self.iteration}, and this worker gave up "
                "what it had: it is to be started anew"
            )
        raise StateTransferError("the only state here was given up")

    async def _export_for_relayout(self) -> None:
        """Export the state for workers of another layout, and wait to be stopped or for another membership.

        Where the machine lacks room for it, this is tried until there is some: nobody else has this state.
        """
        wait_s = FIRST_S
        while self.seat.replica < COPIES and self._ranks.newest.epoch <= self.epoch:
            self._progress(WorkerPhase.WAITING)
            try:
                self._kept = await self._states.export(self._ranks.place, self.iteration, kept=True)
            except StateTransferError as error:
                if not tells_lack(str(error)):
                    self._report(error)
                    break
                self._ranks.send(Unprotected(reason=_first_line(error)))  # each time: a plan may have said other things
                await self._ranks.await_membership(self.epoch, wait_s)
                wait_s = min(2 * wait_s, LONGEST_S)
            else:
                self._ranks.send(Kept(epoch=self.epoch, state=self._kept))
                break
        await self._regroup(self._ranks.now())


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:300]
