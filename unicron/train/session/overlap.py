"""Detects which buckets of a gradient a running backward pass has completed.

The first pass only looks: it notes in which order gradients are made. From then on a bucket is looked at when that
gradient is made which was its last. A hook at each parameter would cost more than all else that a session does.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from unicron.errors import GroupBrokenError

Mark = tuple[int, int] | None
"""Identity and version of a gradient; None where there is none."""


class Overlap:
    """The buckets that backward passes complete.

    Args:
        parameters: in the order of the flat gradient.
        counts: of each bucket, how many of these have to be made for it and those before it.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], counts: Sequence[int]) -> None:
        self._parameters, self._counts = parameters, counts
        self._begin: Callable[[int], object] | None = None
        self._order: list[int] | None = []
        self._before: list[Mark] = []
        self._begun_marks: list[Mark] = []
        self._next = 0

    @contextlib.contextmanager
    def during(self, begin: Callable[[int], object]) -> Iterator[None]:
        """Call `begin` for each bucket that the backward pass inside completes, in order; the first pass only looks.

        A pass that makes some gradient twice, as checkpointing can, is nothing to overlap with.

        Args:
            begin: gets the number of a bucket; returns None where no further one is to begin.

        Raises:
            RuntimeError: the pass changed a gradient whose bucket had begun.
        """
        if self._order is not None:
            with self._record_order(self._order):
                yield
            return
        self._before = [_mark(each) for each in self._parameters]
        self._begin, self._begun_marks, self._next = begin, [], 0
        try:
            yield
        finally:
            self._begin = None
        for parameter, mark in zip(self._parameters, self._begun_marks, strict=False):
            if _mark(parameter) != mark:
                raise RuntimeError(
                    f"the backward pass made the gradient of a parameter of shape {tuple(parameter.shape)} twice, or "
                    "changed it, which it did not in the first iteration: use checkpoint(..., use_reentrant=False)"
                )

    @contextlib.contextmanager
    def _record_order(self, order: list[int]) -> Iterator[None]:
        """Note which gradients the pass inside makes, and watch those that complete a bucket from then on."""
        handles = [_add_hook(each, partial(_append, order, number)) for number, each in enumerate(self._parameters)]
        yield
        for handle in handles:
            handle.remove()
        self._order = None
        places = {number: place for place, number in enumerate(order)}
        if len(places) < len(order):
            self._counts = []
        lasts = list[int]()
        for count in self._counts:
            if any(number not in places for number in range(count)):
                break
            lasts.append(max(range(count), key=places.__getitem__))
        self._counts = self._counts[: len(lasts)]
        for last in set(lasts):
            _add_hook(self._parameters[last], self._begin_complete)

    def _begin_complete(self, _: torch.nn.Parameter) -> None:
        """Begin the buckets of which all gradients are there by now."""
        while self._begin is not None and self._next < len(self._counts):
            numbers = range(len(self._begun_marks), self._counts[self._next])
            marks = [_mark(self._parameters[number]) for number in numbers]
            if any(mark == self._before[number] for number, mark in zip(numbers, marks, strict=True)):
                return
            begun = None
            with contextlib.suppress(GroupBrokenError):  # the wait for the bucket raises it again
                begun = self._begin(self._next)
            if begun is None:
                self._begin = None
                return
            self._begun_marks += marks
            self._next += 1


def _add_hook(parameter: torch.nn.Parameter, hook: Callable[[torch.nn.Parameter], None]) -> Any:
    """Have a hook called whenever the gradient of a parameter was made."""
    required = parameter.requires_grad  # one that is frozen just now takes no hook
    parameter.requires_grad_()
    handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    parameter.requires_grad_(required)
    return handle


def _append(order: list[int], number: int, _: torch.nn.Parameter) -> None:
    order.append(number)


def _mark(parameter: torch.nn.Parameter) -> Mark:
    gradient: Any = parameter.grad
    if gradient is None:
        return None
    return id(gradient), getattr(gradient, "_local_tensor", gradient)._version  # noqa: SLF001 of what is spread
