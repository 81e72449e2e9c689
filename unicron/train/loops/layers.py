"""Layers around what a loop iterates over: progress bars, numbers, an end. They are as far as the loop itself is.

So what is inside of them is brought to where it was as if they were not there, and the clocks of a bar are nobody's.
"""

import contextlib
import itertools
import sys
from collections.abc import Iterable
from inspect import GEN_CREATED, getgeneratorstate
from types import GeneratorType
from typing import Any


class Layer:
    """A layer that changes nothing."""

    def wrap(self, count: int, item: Any) -> Any:  # noqa: ARG002
        """Return what is handed out as the item of this number, counted from 1."""
        return item

    def resume(self, count: int) -> None:
        """Be where the body of this item begins."""

    def begin_next(self) -> None:
        """Note that the body of an item has ended."""

    def is_over(self, count: int) -> bool:  # noqa: ARG002
        """Return whether no item is asked for after so many."""
        return False

    def close(self) -> None:
        """Note that the loop has ended."""


class _Numbers(Layer):
    def __init__(self, first: int) -> None:
        self._first = first

    def wrap(self, count: int, item: Any) -> Any:
        return self._first + count - 1, item


class _End(Layer):
    def __init__(self, last: int) -> None:
        self._last = last

    def is_over(self, count: int) -> bool:
        return count >= self._last


class _Bar(Layer):
    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def resume(self, count: int) -> None:
        if not self._bar.disable:
            self._bar.n = self._bar.initial + count - 1

    def begin_next(self) -> None:
        self._bar.update(1)

    def close(self) -> None:
        self._bar.close()


def peel(iterable: Any, *, numbered: bool) -> tuple[Any, list[Layer]]:
    """Return what is inside of layers, and those, the innermost first.

    Args:
        iterable: which may be such.
        numbered: it is to be handed out by `enumerate`.
    """
    found = [_Numbers(0)] * numbered + [*_layers(iterable)]
    inside = found.pop() if found and not isinstance(found[-1], Layer) else iterable
    return inside, found[::-1]


def wrapped(layers: Iterable[Layer], count: int, item: Any) -> Any:
    """Return an item as it is handed out through layers, the innermost first."""
    for each in layers:
        item = each.wrap(count, item)
    return item


def _layers(over: Any) -> Iterable[Any]:
    """Yield the layers, the outermost first, and what is inside."""
    while True:
        bar = _bar_of(over)
        if bar is not None:
            yield _Bar(bar)
            over = bar.iterable
        elif isinstance(over, enumerate):
            arguments: Any = over.__reduce__()[1]
            over, first = arguments
            yield _Numbers(first)
        elif (last := _end_of(over)) is not None:
            yield _End(last)
            over = over.__reduce__()[1][0]
        else:
            yield over
            return


def _bar_of(over: Any) -> Any:
    """Return a bar of tqdm that goes over something by tqdm's own code, or is just about to; None for all else."""
    tqdm = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    if tqdm is None:
        return None
    code = tqdm.__iter__.__code__
    if isinstance(over, GeneratorType) and over.gi_code is code and getgeneratorstate(over) == GEN_CREATED:
        over = over.gi_frame.f_locals.get("self") if over.gi_frame is not None else None
    if isinstance(over, tqdm) and type(over).__iter__ is tqdm.__iter__ and over.iterable is not None:
        return over
    return None


def _end_of(over: Any) -> int | None:
    """Return after how many items `itertools.islice` ends that begins with the first, and leaves none out."""
    with contextlib.suppress(TypeError, ValueError, AttributeError):  # it can't say
        if isinstance(over, itertools.islice):
            arguments: Any = over.__reduce__()[1]
            _, first, last, step = arguments
            return last if (first, step) == (0, 1) and isinstance(last, int) else None
    return None
