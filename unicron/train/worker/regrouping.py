"""How a worker goes from one membership to the next, with what it has of its iteration and its state."""

from collections.abc import Sequence
from typing import NoReturn

import msgspec

from unicron.contracts.states import COPIES, StateRef
from unicron.contracts.tasks import Breakage, Seat, WorkerPhase
from unicron.contracts.worker import NOWHERE, Broken, Joined, Kept, Progress
from unicron.errors import GroupBrokenError, StateLostError, StateTransferError
from unicron.train.worker import redistribute
from unicron.train.worker.duties import Duties
from unicron.train.worker.exchange import Exchange
from unicron.train.worker.finite import Finite, Rule
from unicron.train.worker.phases import MOVES, Move, Phase
from unicron.train.worker.redistribute import Resumption, Standing
from unicron.train.worker.replica import Replica
from unicron.train.worker.shell import Shell


class RegroupingCore:
    """One worker in its memberships: how far it is, and how it goes on from there with others.

    Args:
        shell: does what the core wants done.
        iterations: updates to make in all.
        microbatches: of a global batch.
        alone: there is no cluster; this process computes everything.
        rule: what to do where a gradient is not finite; None: nothing.

    Attributes:
        phase: where it stands; it changes by the table `MOVES` only.
        iteration: that it computes, or has computed up to (exclusive).
        membership: that it is in or last tried to join.
        todo: microbatches of the iteration that it is to compute.
        done: those that are in its accumulated gradient.
        established: when this membership was formed, somebody in it had a state.
    """

    def __init__(
        self, shell: Shell, iterations: int, microbatches: int, *, alone: bool = False, rule: Rule | None = None
    ) -> None:
        self.phase = Phase.BETWEEN if alone else Phase.NEW
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
        return self.phase not in {Phase.NEW, Phase.DOUBTED}

    @property
    def epoch(self) -> int:
        """Of the membership that it is in or last tried to join; -1 before the first."""
        return self.membership.epoch

    @property
    def seat(self) -> Seat:
        """Its replica, and its place in there; who only takes a state is in a replica beyond those that compute."""
        return self.membership.seat or Seat(self.membership.layout.replicas, self._ranks.place)

    def _move(self, move: Move) -> None:
        self.phase = MOVES[self.phase, move]

    def _drop(self) -> None:
        """Forget what was accumulated and reduced."""
        self._gradients.clear()
        self._finite.clear()
        self.done, self._reduced = set(), [False] * self._gradients.buckets

    async def _leaves(self) -> bool:
        """Whether to go to a newer membership, which the ranks of a replica do before the same microbatch."""
        try:
            return await self._replica.newest() > self.epoch
        except GroupBrokenError as error:
            self._report(error)
            return True

    def _progress(self, phase: WorkerPhase) -> None:
        self._ranks.say(Progress(iteration=self.iteration, phase=phase, done=len(self.done)))

    def _report(self, error: GroupBrokenError | StateTransferError) -> None:
        """Tell the agent what broke; where a newer membership is there already, that is why, and nothing is wrong."""
        broke = Breakage.STATE if isinstance(error, StateTransferError) else Breakage.GROUP
        again = broke is Breakage.GROUP and self._reported == self.epoch  # a peer that left breaks collectives, too
        if self._ranks.newest.epoch > self.epoch or again:
            return
        self._reported = self.epoch
        text = str(error).partition("\n")[0][:300]
        self._ranks.say(Broken(epoch=self.epoch, iteration=self.iteration, error=text, broke=broke))

    # --- a new membership --------------------------------------------------------------------------------------------

    async def _regroup(self, broke: float) -> None:
        """Wait for a newer membership and go on in it, however many it takes; `broke`: when the last one ended."""
        while True:
            self._progress(WorkerPhase.WAITING)
            membership = await self._ranks.await_membership(self.epoch)
            self.membership = msgspec.structs.replace(membership, layout=membership.shape)
            self._replica.size = self.membership.layout.replica_workers
            if self._kept is not None:  # others take it only where this worker does not go on
                self._states.withdraw(self._kept)
                self._kept = None
            try:
                joined = await self._join()
            except (GroupBrokenError, StateTransferError) as error:
                self._report(error)
                continue
            self._ranks.say(msgspec.structs.replace(joined, seconds=self._ranks.now() - broke))
            self._progress(WorkerPhase.COMPUTE)
            return

    async def _join(self) -> Joined:
        """Form the group, tell each other what everybody has, and take over what is missing."""
        if self._replica.broken and self._ranks.doubtful:
            self._drop()  # what this rank computed last may have come of noise, though it took no notice
        self._gradients.abandon()
        await self._ranks.form(self.membership)
        standings = await self._ranks.gather(self._standing())
        try:
            plan = self._plan(standings)
        except StateTransferError as error:
            self._end_what_is_behind(standings, error)
            raise
        self.established = plan.established
        if not plan.established and any(each.doubted for each in standings):
            self._despair()
        state_from = await self._take_what_is_missing(plan, standings)
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
        """Have what others have reduced already; by bucket, of which rank, if any has it.

        What comes of it counts once all have confirmed it: until then only its source has it for sure.
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

    def _end_what_is_behind(self, standings: Sequence[Standing], error: StateTransferError) -> None:
        """End this worker where states of all places are there, but for the second time from before different updates.

        The last replicas broke on both sides of an update. No further membership would bring these states together;
        once a place has none, copies that were saved are looked for. In the first, others may still be on their way.

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
            doubted=self.phase is Phase.DOUBTED,
        )

    # --- states ------------------------------------------------------------------------------------------------------

    async def _take_what_is_missing(self, plan: Resumption, standings: Sequence[Standing]) -> str:
        """Hand states to the ranks that lack them; return the worker whose this rank took, empty where it had its own.

        Who took one has the duties that come with it, also where the membership breaks before the others have theirs.

        Raises:
            StateTransferError: some rank could take it from none of its sources; all ranks raise this.
        """
        exchange = Exchange(
            self._ranks, self._states, self.membership, self.seat.place, plan, taken=self.phase is Phase.TAKEN
        )
        try:
            await exchange.carry_out(lambda: self._progress(WorkerPhase.WAITING))
        finally:
            if exchange.took_from:
                await self._states.saved()  # what is loaded would get into it
                self._move(Move.TAKE)
                self._drop()
                self.todo, self.iteration = [], plan.iteration
                self._duties.join(plan, standings, taken=True)
        return exchange.took_from

    def _despair(self) -> NoReturn:
        """Have no task begin anew because a state was given up whose copies nobody has looked for yet."""
        if self.phase is Phase.DOUBTED:
            raise StateLostError(
                f"nobody here has place {self._ranks.place} of iteration {self.iteration}, and this worker gave up "
                "what it had: it is to be started anew"
            )
        raise StateTransferError("the only state here was given up")

    async def _hand_over(self) -> None:
        """Leave the state behind for workers of another layout, and wait for what comes: as a rule, the end."""
        try:
            if self.seat.replica < COPIES:
                self._progress(WorkerPhase.WAITING)
                self._kept = await self._states.export(self._ranks.place, self.iteration, kept=True)
                self._ranks.say(Kept(epoch=self.epoch, state=self._kept))
        except StateTransferError as error:
            self._report(error)
        await self._regroup(self._ranks.now())
