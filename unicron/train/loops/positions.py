"""Iterators of a script, which a new process brings to where they were: what they have handed out is found once more.

What an iterator draws of the generators of random numbers is drawn between what the script draws, so it depends on all
that the script has done. Their states before each item that drew are kept, and are there again as it is found anew.
"""

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from types import GeneratorType
from typing import Any

import torch
from torch.utils.data import IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter, _SingleProcessDataLoaderIter

from unicron.train.carry.kinds import ATTRIBUTES, LIST, NotCarriedError
from unicron.train.carry.objects import (
    BARE_ITERATORS,
    COMPARED_BYTES,
    NUMPY_GENERATOR,
    PYTHON_GENERATOR,
    TORCH_GENERATOR,
    Resumable,
    kind_of,
    raw,
)
from unicron.train.carry.randomness import generators, set_generators
from unicron.train.loops.collective_results import KnownResults

MOST_DRAWN = 16
"""Items for which the generators' states are kept, 11 KiB each."""


GENERATORS = (TORCH_GENERATOR, PYTHON_GENERATOR, NUMPY_GENERATOR)
MOST_OWN, LONGEST = 64, 1000
"""Objects that what is gone over is made of, and items of a list, that are looked at before each item."""

RUNNING: "list[Counted]" = []
"""Iterators of the script that are just finding their next item."""


class Counted(Resumable, Iterator[Any]):
    """An iterator that counts its items, and can be brought to where another one is.

    Args:
        over: what it goes over.
        running: where it is noted while it is finding its next item; `RUNNING` by default.

    Attributes:
        iterable: what it iterates over.
        count: items that were asked for.
        exhausted: there are no more.
        results: of collectives that were run to find them.
        is_replaying: it is just being brought to where another one is.
    """

    def __init__(self, over: Iterable[Any], running: "list[Counted] | None" = None) -> None:
        before = generators()
        self._first = self._last = _parts_fingerprint(over)
        self.iterable, self._iterator, self._running = over, iter(over), RUNNING if running is None else running
        self.count, self.exhausted, self.results, self.is_replaying = 0, False, KnownResults(), False
        self._generator_states: dict[int, bytes] | None = {}
        self._record_draw(before)

    def __reduce__(self) -> Any:
        """Pickle the iterable and the position."""
        return _restore_counted, (self.iterable, self.position())

    def __next__(self) -> Any:
        """Return the next item."""
        draws = type(self._iterator) not in BARE_ITERATORS
        before = generators() if draws else b""
        self._last = _parts_fingerprint(self.iterable)
        self._running.append(self)
        try:
            self.count += 1
            return next(self._iterator)
        except StopIteration:
            self.exhausted = True
            raise
        finally:
            self._running.pop()
            if self._generator_states is not None and self.count > 2 and _skips(self._iterator):
                self._generator_states.pop(self.count - 1, None)  # a later rank loads the last item alone
            if draws:
                self._record_draw(before)

    def __getattr__(self, name: str) -> Any:
        """Return what else a generator has, such as `close` and `throw`; what it then hands out is seen by `_seen`."""
        if name == "_iterator":  # it is just being made
            raise AttributeError(name)
        return getattr(self._iterator, name)

    def _record_draw(self, before: bytes) -> None:
        if self._generator_states is not None and generators() != before:
            self._generator_states[self.count] = before
            if len(self._generator_states) > MOST_DRAWN:
                self._generator_states = None

    def position(self) -> dict[str, Any]:
        """Return how far it is, and what another process needs to get there.

        Raises:
            NotCarriedError: no other process could.
        """
        if self._generator_states is None:
            raise NotCarriedError(
                f"what draws random numbers for more than {MOST_DRAWN} of its items ({type(self.iterable).__name__})"
            )
        if isinstance(self._iterator, _BaseDataLoaderIter) and getattr(self.iterable, "persistent_workers", False):
            raise NotCarriedError("a DataLoader with persistent_workers, whose processes have a state of their own")
        return {
            "count": self.count,
            "over": self.exhausted,
            "drawn": dict(self._generator_states),
            "heard": self.results.to_list(),
            "first": self._first,
            "last": self._last,
            "seen": _handed_out(self._iterator),
        }

    def advance_to(self, saved: dict[str, Any]) -> Any:
        """Advance to the position of another one; return the last item that it has yielded, None if there is none."""
        if saved["over"]:
            self._iterator, self.count, self.exhausted = iter(()), saved["count"], True
        self.results, self.is_replaying, item = KnownResults(saved["heard"], self.results), True, None
        while self.count < saved["count"]:
            left = saved["count"] - self.count
            if (states := saved["drawn"].get(self.count + 1)) is not None:
                set_generators(states)
            if left > 1 and self.count and _skips(self._iterator):
                loader: Any = self._iterator
                next(loader._sampler_iter, None)  # noqa: SLF001 an item that is dropped need not be loaded
                loader._num_yielded += 1  # noqa: SLF001
                self.count += 1
            else:
                if left == 1 and self.count and _skips(self._iterator):
                    _restore_parts(saved["last"])
                item = next(self, None)
        if not self.exhausted and _handed_out(self._iterator) != saved["seen"]:
            raise NotCarriedError(
                f"the generator {getattr(self._iterator, '__qualname__', '')} hands out something else when begun anew"
            )
        self._generator_states, self.is_replaying = dict(saved["drawn"]), False
        self._first = saved["first"]
        return item


