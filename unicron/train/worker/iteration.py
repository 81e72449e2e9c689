"""A worker's iteration: the core that real and modelled workers share.

The core decides; its shell (`worker/shell.py`) computes, meets other ranks, moves states and talks to the agent.
"""

import contextlib

from unicron.contracts.tasks import WorkerPhase
from unicron.contracts.worker import Finished, Iterated, Ready
from unicron.errors import GroupBrokenError, StateDivergedError, UnusableStateError
from unicron.train.worker.finite import Rule
from unicron.train.worker.phases import Due, IterationPhase, Move
from unicron.train.worker.regrouping import RegroupingCore
from unicron.train.worker.shell import Shell

AHEAD = 2
"""Microbatches that may be under way on a GPU when the next is handed out: it never waits for one."""


class WorkerCore(RegroupingCore):
    """One worker of a task. A script enters an iteration, computes microbatches as long as there are any, and steps.

    Attributes:
        loss: mean over the last global batch.
        stepped: the script has called `step` in this iteration.
    """

    def __init__(
        self, shell: Shell, iterations: int, microbatches: int, *, alone: bool = False, rule: Rule | None = None
    ) -> None:
        super().__init__(shell, iterations, microbatches, alone=alone, rule=rule)
        self.loss = float("nan")
        self.stepped = False
        self._saved = -1
        self._began = self._handed_out = 0.0
        self._updated = -1, 0.0  # in which membership, and when
        self._computed: list[float] = []
        self._computes_again = self._void = False

    @property
    def overlaps(self) -> bool:
        """Whether the next backward pass may begin to reduce what it makes.

        It is that of the last microbatch, and no bucket is reduced already. Where one is, a rank without microbatches
        begins behind it, and if this one began with it the sums of two buckets would be mixed.
        """
        return len(self.todo) == 1 and not any(self._reduced)

    # --- in the order of a script ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Report to the agent that the model is built, and join the first membership."""
        self._ranks.send(Ready())
        await self.join_first()

    async def join_first(self) -> None:
        """Join the first membership."""
        self._drop()
        await self._regroup(self._ranks.now())

    def enter(self, *, late: bool = False) -> bool:
        """Go to the next iteration, in the state of those that are ahead; return whether there is one.

        Args:
            late: what the script has done since the last update counts as part of it, too.
        """
        if self._computes_again:
            self._gradients.discard()  # the next backward pass would add to it
            self._states.restore_others()
            self._computes_again = False
        if self.phase is IterationPhase.TAKEN:
            self._states.load()
            self._move(Move.LOAD)
        epoch, at = self._updated
        self._began = at if late and epoch == self.epoch else self._ranks.now()
        self.stepped = False
        self._computed.clear()
        return self.iteration < self._iterations

    async def next_microbatch(self) -> int | None:
        """Return the microbatch to compute; None once the gradient is whole, or if this worker fell behind."""
        if self.phase is IterationPhase.BETWEEN:
            self._begin()
        while self.phase is IterationPhase.OPEN:
            if self.iteration >= self._last:
                await self._export_for_relayout()
            elif self.membership.seat is None or await self._has_newer_membership():
                await self._regroup(self._ranks.now())
            else:
                self._save()
                self._handed_out = self._ranks.now()
                await self._gradients.keep_pace(AHEAD if self.todo else 0)
                if self.todo:
                    return self.todo[0]
                await self._reduce()
        return None

    def computed(self) -> None:
        """Take in the gradient of that microbatch, unless the replica broke under its computation."""
        if self._replica.broken:
            self._gradients.discard()
            return
        self._gradients.accumulate()
        self._finite.record(self.todo[0])
        self.done.add(self.todo.pop(0))
        self._computed.append(self._ranks.now() - self._handed_out)
        self._progress(WorkerPhase.COMPUTE)

    async def step(self) -> None:
        """Update the parameters, and with that end the iteration.

        A worker that fell behind does nothing, nor does one whose replica broke between its reduce and here: what the
        script did in between, such as clipping, may be wrong. They go on with another iteration, or this one again.

        Raises:
            RuntimeError: the gradient is not whole.
        """
        self.stepped = True
        if self.phase is IterationPhase.TAKEN:
            return
        if self.phase is not IterationPhase.REDUCED:
            raise RuntimeError(
                f"session.step() in iteration {self.iteration} without its gradient: "
                "let the loop over session.microbatches() run to its end, then call step() once"
            )
        try:
            await self._replica.check()
        except GroupBrokenError as error:
            broke = self._ranks.now()
            self._report(error)
            self._states.keep_others()  # the script goes on as if this had been the update, and then does it all again
            self._computes_again = True
            self._reduced = [False] * self._gradients.buckets  # the script has had them, and may have clipped them
            await self._regroup(broke)
            return
        self._progress(WorkerPhase.STEP)
        self._gradients.update(void=self._void)
        self.iteration += 1
        self._move(Move.UPDATE)
        self._ranks.send(
            Iterated(
                iteration=self.iteration - 1,
                epoch=self.epoch,
                rank=self.membership.rank,
                world_size=self.membership.world_size,
                seconds=self._ranks.now() - self._began,
                loss=self.loss,
                computed_s=sum(self._computed) / len(self._computed) if self._computed else 0.0,
            )
        )
        self._updated = self.epoch, self._ranks.now()

    async def rejoin(self, error: GroupBrokenError) -> None:
        """Go to the next membership from outside of a reduce, as something else broke there.

        Args:
            error: how it did.
        """
        if self.phase is IterationPhase.BETWEEN:
            self._begin()
        self._report(error)
        await self._regroup(self._ranks.now())

    def peer_left(self, epoch: int) -> None:
        """Report to the agent that a peer has left, though this rank may compute for long before its next collective.

        It settles what has become of a node that is suspected to be lost. Another thread than that of the script may
        call this.

        Args:
            epoch: of the membership that it has left.
        """
        to_come = self.iteration + (self.phase is IterationPhase.REDUCED)
        if epoch == self.epoch and to_come < min(self._iterations, self._last):
            self._report(GroupBrokenError("a peer has left"))

    async def finish(self) -> bool:
        """Say that the last iteration is done, once the whole replica has it behind it, and its model is saved.

        From then on its ranks may be putting their results together, and an interruption would ruin those.

        Returns:
            False where a state was taken meanwhile: go on with that.
        """
        if self._states.saves_model:  # as if in one more iteration, without microbatches
            await self.next_microbatch()
            if self.phase is not IterationPhase.REDUCED:
                return False
        with contextlib.suppress(GroupBrokenError):  # then there are no results of the whole to break
            await self._replica.check()
        self._ranks.leave()
        self._ranks.send(Finished(iterations=self._iterations))
        return True

    # --- within an iteration -----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._drop()
        self._move(Move.BEGIN)
        microbatches = 0 if self._report_finished else self._microbatches
        self.todo = list(range(self.seat.replica, microbatches, self.membership.layout.replicas))
        self._progress(WorkerPhase.COMPUTE)

    def _save(self) -> None:
        """Have the state of this iteration saved if that is due and the one before is safe; else that one must stay."""
        if Due.SAVE not in self._duties.due or Due.TRY in self._duties.due:
            return  # older copies stay until this state has been tried
        if self._states.saves and self._saved != self.iteration and self._replica.may_save:
            self._saved = self.iteration
            self._states.save(self.iteration)

    async def _await_saved(self) -> None:
        """Wait until the state is saved, before anybody of the replica updates: then it is whole on all ranks."""
        await self._states.await_saved()

    async def _reduce(self) -> None:
        self._progress(WorkerPhase.REDUCE)
        failure, saved, self._void = None, self._saved == self.iteration, False
        self._duties.announce(saved=saved)
        try:
            await self._reduce_buckets()
            await self._duties.compare(self.membership, self.iteration)
            if self._report_finished:
                await self._save_model()
            else:
                self._duties.check()
        except GroupBrokenError as error:
            failure = error
        if failure is None:
            await self._await_saved()
        holds = failure is not None or self._report_finished or self._finite.is_finite
        try:
            agreed = await self._replica.agree(self._gradients.outcome, failure, holds=holds)
            self._void = not agreed.holds
            if self._void and (dealt := await self._decide()):
                self._compute_again(dealt)
                return
        except GroupBrokenError as error:
            broke = self._ranks.now()
            await self._give_up_wrong_state(failure, error)
            await self._regroup(broke)
            return
        self._duties.carry_out(saved=saved, announced=agreed.announced)
        if agreed.holds:
            self._finite.settle(self.membership, self.iteration)
        if not self._report_finished:
            self.loss = agreed.loss
            self._gradients.publish(void=self._void)
        self._move(Move.REDUCE)

    async def _reduce_buckets(self) -> None:
        """Sum the gradient over the replicas, bucket by bucket; those that are known to be whole stay.

        Raises:
            GroupBrokenError: some could not be summed, or may be wrong.
        """
        due = [] if self._report_finished else [number for number, reduced in enumerate(self._reduced) if not reduced]
        try:
            self._gradients.begin(self.iteration, due)
            for bucket in due:
                await self._gradients.reduce(bucket)
                self._reduced[bucket] = True
            await self._replica.settle()
            await self._ranks.confirm()
        except GroupBrokenError:
            # a replica that breaks has sent on its way what it was computing, and ends with none of its last buckets
            if self._ranks.is_asynchronous or self._replica.is_sharded:
                self._reduced = [False] * self._gradients.buckets
            raise

    async def _decide(self) -> list[list[int]]:
        return await self._finite.decide(self.membership, self.iteration, self.done, self._microbatches)

    def _compute_again(self, dealt: list[list[int]]) -> None:
        """Go on with the microbatches that are dealt anew; whose they were forgets all that it has summed."""
        if any(not self.done.isdisjoint(each) for each in dealt):
            self._drop()
        self._reduced = [False] * self._gradients.buckets
        self.todo = dealt[self.seat.replica]
        self._progress(WorkerPhase.COMPUTE)

    async def _save_model(self) -> None:
        """Have the first replica save the model; where it can't, another becomes the first."""
        self._progress(WorkerPhase.WAITING)
        if self.seat.replica == 0:
            await self._states.save_model()
        await self._ranks.barrier()

    @property
    def _report_finished(self) -> bool:
        """Whether all updates are made: what may be left is to save the model."""
        return self.iteration == self._iterations

    async def _give_up_wrong_state(self, failure: GroupBrokenError | None, error: GroupBrokenError) -> None:
        """Give up what is in doubt after a reduce that failed: sums of what was computed, and maybe this state."""
        if isinstance(error, UnusableStateError):
            self._duties.reject(self.epoch, self.iteration, error)
        else:
            self._report(error)
        if Due.COMPARE in self._duties.due or self._void:
            self._reduced = [False] * self._gradients.buckets
        if isinstance(error, UnusableStateError) or (isinstance(failure, StateDivergedError) and failure.own):
            await self._states.await_saved()
            self._move(Move.GIVE_UP)
            self._drop()
            self._saved = -1
