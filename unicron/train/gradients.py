"""Gradients by microbatch: accumulated apart from `p.grad`, reduced in buckets, never in place.

After a failure in the middle of a reduce the accumulated sums are still whole, and the buckets that were finished
anywhere are kept (paper section 6.2, scenario 2). Which those are, the core knows (`unicron.train.iteration`).
"""

import math
from collections.abc import Iterable
from hashlib import blake2b

import torch

from unicron.train.group import Group
from unicron.train.shards import as_shard_of, local, spread_as

BUCKET_BYTES = 25 * 1024 * 1024
LOSS = 2


class Gradients:
    """The accumulated and the reduced gradient of all parameters, each as one flat tensor.

    Of a sharded parameter it is this rank's shard: ranks of one place have the same ones, and sum them.

    The last two elements are the sum of the losses, and how many there are, so that the mean loss needs no collective
    of its own; a stage of a pipeline that is not its last has none.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], dtype: torch.dtype | None) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        if not self._parameters:
            raise ValueError("the model has no parameters that require a gradient")
        first = local(self._parameters[0])
        sizes = [local(parameter).numel() for parameter in self._parameters]
        size = sum(sizes) + LOSS
        self.shapes = blake2b(str([local(each).shape for each in self._parameters]).encode(), digest_size=8).hexdigest()
        self._accumulated = torch.zeros(size, dtype=dtype or first.dtype, device=first.device)
        self._reduced = torch.empty_like(self._accumulated)
        step = max(1, BUCKET_BYTES // self._accumulated.element_size())
        self._slices = [slice(start, min(start + step, size)) for start in range(0, size, step)]

    @property
    def buckets(self) -> int:
        """In how many parts it is reduced."""
        return len(self._slices)

    def clear(self) -> None:
        """Forget what was accumulated."""
        self._accumulated.zero_()

    def accumulate(self, loss: torch.Tensor | None) -> None:
        """Add the gradients that a backward pass has left in `p.grad`, and its loss."""
        offset = 0
        for parameter in self._parameters:
            gradient, end = parameter.grad, offset + local(parameter).numel()
            if gradient is not None:
                self._accumulated[offset:end] += local(spread_as(gradient, parameter)).reshape(-1)
                parameter.grad = None
            offset = end
        if loss is not None:
            self._accumulated[-LOSS] += loss.detach()
            self._accumulated[-1] += 1

    def discard(self) -> None:
        """Drop the gradients that a backward pass has left in `p.grad`."""
        for parameter in self._parameters:
            parameter.grad = None

    def reduce(self, group: Group, bucket: int) -> None:
        """Sum a bucket over the replicas.

        Raises:
            GroupBrokenError: the group broke; what was accumulated stays.
        """
        part = self._slices[bucket]
        self._reduced[part] = self._accumulated[part]
        group.all_reduce(self._reduced[part])

    def share(self, group: Group, bucket: int, replica: int) -> None:
        """Give a bucket that `replica` has reduced to all replicas.

        Raises:
            GroupBrokenError: the group broke.
        """
        group.broadcast(self._reduced[self._slices[bucket]], replica)

    def loss(self) -> float:
        """Return the mean loss over the global batch; NaN where this rank has none."""
        total, count = self._reduced[-LOSS:].tolist()
        return total / count if count else math.nan

    def publish(self, microbatches: int) -> None:
        """Put the mean over the global batch into each `p.grad`."""
        offset = 0
        for parameter in self._parameters:
            shard = local(parameter)
            end = offset + shard.numel()
            mean = (self._reduced[offset:end] / microbatches).reshape(shard.shape).to(shard.dtype)
            parameter.grad = as_shard_of(mean, parameter)
            offset = end
