"""`Session`: what a training script calls so that it survives faults.

The script keeps its own loop:

    session = Session()
    session.protect(model=model, optimizer=optimizer)
    for iteration in session.iterations():
        for microbatch in session.microbatches():
            session.backward(loss_of(model, batch(iteration, microbatch)))
        session.step()

All communication happens inside `microbatches()`: after the last microbatch it reduces the gradients, and when that
or anything before it is interrupted by a fault it regroups and hands the loop further microbatches, those of the lost
rank. So an iteration is finished by whoever is left, exactly once.
"""

import os
import time
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import msgspec
import torch

from unicron.contracts.states import StateRef
from unicron.contracts.tasks import WorkerPhase
from unicron.contracts.worker import Broken, Finished, Iterated, Joined, Membership, Progress, Ready
from unicron.errors import StateTransferError
from unicron.train import channel as channels
from unicron.train import redistribute, state
from unicron.train.gradients import Gradients
from unicron.train.group import Group
from unicron.train.timing import BACKWARD, FORWARD, GC, OPTIMIZER, REDUCE, PlannedCollection, Recorder


class Session:
    """One worker's part in a data-parallel task.

    Args:
        seed: of the task; before each microbatch torch's generators are seeded from (seed, iteration, microbatch), so
            that a microbatch is the same whoever computes it.
        accumulate_dtype: in which gradients are accumulated and reduced; None means that of the parameters. With
            float64 the order of summation, and so the number of workers, makes no visible difference.
        iterations: optimizer steps in all; the task file decides where the script runs in a cluster.
        microbatches: microbatches of a global batch; likewise.
        gc_every: collect Python's garbage in every n-th iteration, on all ranks in the same, and at no other
            time; 0 leaves Python's own collection as it is. The environment variable UNICRON_GC_EVERY goes over it.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        accumulate_dtype: torch.dtype | None = None,
        iterations: int = 1,
        microbatches: int = 1,
        gc_every: int = 0,
    ) -> None:
        self.seed = seed
        self.total = int(os.environ.get("UNICRON_ITERATIONS", iterations))
        self.per_iteration = int(os.environ.get("UNICRON_MICROBATCHES", microbatches))
        self.iteration = 0
        self.loss = float("nan")
        self._dtype = accumulate_dtype
        self._collection = PlannedCollection(os.environ.get("UNICRON_GC_EVERY", gc_every))
        self._channel = channels.connect()
        self._protected: dict[str, Any] = {}
        self._todo: list[int] = []
        self._done: set[int] = set()
        self._open = False
        self._behind = False
        self._has_state = self._channel is None
        self._pending: dict[str, Any] | None = None

    @property
    def rank(self) -> int:
        """Rank in the current membership; it may change from one microbatch to the next."""
        return self._group.rank

    @property
    def world_size(self) -> int:
        """Workers in the current membership."""
        return self._group.world_size

    def protect(self, *, model: torch.nn.Module, optimizer: torch.optim.Optimizer, **others: Any) -> None:
        """Name what makes up the state: the model, the optimizer, and whatever else has a `state_dict`.

        Raises:
            TypeError: something has no `state_dict` and `load_state_dict`.
        """
        self._protected = {"model": model, "optimizer": optimizer, **others}
        for name, thing in self._protected.items():
            if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                raise TypeError(f"protect({name}=...): {type(thing).__name__} has no state_dict and load_state_dict")
        self._gradients = Gradients(model.parameters(), self._dtype)
        device = next(model.parameters()).device
        self._group, self._recorder = Group(device), Recorder(device)
        if self._channel is not None:
            self._channel.interrupt = self._group.abort_below

    def iterations(self) -> Iterator[int]:
        """Yield the number of each iteration to compute; the first after a restart is the one that others are in."""
        if not self._protected:
            raise RuntimeError("call session.protect(model=..., optimizer=...) before session.iterations()")
        if self._channel is not None:
            self._channel.ready = True
            self._channel.send(Ready())
            self._regroup(time.monotonic())
        self._collection.take_over()
        while self.iteration < self.total:
            if self._pending is not None:
                state.apply(self._pending, self._protected)
                self._pending, self._behind = None, False
            self._began = time.monotonic()
            yield self.iteration
            if self._open and not self._behind:
                raise RuntimeError(f"iteration {self.iteration} ended without session.step()")
        self._collection.hand_back()
        if self._channel is not None:
            self._group.leave()
            self._channel.send(Finished(iterations=self.total))

    def microbatches(self) -> Iterator[int]:
        """Yield the microbatches that this rank computes in this iteration, then reduce the gradients.

        When it ends, every `p.grad` holds the mean gradient over the global batch and `loss` the mean loss.
        """
        if not self._open:
            self._start_iteration()
        while not self._behind:
            if self._newer():
                self._regroup(time.monotonic())
            elif self._todo:
                yield self._begin(self._todo[0])
            elif self._reduce():
                self._recorder.start(OPTIMIZER)  # what the script does until then, such as clipping, counts to it
                self.loss = self._gradients.publish(self.per_iteration)
                return

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass of the current microbatch and add its gradients to the accumulated ones."""
        self._recorder.start(BACKWARD, self._todo[0])
        loss.backward()  # type: ignore[no-untyped-call]
        self._gradients.accumulate(loss)
        self._recorder.stop()
        self._done.add(self._todo.pop(0))
        self._progress(WorkerPhase.COMPUTE)

    def step(self) -> None:
        """Update the parameters. Does nothing where this rank fell behind and is about to take a newer state."""
        if self._behind:
            return
        self._progress(WorkerPhase.STEP)
        optimizer = self._protected["optimizer"]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self._recorder.stop()
        self.iteration += 1
        self._open = False
        if self._channel is not None:
            self._channel.iteration = self.iteration
            self._channel.send(
                Iterated(
                    iteration=self.iteration - 1,
                    epoch=self._group.epoch,
                    rank=self.rank,
                    world_size=self.world_size,
                    seconds=time.monotonic() - self._began,
                    loss=self.loss,
                )
            )
            if timed := self._recorder.end(self.iteration - 1, self._group.epoch, self.rank, self.world_size):
                self._channel.send(timed)

    # --- within an iteration -----------------------------------------------------------------------------------------

    def _start_iteration(self) -> None:
        self._gradients.start()
        self._open = True
        self._done = set()
        self._todo = list(range(self.rank, self.per_iteration, self.world_size))
        self._recorder.begin(self.iteration, self._channel.period if self._channel else 0)
        self._progress(WorkerPhase.COMPUTE)

    def _begin(self, microbatch: int) -> int:
        text = f"{self.seed}:{self.iteration}:{microbatch}".encode()
        self._recorder.start(FORWARD, microbatch)
        torch.manual_seed(int.from_bytes(blake2b(text, digest_size=7).digest()))
        return microbatch

    def _reduce(self) -> bool:
        """Return whether the reduce went through; if not, the membership is a new one."""
        if self._collection.due(self.iteration):
            self._recorder.start(GC)  # before the reduce: ranks that wait there anyway lose no time by it
            self._collection.collect(self.iteration)
        self._progress(WorkerPhase.REDUCE)
        self._recorder.start(REDUCE)
        try:
            self._gradients.reduce(self._group)
        except RuntimeError as error:
            broke = time.monotonic()
            self._report_broken(error)
            self._regroup(broke)
            return False
        return True

    def _newer(self) -> bool:
        return self._channel is not None and self._channel.newest.epoch > self._group.epoch

    def _progress(self, phase: WorkerPhase) -> None:
        if self._channel is not None:
            self._channel.send(Progress(iteration=self.iteration, phase=phase, done=len(self._done)))

    def _report_broken(self, error: RuntimeError) -> None:
        if self._channel is not None and not self._newer():
            text = str(error).partition("\n")[0][:300]
            self._channel.send(Broken(epoch=self._group.epoch, iteration=self.iteration, error=text))

    # --- a new membership --------------------------------------------------------------------------------------------

    def _regroup(self, broke: float) -> None:
        """Wait for a newer membership and go on in it, however many it takes. `broke`: monotonic seconds."""
        channel = self._channel
        self._recorder.drop()
        if channel is None:
            raise RuntimeError("a collective failed outside a cluster")
        while True:
            self._progress(WorkerPhase.WAITING)
            membership = channel.await_membership(self._group.epoch)
            try:
                joined = self._join(membership)
            except RuntimeError as error:
                self._report_broken(error)
                continue
            channel.epoch, channel.iteration = membership.epoch, joined.iteration
            channel.send(msgspec.structs.replace(joined, seconds=time.monotonic() - broke))
            self._progress(WorkerPhase.COMPUTE)
            return

    def _join(self, membership: Membership) -> Joined:
        """Form the group, tell each other what everybody has, and take over what is missing.

        Raises:
            RuntimeError: interrupted, or a peer was lost.
        """
        rank, world_size = membership.rank, membership.world_size
        self._group.form(membership.rendezvous, membership.rendezvous_id, membership.epoch, rank, world_size)
        node = int.from_bytes(blake2b(membership.member.node.encode(), digest_size=7).digest())
        rows = self._group.all_gather(self._progress_row(node))
        count = len(self._gradients.finished)
        progress = [_progress_of(row, self.per_iteration, count) for row in rows]
        plan = redistribute.resume(progress, self.per_iteration, [int(row[0]) for row in rows])
        state_from = self._exchange_states(plan, membership)
        if plan.stale[rank]:
            self._gradients.start()
            self._done = set()
        self._gradients.share(self._group, plan.bucket_from)
        self._todo, self._has_state, self._open = list(plan.todo[rank]), True, True
        return Joined(
            epoch=membership.epoch,
            rank=rank,
            world_size=world_size,
            iteration=plan.iteration,
            kept=plan.kept,
            recomputed=plan.recomputed,
            state_from=state_from,
            seconds=0.0,
        )

    def _progress_row(self, node: int) -> torch.Tensor:
        marks = [0] * self.per_iteration
        for microbatch in self._todo:
            marks[microbatch] = 1
        for microbatch in self._done:
            marks[microbatch] = 2
        return torch.tensor([node, self.iteration, int(self._has_state), *marks, *map(int, self._gradients.finished)])

    def _exchange_states(self, plan: redistribute.Resumption, membership: Membership) -> str:
        """Hand the state to the ranks that lack it, nearest holder first; return the worker whose this rank took."""
        rank, taken = self.rank, ""
        missing = {r for r, sources in enumerate(plan.sources) if sources}
        for attempt in range(max((len(sources) for sources in plan.sources), default=0)):
            if not missing:
                break
            givers = {plan.sources[needer][attempt] for needer in missing}
            given: StateRef | None = None
            if rank in givers:
                self._progress(WorkerPhase.WAITING)
                place = membership.layout.seat(rank).place
                given = state.export(
                    membership.member, membership.epoch, place, self.iteration, self._protected, self._pending
                )
                self._group.tell(f"holder-{rank}", msgspec.msgpack.encode(given))
            got = False
            if rank in missing:
                told = self._group.ask(f"holder-{plan.sources[rank][attempt]}")
                ref = msgspec.msgpack.decode(told, type=StateRef)
                got = self._take_state(ref, plan.iteration, membership.epoch)
                taken = ref.location.worker if got else ""
            rows = self._group.all_gather(torch.tensor([int(rank not in missing or got)]))
            missing = {r for r in missing if not rows[r].item()}
            if given is not None:
                state.path_of(given.location).unlink(missing_ok=True)
        if missing:
            raise StateTransferError(f"no holder could hand its state to ranks {sorted(missing)}")
        return taken

    def _take_state(self, ref: StateRef, iteration: int, epoch: int) -> bool:
        if self._channel is None:
            return False
        found = state.fetch(self._channel, ref, epoch)
        if found is None or found["iteration"] != iteration:
            return False
        self._pending = found
        # the script is still inside an older iteration: it must come out of it before the state may change
        self._behind = self._behind or self._open
        self._gradients.start()
        self._done, self._todo, self.iteration, self._has_state = set(), [], iteration, True
        return True


def _progress_of(row: torch.Tensor, microbatches: int, buckets: int) -> redistribute.Progress:
    _, iteration, has_state, *marks = (int(number) for number in row)
    return redistribute.Progress(
        iteration=iteration,
        has_state=bool(has_state),
        done=frozenset(index for index, mark in enumerate(marks[:microbatches]) if mark == 2),
        todo=tuple(index for index, mark in enumerate(marks[:microbatches]) if mark == 1),
        buckets=tuple(bool(mark) for mark in marks[microbatches : microbatches + buckets]),
    )
