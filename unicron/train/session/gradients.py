"""Gradients by microbatch: accumulated in one flat tensor, reduced in buckets of a copy.

After a failure in the middle of a reduce the accumulated sums are still whole, and the buckets that were finished
anywhere are kept (paper section 6.2, scenario 2). Which those are, the core knows (`unicron.train.worker.iteration`).

In the last microbatch a bucket is sent on its way as soon as the backward pass has all of it, as DDP does: the last
layers' come first. Buckets begin in the same order on every rank, whether it overlaps them or not.
"""

import contextlib
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from unicron.errors import GroupBrokenError
from unicron.train.groups import nccl
from unicron.train.session.overlap import Overlap
from unicron.train.session.ranks import TorchRanks
from unicron.train.snapshots.shards import as_shard_of, is_sharded, local, redistribute_like
from unicron.train.worker.phases import ANNOUNCED, Due, ReducedValues
from unicron.train.worker.timing import GC, OPTIMIZER, REDUCE, PlannedCollection

BUCKETS = 16
"""In how many pieces a gradient is reduced, where they are neither below `LEAST_BYTES` nor above `BUCKET_BYTES`."""

LEAST_BYTES, BUCKET_BYTES = 2 * 1024 * 1024, 25 * 1024 * 1024
LOSS = 2 + len(ANNOUNCED)
"""Elements behind those of the gradient."""


