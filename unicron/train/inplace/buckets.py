"""The buckets in which DistributedDataParallel sums gradients.

Where more than two ranks sum something, how it is rounded depends on its place in what is summed at once. So that ranks
in place come to the very bits to which those of torch come, they sum the same pieces in the same order: all of a model
at first; from the second iteration on pieces of a few MiB, in the order in which the first rank's first backward pass
made the gradients. Where a backward pass may leave parameters out, the pieces stay what torch makes of the order in
which the model has them.
"""

import sys
from collections.abc import Sequence

import torch
from torch._C._distributed_c10d import _DEFAULT_FIRST_BUCKET_BYTES, _compute_bucket_assignment_by_size

FIRST_BYTES, USUAL_BYTES = _DEFAULT_FIRST_BUCKET_BYTES, 25 << 20

EITHER_WAY = 2
"""Ranks whose sums are the same in any order."""


class ReadyOrder:
    """The order in which gradients of a model are made.

    Args:
        parameters: whose gradients are reduced.
        varies: a backward pass may leave some of them out, and it is not known which.
        cap_bytes: the script's own limit of a bucket; None where it has none.

    Attributes:
        static: backward passes make gradients as often each time; torch looks at the second one.
        passes: that were looked at.
        known: by number of the parameter, once all ranks have it from the first one; None before that.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], *, varies: bool, cap_bytes: int | None) -> None:
        self._parameters, self._varies = list(parameters), varies
        self._numbers = {id(each): number for number, each in enumerate(self._parameters)}
        self._limits = [FIRST_BYTES, USUAL_BYTES] if cap_bytes is None else [cap_bytes]
        self._noted = dict[int, None]()
        self.static, self.passes = False, 0
        self.known: list[int] | None = None

    @property
    def varies(self) -> bool:
        """Whether torch does not look at the order."""
        return self._varies and not self.static

    def begin(self) -> None:
        """Forget what was noted, as another backward pass begins."""
        self._noted.clear()

    def note(self, parameter: torch.Tensor) -> None:
        """Note that a parameter's gradient is made, after those noted before."""
        if self.known is None and not self.varies:
            self._noted.pop(number := self._numbers[id(parameter)], None)
            self._noted[number] = None

    @property
    def count(self) -> int:
        """How many parameters there are."""
        return len(self._parameters)

    @property
    def noted(self) -> list[int]:
        """What was noted, as many numbers as there are parameters; zeros where some are missing."""
        return [*self._noted] if len(self._noted) == self.count else [0] * self.count

    def take(self, order: Sequence[int]) -> None:
        """Take the first rank's order, if it is one; what is known stays."""
        if self.known is None and not self.varies and sorted(order) == list(range(self.count)):
            self.passes += 1
            self.known = list(order) if self.passes > self.static else None

    def buckets(self) -> list[list[torch.nn.Parameter]]:
        """Return what is summed at once, in the order in which torch begins that."""
        order = range(self.count) if self.known is None else self.known
        limits = self._limits if self.varies or self.known is not None else [sys.maxsize]
        tensors: list[torch.Tensor] = [self._parameters[number] for number in order]
        if not tensors:
            return []
        indices = [] if self.known is None else self.known
        found, _ = _compute_bucket_assignment_by_size(tensors, limits, [False] * len(tensors), indices)
        return [[self._parameters[number] for number in each] for each in (found if indices else reversed(found))]
