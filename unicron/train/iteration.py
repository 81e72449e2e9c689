"""What a worker does in an iteration and between memberships: the core that real and modelled workers share.

The core decides; its shell (`unicron.train.shell`) computes, meets other ranks, moves states and talks to the agent.
"""

import contextlib
from collections.abc import Sequence
from typing import NoReturn

import msgspec

from unicron.contracts.states import COPIES, StateRef
from unicron.contracts.tasks import Breakage, Seat, WorkerPhase
from unicron.contracts.worker import NOWHERE, Broken, Finished, Iterated, Joined, Kept, Progress, Ready
from unicron.errors import GroupBrokenError, StateDivergedError, StateLostError, StateTransferError, UnusableStateError
from unicron.train import redistribute
from unicron.train.duties import Duties
from unicron.train.exchange import Exchange
from unicron.train.finite import Finite, Rule
from unicron.train.phases import MOVES, Due, Move, Phase
from unicron.train.redistribute import Resumption, Standing
from unicron.train.replica import Replica
from unicron.train.shell import Shell

AHEAD = 2
"""Microbatches that may be under way on a GPU when the next is handed out: it never waits for one."""


class WorkerCore:
    """One worker of a task. A script enters an iteration, computes microbatches as long as there are any, and steps.

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
        loss: mean over the last global batch.
        established: when this membership was formed, somebody in it had a state.
        stepped: the script has called `step` in this iteration.
    """

    def __init__(
        self, shell: Shell, iterations: int, microbatches: int, *, alone: bool = False, rule: Rule | None = None
    ) -> None:
        self.phase = Phase.BETWEEN if alone else Phase.NEW
        self.iteration = 0
        self.membership = msgspec.structs.replace(NOWHERE, world_size=1)
        self.todo: list[int] = []
        self.done: set[int] = set()
        self.loss = float("nan")
        self.established = False
        self.stepped = False
        self._shell, self._iterations, self._microbatches = shell, iterations, microbatches
        self._reduced: list[bool] = []
        self._apart = frozenset[tuple[int, int]]()
        self._kept: StateRef | None = None
        self._saved, self._reported = -1, -2
        self._last = iterations + 1
        self._began = self._given = 0.0
        self._computed: list[float] = []
        self._again = False
        self._duties, self._finite, self._void = Duties(shell), Finite(shell, rule), False
        self._replica = Replica(shell)

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
        return self.membership.seat or Seat(self.membership.layout.replicas, self._shell.place)

    @property
    def overlaps(self) -> bool:
        """Whether the next backward pass may begin to reduce what it makes.

        It is that of the last microbatch, and no bucket is reduced already. Where one is, a rank without microbatches
        begins behind it, and if this one began with it the sums of two buckets would be mixed.
        """
        return len(self.todo) == 1 and not any(self._reduced)

    def _move(self, move: Move) -> None:
        self.phase = MOVES[self.phase, move]

    # --- in the order of a script ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Join the first membership, now that the model is built."""
        self._shell.say(Ready())
        self._drop()
        await self._regroup(self._shell.now())

    def enter(self) -> bool:
        """Go to the next iteration, in the state of those that are ahead; return whether there is one."""
        if self._again:
            self._shell.restore()
            self._again = False
        if self.phase is Phase.TAKEN:
            self._shell.load()
            self._move(Move.LOAD)
        self._began, self.stepped = self._shell.now(), False
        self._computed.clear()
        return self.iteration < self._iterations

    async def next_microbatch(self) -> int | None:
        """Return the microbatch to compute; None once the gradient is whole, or if this worker fell behind."""
        if self.phase is Phase.BETWEEN:
            self._begin()
        while self.phase is Phase.OPEN:
            if self.iteration >= self._last:
                await self._hand_over()
            elif self.membership.seat is None or await self._leaves():
                await self._regroup(self._shell.now())
            else:
                self._save()
                self._given = self._shell.now()
                await self._shell.keep_pace(AHEAD if self.todo else 0)
                if self.todo:
                    return self.todo[0]
                await self._reduce()
        return None

    def computed(self) -> None:
        """Take in the gradient of that microbatch, unless the replica broke under its computation."""
        if self._replica.broken:
            self._shell.discard()
            return
        self._shell.accumulate()
        self._finite.note(self.todo[0])
        self.done.add(self.todo.pop(0))
        self._computed.append(self._shell.now() - self._given)
        self._progress(WorkerPhase.COMPUTE)

    async def step(self) -> None:
        """Update the parameters, and with that end the iteration.

        A worker that fell behind does nothing, nor does one whose replica broke between its reduce and here: what the
        script did in between, such as clipping, may be wrong. They go on with another iteration, or this one again.

        Raises:
            RuntimeError: the gradient is not whole.
        """
        self.stepped = True
        if self.phase is Phase.TAKEN:
            return
        if self.phase is not Phase.REDUCED:
            raise RuntimeError(
                f"session.step() in iteration {self.iteration} without its gradient: "
                "let the loop over session.microbatches() run to its end, then call step() once"
            )
        try:
            await self._replica.check()
        except GroupBrokenError as error:
            broke = self._shell.now()
            self._report(error)
            self._shell.remember()  # the script goes on as if this had been the update, and then does it all again
            self._again = True
            self._reduced = [False] * self._shell.buckets  # the script has had them, and may have clipped them
            await self._regroup(broke)
            return
        self._progress(WorkerPhase.STEP)
        self._shell.update(void=self._void)
        self.iteration += 1
        self._move(Move.UPDATE)
        self._shell.say(
            Iterated(
                iteration=self.iteration - 1,
                epoch=self.epoch,
                rank=self.membership.rank,
                world_size=self.membership.world_size,
                seconds=self._shell.now() - self._began,
                loss=self.loss,
                computed_s=sum(self._computed) / len(self._computed) if self._computed else 0.0,
            )
        )

    async def rejoin(self, error: GroupBrokenError) -> None:
        """Go to the next membership from outside of a reduce, as something else broke there.

        Args:
            error: how it did.
        """
        if self.phase is Phase.BETWEEN:
            self._begin()
        self._report(error)
        await self._regroup(self._shell.now())

    def peer_left(self, epoch: int) -> None:
        """Tell the agent that a peer has left, though this rank may compute for long before it comes to a collective.

        It settles what has become of a node that is suspected to be lost. Another thread than that of the script may
        call this.

        Args:
            epoch: of the membership that it has left.
        """
        to_come = self.iteration + (self.phase is Phase.REDUCED)
        if epoch == self.epoch and to_come < min(self._iterations, self._last):
            self._report(GroupBrokenError("a peer has left"))

    async def finish(self) -> bool:
        """Say that the last iteration is done, once the whole replica has it behind it, and its model is saved.

        From then on its ranks may be putting their results together, and whoever interrupts them ruins those.

        Returns:
            False where a state was taken meanwhile: go on with that.
        """
        if self._shell.saves_model:  # as if in one more iteration, without microbatches
            await self.next_microbatch()
            if self.phase is not Phase.REDUCED:
                return False
        with contextlib.suppress(GroupBrokenError):  # then there are no results of the whole to break
            await self._replica.check()
        self._shell.leave()
        self._shell.say(Finished(iterations=self._iterations))
        return True

    # --- within an iteration -----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._drop()
        self._move(Move.BEGIN)
        microbatches = 0 if self._over else self._microbatches
        self.todo = list(range(self.seat.replica, microbatches, self.membership.layout.replicas))
        self._progress(WorkerPhase.COMPUTE)

    def _save(self) -> None:
        """Have the state of this iteration saved if that is due and the one before is safe; else that one must stay."""
        if Due.SAVE not in self._duties.due or Due.TRY in self._duties.due:
            return  # older copies stay until this state has been tried
        if self._shell.saves and self._saved != self.iteration and self._replica.may_save:
            self._saved = self.iteration
            self._shell.save(self.iteration)

    async def _await_saved(self) -> None:
        """Wait until the state is saved, before anybody of the replica updates: then it is whole on all ranks."""
        await self._shell.saved()

    def _drop(self) -> None:
        """Forget what was accumulated and reduced."""
        self._shell.clear()
        self._finite.clear()
        self.done, self._reduced = set(), [False] * self._shell.buckets

    async def _reduce(self) -> None:
        self._progress(WorkerPhase.REDUCE)
        failure, saved, self._void = None, self._saved == self.iteration, False
        self._duties.announce(saved=saved)
        try:
            await self._sum()
            await self._duties.compare(self.membership, self.iteration)
            if self._over:
                await self._save_model()
            else:
                self._duties.check()
        except GroupBrokenError as error:
            failure = error
        if failure is None:
            await self._await_saved()
        holds = failure is not None or self._over or self._finite.holds
        try:
            agreed = await self._replica.agree(failure, holds=holds)
            self._void = not agreed.holds
            if self._void and (dealt := await self._decide()):
                self._compute_again(dealt)
                return
        except GroupBrokenError as error:
            broke = self._shell.now()
            await self._give_up_what_is_wrong(failure, error)
            await self._regroup(broke)
            return
        self._duties.fulfil(saved=saved, announced=agreed.announced)
        if agreed.holds:
            self._finite.settle(self.membership, self.iteration)
        if not self._over:
            self.loss = agreed.loss
            self._shell.publish(void=self._void)
        self._move(Move.REDUCE)

    async def _sum(self) -> None:
        """Sum the gradient over the replicas, bucket by bucket; those that are known to be whole stay.

        Raises:
            GroupBrokenError: some could not be summed, or may be wrong.
        """
        due = [] if self._over else [number for number, reduced in enumerate(self._reduced) if not reduced]
        try:
            self._shell.begin(self.iteration, due)
            for bucket in due:
                await self._shell.reduce(self.iteration, bucket)
                self._reduced[bucket] = True
            await self._replica.settle()
            await self._shell.confirm()
        except GroupBrokenError:
            # a replica that breaks has sent on its way what it was computing, and ends with none of its last buckets
            if self._shell.doubtful or self._replica.in_parts:
                self._reduced = [False] * self._shell.buckets
            raise

    async def _decide(self) -> list[list[int]]:
        return await self._finite.decide(self.membership, self.iteration, self.done, self._microbatches)

    def _compute_again(self, dealt: list[list[int]]) -> None:
        """Go on with the microbatches that are dealt anew; whose they were forgets all that it has summed."""
        if any(not self.done.isdisjoint(each) for each in dealt):
            self._drop()
        self._reduced = [False] * self._shell.buckets
        self.todo = dealt[self.seat.replica]
        self._progress(WorkerPhase.COMPUTE)

    async def _save_model(self) -> None:
        """Have the first replica save the model; where it can't, another becomes the first."""
        self._progress(WorkerPhase.WAITING)
        if self.seat.replica == 0:
            await self._shell.save_model()
        await self._shell.meet()

    @property
    def _over(self) -> bool:
        """Whether all updates are made: what may be left is to save the model."""
        return self.iteration == self._iterations

    async def _give_up_what_is_wrong(self, failure: GroupBrokenError | None, error: GroupBrokenError) -> None:
        """Give up what is in doubt after a reduce that failed: sums of what was computed, and maybe this state."""
        if isinstance(error, UnusableStateError):
            self._duties.reject(self.epoch, self.iteration, error)
        else:
            self._report(error)
        if Due.COMPARE in self._duties.due or self._void:
            self._reduced = [False] * self._shell.buckets
        if isinstance(error, UnusableStateError) or (isinstance(failure, StateDivergedError) and failure.own):
            await self._shell.saved()
            self._move(Move.GIVE_UP)
            self._drop()
            self._saved = -1

    async def _leaves(self) -> bool:
        """Whether to go to a newer membership, which the ranks of a replica do before the same microbatch."""
        try:
            return await self._replica.newest() > self.epoch
        except GroupBrokenError as error:
            self._report(error)
            return True

    def _progress(self, phase: WorkerPhase) -> None:
        self._shell.say(Progress(iteration=self.iteration, phase=phase, done=len(self.done)))

    def _report(self, error: GroupBrokenError | StateTransferError) -> None:
        """Tell the agent what broke; where a newer membership is there already, that is why, and nothing is wrong."""
        broke = Breakage.STATE if isinstance(error, StateTransferError) else Breakage.GROUP
        again = broke is Breakage.GROUP and self._reported == self.epoch  # a peer that left breaks collectives, too
        if self._shell.newest.epoch > self.epoch or again:
            return
        self._reported = self.epoch
        text = str(error).partition("\n")[0][:300]
        self._shell.say(Broken(epoch=self.epoch, iteration=self.iteration, error=text, broke=broke))

    # --- a new membership --------------------------------------------------------------------------------------------

    async def _regroup(self, broke: float) -> None:
        """Wait for a newer membership and go on in it, however many it takes; `broke`: when the last one ended."""
        while True:
            self._progress(WorkerPhase.WAITING)
            membership = await self._shell.await_membership(self.epoch)
            self.membership = msgspec.structs.replace(membership, layout=membership.shape)
            self._replica.size = self.membership.layout.replica_workers
            if self._kept is not None:  # others take it only where this worker does not go on
                self._shell.withdraw(self._kept)
                self._kept = None
            try:
                joined = await self._join()
            except (GroupBrokenError, StateTransferError) as error:
                self._report(error)
                continue
            self._shell.say(msgspec.structs.replace(joined, seconds=self._shell.now() - broke))
            self._progress(WorkerPhase.COMPUTE)
            return

    async def _join(self) -> Joined:
        """Form the group, tell each other what everybody has, and take over what is missing."""
        if self._replica.broken and self._shell.doubtful:
            self._drop()  # what this rank computed last may have come of noise, though it took no notice
        await self._shell.form(self.membership)
        standings = await self._shell.gather(self._standing())
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
                await self._shell.share(bucket, self.membership.layout.seat(source).replica)
        if any(source is not None for source in sources):
            await self._shell.confirm()
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
            place=self._shell.place,
            formed=self._shell.formed,
            shapes=self._shell.shapes,
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
        exchange = Exchange(self._shell, self.membership, self.seat.place, plan, taken=self.phase is Phase.TAKEN)
        try:
            await exchange.carry_out(lambda: self._progress(WorkerPhase.WAITING))
        finally:
            if exchange.took_from:
                await self._shell.saved()  # what is loaded would get into it
                self._move(Move.TAKE)
                self._drop()
                self.todo, self.iteration = [], plan.iteration
                self._duties.join(plan, standings, taken=True)
        return exchange.took_from

    def _despair(self) -> NoReturn:
        """Have no task begin anew because a state was given up whose copies nobody has looked for yet."""
        if self.phase is Phase.DOUBTED:
            raise StateLostError(
                f"nobody here has place {self._shell.place} of iteration {self.iteration}, and this worker gave up "
                "what it had: it is to be started anew"
            )
        raise StateTransferError("the only state here was given up")

    async def _hand_over(self) -> None:
        """Leave the state behind for workers of another layout, and wait for what comes: as a rule, the end."""
        try:
            if self.seat.replica < COPIES:
                self._progress(WorkerPhase.WAITING)
                self._kept = await self._shell.export(self._shell.place, self.iteration, kept=True)
                self._shell.say(Kept(epoch=self.epoch, state=self._kept))
        except StateTransferError as error:
            self._report(error)
        await self._regroup(self._shell.now())