def _restore_counted(within: Iterable[Any], saved: dict[str, Any]) -> Counted:
    if (states := saved["drawn"].get(0)) is not None:
        set_generators(states)
    _restore_parts(saved["first"])
    made = Counted(within)
    made.advance_to(saved)
    return made


def _skips(iterator: Any) -> bool:
    """Return whether an iterator's items are found by a sampler alone, whatever loading them draws."""
    return isinstance(iterator, _SingleProcessDataLoaderIter) and not isinstance(iterator._dataset, IterableDataset)  # noqa: SLF001


def _handed_out(iterator: Any) -> bytes:
    """Return something that differs with the position of a generator, as far as that can be seen; nothing of others."""
    if not isinstance(iterator, GeneratorType) or iterator.gi_frame is None:
        return b""
    found: list[Any] = [iterator.gi_frame.f_lasti]
    todo = [*iterator.gi_frame.f_locals.items()]
    while todo and len(found) < LONGEST:
        name, each = todo.pop()
        if isinstance(each, torch.Tensor):
            found.append((name, _digest(raw(each)) if each.nbytes <= COMPARED_BYTES else each.shape))
        elif isinstance(each, tuple | list):
            todo += [(name, one) for one in each[:LONGEST]]
        elif isinstance(each, int | float | str | bytes | None):
            found.append((name, each))
    return _digest(repr(found).encode())


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


def _parts_fingerprint(over: Any) -> list[tuple[Any, Any]]:
    """Return the state of what an iterator's items depend on: numbers, generators of random ones, short lists."""
    found, todo, seen = list[tuple[Any, Any]](), [over], set[int]()
    while todo and len(seen) < MOST_OWN:
        each = todo.pop()
        kind = kind_of(each)
        if id(each) in seen:
            continue
        seen.add(id(each))
        if kind in GENERATORS:
            found.append((each, kind.state(each)))
        elif kind is LIST and type(each) is list and len(each) <= LONGEST:
            found.append((each, list(each)))
        elif kind is ATTRIBUTES and hasattr(each, "__dict__"):
            found.append((each, {name: value for name, value in vars(each).items() if kind_of(value) is None}))
            todo += [value for value in vars(each).values() if kind_of(value) is not None]
    return found


def _restore_parts(states: list[tuple[Any, Any]]) -> None:
    for each, state in states:
        kind = kind_of(each)
        if kind is ATTRIBUTES:
            vars(each).update(state)
        elif kind is LIST:
            each[:] = state
        elif kind is not None:
            kind.set_state(each, state)