class TorchGradients:
    """The accumulated and the reduced gradient of all parameters, each as one flat tensor.

    See `unicron.train.worker.shell.Gradients`. Its calls block, and none suspends.

    Of a sharded parameter it is this rank's shard: ranks of one place have the same ones, and sum them.

    Behind it come the sum of the losses and how many there are, so that the mean loss needs no collective of its own (a
    stage of a pipeline that is not its last has none), and of each `ANNOUNCED` how many replicas have
    announced it.

    Args:
        ranks: that sum them.
        dtype: of the sums; None means that of the parameters.
        microbatches: of a global batch.
        collection: of garbage.

    Attributes:
        shapes: of the parameters, as a digest.
        loss: of the microbatch just computed; None where this rank has none.
    """

    def __init__(
        self, ranks: TorchRanks, dtype: torch.dtype | None, microbatches: int, collection: PlannedCollection
    ) -> None:
        self.loss: torch.Tensor | None = None
        self._ranks, self._dtype = ranks, dtype
        self._microbatches, self._collection = microbatches, collection
        self._optimizer: torch.optim.Optimizer | None = None
        self._active: dict[int, Work] = {}
        self._enqueued: deque[Any] = deque()
        self._in_backward = False

    def prepare(
        self,
        parameters: Iterable[torch.nn.Parameter],
        optimizer: torch.optim.Optimizer | None = None,
        *,
        divided_first: Iterable[torch.nn.Parameter] = (),
    ) -> None:
        """Take the parameters whose gradients they are.

        Args:
            parameters: all that there are.
            optimizer: makes the updates. What is published for it are parts of the reduced gradient, for as long as
                nothing else is reduced. None: the script makes them, and each parameter gets a tensor of its own.
            divided_first: those whose gradients are divided before they are summed, as DistributedDataParallel does, as
                the mean is rounded otherwise. Each rank then computes one microbatch.

        Raises:
            ValueError: there are none.
        """
        self._optimizer = optimizer
        self._parameters = list(parameters)[::-1]
        if not self._parameters:
            raise ValueError("the model has no parameters that require a gradient")
        first = local(self._parameters[-1])
        sizes = [_as_real(local(parameter)).numel() for parameter in self._parameters]
        size = sum(sizes) + LOSS
        self.shapes = blake2b(str([local(each).shape for each in self._parameters]).encode(), digest_size=8).hexdigest()
        made = _buffer(self._parameters[-1])
        dtype = self._dtype or _as_real(first if made is None else made).dtype
        self._accumulated = torch.zeros(size, dtype=dtype, device=first.device)
        self._reduced = torch.empty_like(self._accumulated)
        each = self._accumulated.element_size()
        step = max(1, min(max(size * each // BUCKETS, LEAST_BYTES), BUCKET_BYTES) // each)
        self._slices = [slice(start, min(start + step, size)) for start in range(0, size, step)]
        self._spread = [is_sharded(parameter) for parameter in self._parameters]
        before = {id(each) for each in divided_first}
        self._divided_first = [id(parameter) in before for parameter in self._parameters]
        self._divisors = [1.0 if first else float(self._microbatches) for first in self._divided_first]
        self._ends = list(accumulate(sizes))
        shapes = [_as_real(local(parameter)).shape for parameter in self._parameters]
        places = list(zip([0, *self._ends], self._ends, shapes, strict=False))
        # what a backward pass adds to counts for itself how often it was written to
        self._views = [self._accumulated[begin:end].view(shape).data for begin, end, shape in places]
        self._sums = [self._reduced[begin:end].view(shape) for begin, end, shape in places]
        self._buffered = any(_buffer(parameter) is not None for parameter in self._parameters)
        self._direct = [
            (parameter, view)
            for parameter, view in zip(self._parameters, self._views, strict=True)
            if not is_sharded(parameter) and _buffer(parameter) is None and parameter.dtype == dtype
        ]
        whole = [part for part in self._slices if part.stop <= self._ends[-1] and not self._buffered]
        counts = [bisect_left(self._ends, part.stop) + 1 for part in whole]
        self._pieces = [
            [
                (number, slice(max(part.start, begin), min(part.stop, end)), begin)
                for number, (begin, end, _) in enumerate(places[:count])
                if end > part.start
            ]
            for part, count in zip(whole, counts, strict=True)
        ]
        self._overlap = Overlap(self._parameters, counts)

    @property
    def buckets(self) -> int:
        """In how many parts it is reduced."""
        return len(self._slices)

    def clear(self) -> None:
        """Forget what was accumulated."""
        self._accumulated.zero_()
        self._in_backward = False

    @contextlib.contextmanager
    def directly(self) -> Iterator[None]:
        """Have the backward pass inside add its gradients to those accumulated by itself, where it can.

        That spares a second copy of the gradient, and reading and writing it once more in each microbatch. A pass
        inside has to come to its end.

        Raises:
            RuntimeError: the one before did not.
        """
        if self._in_backward:
            raise RuntimeError(
                "the backward pass before ended midway, so that the sum of the gradients is not whole: let the "
                "exception end this process, and another one computes the iteration again"
            )
        self._in_backward = True
        for parameter, view in self._direct:
            if parameter.grad is None:
                parameter.grad = view
        yield
        self._in_backward = False

    @contextlib.contextmanager
    def backward(self, *, begins: bool) -> Iterator[None]:
        """Have a backward pass run inside, which begins to reduce what it has made where `begins` says so.

        Ranks of a replica of several first agree that none of what they computed is noise: only then it is added up.
        """
        shape = self._ranks.membership.shape
        overlap = self.overlapping() if begins and shape.replicas > 1 else contextlib.nullcontext()
        with contextlib.nullcontext() if shape.replica_workers > 1 else self.directly(), overlap:
            yield

    @contextlib.contextmanager
    def overlapping(self) -> Iterator[None]:
        """Have buckets begin to be reduced in the backward pass inside, which is that of the last microbatch.

        What is accumulated stays as it is: if what this pass makes turns out to be noise it is discarded, and so are
        the buckets.
        """
        with self._overlap.during(self._begin_in_backward):
            yield

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add the gradients that a backward pass has left in `p.grad`, and its loss."""
        only, added = list[tuple[torch.Tensor, torch.Tensor]](), list[tuple[torch.Tensor, torch.Tensor]]()
        for number, (parameter, view) in enumerate(zip(self._parameters, self._views, strict=True)):
            gradient = _gradient_of(parameter) if self._buffered else parameter.grad
            if gradient is not None:
                if self._divided_first[number]:
                    gradient.mul_(1 / self._microbatches)  # of few bits torch._foreach_mul_ would round the factor, too
                if gradient is not view:
                    part = self._local_part(gradient, number)
                    (only if self._divided_first[number] else added).append((view, part))
                parameter.grad = None
        if only:  # the sum of zero and -0.0 would be another zero, and so would the update's
            torch._foreach_copy_([view for view, _ in only], [part for _, part in only])
        if added:  # one call: of a small layer it costs more than the sum
            torch._foreach_add_([view for view, _ in added], [part for _, part in added])
        if self.loss is not None:
            self._accumulated[-LOSS] += self.loss.reshape(())
            self._accumulated[1 - LOSS] += 1
        if self._ranks.is_asynchronous:
            self._enqueued.append(nccl.record_event())

    def _local_part(self, gradient: torch.Tensor, number: int) -> torch.Tensor:
        """Return what this rank holds of a gradient."""
        if not self._spread[number]:
            return _as_real(_as_dense(gradient)).reshape(self._views[number].shape)
        return local(redistribute_like(gradient, self._parameters[number])).reshape(self._views[number].shape)

    def discard(self) -> None:
        """Drop the gradients that a backward pass has left in `p.grad`."""
        for parameter in self._parameters:
            parameter.grad = None

    async def keep_pace(self, behind: int) -> None:
        """Wait for the oldest: a GPU that is far behind would look like a rank that hangs in what comes then."""
        while len(self._enqueued) > behind:
            nccl.await_event(self._enqueued.popleft(), lambda: self._ranks.is_cut)

    def begin(self, iteration: int, buckets: Sequence[int]) -> None:
        """Begin to sum buckets over the replicas, unless a backward pass has; what was accumulated stays.

        Garbage is collected before: ranks that wait there anyway lose no time.
        """
        if self._collection.due(iteration):
            self._ranks.recorder.start(GC)
            self._collection.collect(iteration)
        self._ranks.recorder.start(REDUCE)
        for bucket in buckets:
            if bucket not in self._active:
                self._begin(bucket)

    async def reduce(self, bucket: int) -> None:
        """Wait for the sum of a bucket; what was accumulated stays."""
        if work := self._active.pop(bucket, None):
            self._ranks.group.finish(work)

    def abandon(self) -> None:
        """Give up what was begun and not waited for."""
        for work in self._active.values():
            with contextlib.suppress(GroupBrokenError):
                self._ranks.group.finish(work)
        self._active.clear()

    def _begin(self, bucket: int) -> Work | None:
        part = self._slices[bucket]
        self._reduced[part] = self._accumulated[part]
        return self._send(bucket)

    @torch.no_grad()
    def _begin_in_backward(self, bucket: int) -> Work | None:
        """Begin a bucket of which a backward pass has made all; None where that can't be done, or nobody else is."""
        sums, parts = list[torch.Tensor](), list[torch.Tensor]()
        for number, piece, begin in self._pieces[bucket]:
            parameter: Any = self._parameters[number]
            if parameter.grad is self._views[number]:
                continue
            if self._spread[number] and parameter.grad.placements != parameter.placements:
                return None  # ranks would have to spread it here, each in its own order
            sums.append(self._reduced[piece])
            flat = _as_real(_as_dense(local(parameter.grad))).reshape(-1)
            parts.append(flat[piece.start - begin : piece.stop - begin])
        part = self._slices[bucket]
        self._reduced[part] = self._accumulated[part]
        if parts:
            torch._foreach_add_(sums, parts)
        return self._send(bucket)

    def _send(self, bucket: int) -> Work | None:
        work = self._ranks.group.begin_all_reduce(self._reduced[self._slices[bucket]])
        if work is not None:
            self._active[bucket] = work
        return work

    async def share(self, bucket: int, replica: int) -> None:
        """Give a bucket that `replica` has reduced to all replicas."""
        self._ranks.group.broadcast(self._reduced[self._slices[bucket]], replica)

    @property
    def outcome(self) -> ReducedValues:
        """The values that were reduced besides gradients; they are read in one go, which waits for the GPU."""
        total, count, *said = self._reduced[-LOSS:].tolist()
        announced = frozenset(due for due, replicas in zip(ANNOUNCED, said, strict=True) if replicas > 0)
        return ReducedValues(total / count if count else math.nan, announced)

    def sum_of(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return what was reduced of a parameter's gradient: the sum over the microbatches."""
        return next(each for own, each in zip(self._parameters, self._sums, strict=True) if own is parameter)

    @property
    def sums(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What was accumulated here and what was reduced; they stay until the next iteration, but for announcements."""
        return self._accumulated, self._reduced

    def take_reduced(self, reduced: torch.Tensor) -> None:
        """Take what was reduced elsewhere as if it had been here."""
        self._reduced.copy_(reduced)

    def first_difference(self, accumulated: torch.Tensor, names: Mapping[int, str], rounding: float) -> str:
        """Return whose part differs first between what is accumulated here and elsewhere; empty where none does.

        Args:
            accumulated: elsewhere.
            names: of the parameters, by identity.
            rounding: how far numbers may be apart, in relation to the largest of the same parameter.
        """
        ours, theirs = self._accumulated[: -len(ANNOUNCED)], accumulated[: -len(ANNOUNCED)].to(self._accumulated.device)
        owners = [f"the gradient of {names.get(id(each), 'what goes along')}" for each in self._parameters]
        parts = zip([*owners, "the loss"], pairwise([0, *self._ends, len(ours)]), strict=True)
        differ = [owner for owner, (begin, end) in parts if not are_close(ours[begin:end], theirs[begin:end], rounding)]
        return differ[-2 if len(differ) > 1 and differ[-1] == "the loss" else -1] if differ else ""

    @property
    def finite(self) -> bool:
        """Whether what was reduced is."""
        return bool(_is_finite(self._reduced))

    @property
    def is_sum_finite(self) -> torch.Tensor:
        """Whether what was accumulated is finite; only who asks the tensor for its value waits for a GPU."""
        return _is_finite(self._accumulated)

    def announce(self, due: Due) -> None:
        """Have all replicas know, after the reduce, what one of them says is due."""
        self._accumulated[ANNOUNCED.index(due) - len(ANNOUNCED)] = 1

    @torch.no_grad()
    def publish(self, *, void: bool = False) -> None:
        """Put the mean over the global batch into each `p.grad`; zeros where it is void."""
        self._ranks.recorder.start(OPTIMIZER)  # what the script does until the update, such as clipping, counts to it
        if self._optimizer is not None:
            means, _ = self._sums, self._reduced[:-LOSS].div_(self._microbatches)
        else:
            means = list(torch._foreach_div(self._sums, self._divisors))  # noqa: SLF001 as optimizers do
        for parameter, mean in zip(self._parameters, means, strict=True):
            if void:
                mean.zero_()
            if (buffer := _buffer(parameter)) is None:
                real = mean.to(parameter.dtype.to_real())
                made = torch.view_as_complex(real) if parameter.is_complex() else real
                own = made if self._optimizer is not None or is_sharded(parameter) else _laid_out_like(made, parameter)
                parameter.grad = as_shard_of(own, parameter)
            else:
                buffer.copy_(mean)

    def update(self, *, void: bool = False) -> None:
        """Step the optimizer, unless the gradient is void; where the script makes the updates, leave it to that."""
        if self._optimizer is None:
            return
        if not void:
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._ranks.recorder.stop()


def _laid_out_like(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a gradient with its numbers in memory as its parameter's are: sums over them are rounded by that."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, requires_grad=False).copy_(gradient)


def _is_finite(values: torch.Tensor) -> torch.Tensor:
    """Return whether all are: then the least and the greatest are, found as fast as a sum, in no memory of its own."""
    return torch.stack(torch.aminmax(values)).isfinite().all()


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of complex numbers as one of pairs, and any other as it is."""
    return torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor


def _as_dense(gradient: torch.Tensor) -> torch.Tensor:
    if gradient.layout == torch.sparse_coo:
        gradient = gradient.coalesce()  # adds up in the order of gloo, which does the same
    return gradient if gradient.layout == torch.strided else gradient.to_dense()


def are_close(one: torch.Tensor, other: torch.Tensor, rounding: float) -> bool:
    """Return whether all numbers are the same, or as good as that; what is no number is equal to what is none."""
    if torch.equal(one.nan_to_num(), other.nan_to_num()):
        return True
    if not rounding or not torch.equal(one.isfinite(), other.isfinite()):
        return False
    mine, theirs = one.nan_to_num(0.0, 0.0, 0.0), other.nan_to_num(0.0, 0.0, 0.0)
    return bool((mine - theirs).abs().max() <= rounding * torch.maximum(mine.abs().max(), theirs.abs().max()))


def _buffer(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """Return where a model adds its gradients up itself: `main_grad`, as megatron-core and Transformer Engine do.

    The code that runs its passes empties it before each microbatch.
    """
    return getattr(parameter, "main_grad", None)


def _gradient_of(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    buffer = _buffer(parameter)
    return parameter.grad if buffer is None else buffer
