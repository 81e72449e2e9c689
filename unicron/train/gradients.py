"""Gradients by microbatch: accumulated apart from `p.grad`, reduced in buckets, never in place.

After a failure in the middle of a reduce the accumulated sums are still whole, and the buckets that were finished
anywhere are kept (paper section 6.2, scenario 2).
"""

from collections.abc import Iterable, Sequence

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
        self.finished = [False] * len(self._slices)

    def start(self) -> None:
        """Begin a new iteration."""
        self._accumulated.zero_()
        self.finished = [False] * len(self._slices)

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

    def reduce(self, group: Group) -> None:
        """Sum over all ranks what no bucket holds yet.

        Raises:
            RuntimeError: the group broke; finished buckets stay.
        """
        for index, bucket in enumerate(self._slices):
            if not self.finished[index]:
                self._reduced[bucket] = self._accumulated[bucket]
                group.all_reduce(self._reduced[bucket])
                self.finished[index] = True

    def share(self, group: Group, bucket_from: Sequence[int | None]) -> None:
        """Give each bucket that some rank has finished to all ranks.

        Args:
            group: of the ranks that share.
            bucket_from: for each bucket the rank that has it, or None.

        Raises:
            RuntimeError: the group broke.
        """
        for index, (bucket, source) in enumerate(zip(self._slices, bucket_from, strict=True)):
            if source is not None:
                group.broadcast(self._reduced[bucket], source)
            self.finished[index] = source is not None

    def publish(self, microbatches: int) -> float:
        """Put the mean over the global batch into each `p.grad`; return the mean loss."""
        offset = 0
        for parameter in self._parameters:
            end = offset + parameter.numel()
            mean = self._reduced[offset:end] / microbatches
            parameter.grad = mean.reshape(parameter.shape).to(parameter.dtype)
            offset = end
        return float(self._reduced[-1] / microbatches)
