"""Gradients by microbatch: accumulated apart from `p.grad`, reduced in buckets, never in place.

After a failure in the middle of a reduce the accumulated sums are still whole, and the buckets that were finished
anywhere are kept (paper section 6.2, scenario 2). Which those are, the core knows (`unicron.train.iteration`).
"""

from collections.abc import Iterable

import torch

from unicron.train.group import Group

BUCKET_BYTES = 25 * 1024 * 1024


class Gradients:
    """The accumulated and the reduced gradient of all parameters, each as one flat tensor.

    The last element is the sum of the losses, so that the mean loss needs no collective of its own.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], dtype: torch.dtype | None) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        if not self._parameters:
            raise ValueError("the model has no parameters that require a gradient")
        first = self._parameters[0]
        size = sum(parameter.numel() for parameter in self._parameters) + 1
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

    def accumulate(self, loss: torch.Tensor) -> None:
        """Add the gradients that a backward pass has left in `p.grad`, and its loss."""
        offset = 0
        for parameter in self._parameters:
            end = offset + parameter.numel()
            if parameter.grad is not None:
                self._accumulated[offset:end] += parameter.grad.reshape(-1)
                parameter.grad = None
            offset = end
        self._accumulated[-1] += loss.detach()

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

    def publish(self, microbatches: int) -> float:
        """Put the mean over the global batch into each `p.grad`; return the mean loss."""
        offset = 0
        for parameter in self._parameters:
            end = offset + parameter.numel()
            mean = self._reduced[offset:end] / microbatches
            parameter.grad = mean.reshape(parameter.shape).to(parameter.dtype)
            offset = end
        return float(self._reduced[-1] / microbatches)
