"""Gradients by microbatch: accumulated in one flat tensor, reduced in buckets of a copy.

After a failure in the middle of a reduce the accumulated sums are still whole, and the buckets that were finished
anywhere are kept (paper section 6.2, scenario 2). Which those are, the core knows (`unicron.train.iteration`).

In the last microbatch a bucket is sent on its way as soon as the backward pass has all of it, as DDP does: the last
layers' come first. Buckets begin in the same order on every rank, whether it overlaps them or not.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b

import torch
from torch._C._distributed_c10d import Work

from unicron.errors import GroupBrokenError
from unicron.train.group import Group
from unicron.train.phases import ANNOUNCED, Due
from unicron.train.shards import as_shard_of, is_spread, local, spread_as

BUCKETS = 16
"""In how many pieces a gradient is reduced, where they are neither below `LEAST_BYTES` nor above `BUCKET_BYTES`."""

LEAST_BYTES, BUCKET_BYTES = 2 * 1024 * 1024, 25 * 1024 * 1024
LOSS = 2 + len(ANNOUNCED)
"""Elements behind those of the gradient."""


class Gradients:
    """The accumulated and the reduced gradient of all parameters, each as one flat tensor.

    Of a sharded parameter it is this rank's shard: ranks of one place have the same ones, and sum them.

    Behind it come the sum of the losses and how many there are, so that the mean loss needs no collective of its own (a
    stage of a pipeline that is not its last has none), and of each `ANNOUNCED` how many replicas have
    announced it.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], dtype: torch.dtype | None) -> None:
        self._parameters = list(parameters)[::-1]
        if not self._parameters:
            raise ValueError("the model has no parameters that require a gradient")
        first = local(self._parameters[-1])
        sizes = [local(parameter).numel() for parameter in self._parameters]
        size = sum(sizes) + LOSS
        self.shapes = blake2b(str([local(each).shape for each in self._parameters]).encode(), digest_size=8).hexdigest()
        made = _buffer(self._parameters[-1])
        dtype = dtype or (first if made is None else made).dtype
        self._accumulated = torch.zeros(size, dtype=dtype, device=first.device)
        self._reduced = torch.empty_like(self._accumulated)
        each = self._accumulated.element_size()
        step = max(1, min(max(size * each // BUCKETS, LEAST_BYTES), BUCKET_BYTES) // each)
        self._slices = [slice(start, min(start + step, size)) for start in range(0, size, step)]
        self._spread = [is_spread(parameter) for parameter in self._parameters]
        self._overlap = Overlap(self._parameters, self._take_in, [part.stop for part in self._slices])
        self._views, self._sums = (
            [
                flat[offset : offset + size].view(local(parameter).shape)
                for parameter, offset, size in zip(self._parameters, self._overlap.offsets, sizes, strict=True)
            ]
            for flat in (self._accumulated, self._reduced)
        )
        self._direct = [
            (parameter, view)
            for parameter, view in zip(self._parameters, self._views, strict=True)
            if not is_spread(parameter) and _buffer(parameter) is None and parameter.dtype == dtype
        ]
        self._midway = False

    @property
    def buckets(self) -> int:
        """In how many parts it is reduced."""
        return len(self._slices)

    def clear(self) -> None:
        """Forget what was accumulated."""
        self._accumulated.zero_()
        self._midway = False

    @contextlib.contextmanager
    def directly(self) -> Iterator[None]:
        """Have the backward pass inside add its gradients to those accumulated by itself, where it can.

        That spares a second copy of the gradient, and reading and writing it once more in each microbatch. A pass
        inside has to come to its end.

        Raises:
            RuntimeError: the one before did not.
        """
        if self._midway:
            raise RuntimeError(
                "the backward pass before ended midway, so that the sum of the gradients is not whole: let the "
                "exception end this process, and another one computes the iteration again"
            )
        self._midway = True
        for parameter, view in self._direct:
            if parameter.grad is None:
                parameter.grad = view
        yield
        self._midway = False

    @contextlib.contextmanager
    def overlapping(self, group: Group) -> Iterator[None]:
        """Have buckets begin to be reduced in the backward pass inside, which is that of the last microbatch."""
        with self._overlap.during(lambda bucket: self._begin(group, bucket)):
            yield

    def abandon(self, group: Group) -> None:
        """Give up what was begun and not waited for; its group is broken."""
        for work in self._overlap.begun.values():
            with contextlib.suppress(GroupBrokenError):
                group.finish(work)
        self._overlap.begun.clear()

    @torch.no_grad()
    def accumulate(self, loss: torch.Tensor | None) -> None:
        """Add the gradients that a backward pass has left in `p.grad`, and its loss."""
        sums, parts = list[torch.Tensor](), list[torch.Tensor]()
        for number, parameter in enumerate(self._parameters):
            if (gradient := _made(parameter)) is not None:
                if gradient is not self._views[number]:
                    sums.append(self._views[number])
                    parts.append(self._part(gradient, number))
                parameter.grad = None
        if parts:
            torch._foreach_add_(sums, parts)  # one call: of a small layer it costs more than the sum
        if loss is not None:
            self._accumulated[-LOSS] += loss.reshape(())
            self._accumulated[1 - LOSS] += 1

    @torch.no_grad()
    def _take_in(self, number: int) -> None:
        gradient = _made(self._parameters[number])
        if gradient is not None and gradient is not self._views[number]:
            self._views[number] += self._part(gradient, number)
            self._parameters[number].grad = None

    def _part(self, gradient: torch.Tensor, number: int) -> torch.Tensor:
        """Return what this rank holds of a gradient."""
        if not self._spread[number]:
            return gradient.reshape(self._views[number].shape)
        return local(spread_as(gradient, self._parameters[number])).reshape(self._views[number].shape)

    def discard(self) -> None:
        """Drop the gradients that a backward pass has left in `p.grad`."""
        for parameter in self._parameters:
            parameter.grad = None

    def reduce(self, group: Group, bucket: int) -> None:
        """Sum a bucket over the replicas.

        Raises:
            GroupBrokenError: the group broke; what was accumulated stays.
        """
        work = self._overlap.begun.pop(bucket, None) or self._begin(group, bucket)
        if work is not None:
            group.finish(work)

    def _begin(self, group: Group, bucket: int) -> Work | None:
        part = self._slices[bucket]
        self._reduced[part] = self._accumulated[part]
        return group.begin_all_reduce(self._reduced[part])

    def share(self, group: Group, bucket: int, replica: int) -> None:
        """Give a bucket that `replica` has reduced to all replicas.

        Raises:
            GroupBrokenError: the group broke.
        """
        group.broadcast(self._reduced[self._slices[bucket]], replica)

    def loss(self) -> float:
        """Return the mean loss over the global batch; NaN where this rank has none."""
        total, count, *_ = self._reduced[-LOSS:].tolist()
        return total / count if count else math.nan

    def summed_of(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return what was reduced of a parameter's gradient: the sum over the microbatches."""
        return next(each for own, each in zip(self._parameters, self._sums, strict=True) if own is parameter)

    @property
    def finite(self) -> bool:
        """Whether what was reduced is."""
        return bool(_is_finite(self._reduced))

    @property
    def summed(self) -> torch.Tensor:
        """Whether what was accumulated is finite; only who asks the tensor for its value waits for a GPU."""
        return _is_finite(self._accumulated)

    def announce(self, due: Due) -> None:
        """Have all replicas know, after the reduce, what one of them says is due."""
        self._accumulated[ANNOUNCED.index(due) - len(ANNOUNCED)] = 1

    @property
    def announced(self) -> frozenset[Due]:
        """What any of them said."""
        told = self._reduced[-len(ANNOUNCED) :].tolist()
        return frozenset(due for due, count in zip(ANNOUNCED, told, strict=True) if count > 0)

    @torch.no_grad()
    def publish(self, microbatches: int, *, void: bool = False) -> None:
        """Put the mean over the global batch into each `p.grad`; zeros where it is void."""
        means = torch._foreach_div(self._sums, microbatches)  # noqa: SLF001 as optimizers do
        for parameter, mean in zip(self._parameters, means, strict=True):
            if void:
                mean.zero_()
            if (buffer := _buffer(parameter)) is None:
                parameter.grad = as_shard_of(mean.to(parameter.dtype), parameter)
            else:
                buffer.copy_(mean)


def _is_finite(values: torch.Tensor) -> torch.Tensor:
    """Return whether all are: then the least and the greatest are, found as fast as a sum, in no memory of its own."""
    return torch.stack(torch.aminmax(values)).isfinite().all()


def _buffer(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """Return where a model adds its gradients up itself: `main_grad`, as megatron-core and Transformer Engine do.

    Who runs its passes empties it before each microbatch.
    """
    return getattr(parameter, "main_grad", None)


def _made(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    buffer = _buffer(parameter)
    return parameter.grad if buffer is None else buffer


class Overlap:
    """Which parts of the gradient a backward pass has made already, and what was begun with them.

    Args:
        parameters: in the order of the flat gradient.
        take_in: adds the gradient of a parameter to those accumulated, by its number.
        ends: of the buckets, in the flat gradient.

    Attributes:
        offsets: of each parameter in the flat gradient.
        begun: reduces of buckets that are under way.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        take_in: Callable[[int], None],
        ends: Sequence[int],
    ) -> None:
        self._take_in, self._ends = take_in, ends
        self.begun: dict[int, Work] = {}
        self.offsets: list[int] = []
        self._begin: Callable[[int], Work | None] | None = None
        self._made: list[int] = []
        self._ready, self._next = 0, 0
        self._fit, self._looked = not any(map(is_spread, parameters)), False
        offset = 0
        for number, parameter in enumerate(parameters):
            self.offsets.append(offset)
            offset += local(parameter).numel()
            if self._fit:
                hook = functools.partial(self._has_made, number)
                required = parameter.requires_grad  # one that is frozen just now takes no hook
                parameter.requires_grad_()
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                parameter.requires_grad_(required)

    @contextlib.contextmanager
    def during(self, begin: Callable[[int], Work | None]) -> Iterator[None]:
        """Call `begin` for each bucket that the backward pass inside completes, in order; the first pass only looks.

        A pass that makes some gradient twice, as checkpointing can, is nothing to overlap with.
        """
        self._made, self._ready, self._next = [0] * len(self.offsets), 0, 0
        self._begin = begin if self._fit and self._looked else None
        try:
            yield
        finally:
            self._begin, self._looked = None, True
            self._fit = self._fit and max(self._made) <= 1

    def _has_made(self, number: int, parameter: torch.nn.Parameter) -> None:
        if self._made:
            self._made[number] += 1
        if self._begin is None:
            return
        if self._next and self._made[number] > 1 and self.offsets[number] < self._ends[self._next - 1]:
            raise RuntimeError(
                f"the backward pass made the gradient of a parameter of shape {tuple(parameter.shape)} twice, which it "
                "did not in the first iteration: use checkpoint(..., use_reentrant=False)"
            )
        self._take_in(number)
        while self._ready < len(self._made) and self._made[self._ready]:
            self._ready += 1
        whole = self.offsets[self._ready] if self._ready < len(self._made) else self._ends[-1] - LOSS
        while self._next < len(self._ends) and self._ends[self._next] <= whole:
            try:
                work = self._begin(self._next)
            except GroupBrokenError:  # whoever waits for it is told
                self._begin = None
                return
            if work is None:
                self._begin = None
                return
            self.begun[self._next] = work
            self._next += 1
