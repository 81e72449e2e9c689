"""Iterators of a script, which a new process brings to where they were: what they have handed out is found once more.

What an iterator draws of the generators of random numbers is drawn between what the script draws, so it depends on all
that the script has done. Their states before each item that drew are kept, and are there again as it is found anew.
"""

import itertools
import operator
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import GeneratorType
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.data import IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter, _SingleProcessDataLoaderIter

from unicron.errors import GroupBrokenError
from unicron.train.carry.kinds import ATTRIBUTES, CELL, DICT, FUNCTION, LIST, SET, Kind, NotCarriedError
from unicron.train.carry.objects import (
    ARRAY,
    BARE_ITERATORS,
    BYTES,
    NUMPY_GENERATOR,
    PYTHON_GENERATOR,
    TENSOR,
    TORCH_GENERATOR,
    Resumable,
    kind_of,
)
from unicron.train.carry.randomness import generators, set_generators
from unicron.train.carry.tensors import raw
from unicron.train.loops.collective_results import KnownResults
from unicron.train.worker.injected import InjectedFault

T = TypeVar("T")

MOST_DRAWN = 16
"""Items for which the generators' states are kept, 11 KiB each."""


CONTAINERS = (LIST, DICT, SET)
HOLDING = (*CONTAINERS, ATTRIBUTES, CELL, FUNCTION)
BY_VALUE = (TORCH_GENERATOR, PYTHON_GENERATOR, NUMPY_GENERATOR, TENSOR, ARRAY, BYTES)
MOST_OWN, LONGEST, MOST_VALUE_BYTES, COMPARED_BYTES = 64, 1000, 4 << 10, 64 << 10
"""Objects that what is gone over is made of, and items of a container, that are looked at before each item."""

BARS = frozenset({"tqdm", "rich", "progressbar", "alive_progress", "fastprogress"})
"""Libraries of progress bars."""

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
        own: the objects that its items depend on, by keys that are the same in another process.
        is_replaying: it is just being brought to where another one is.
    """

    def __init__(self, over: Iterable[Any], running: "list[Counted] | None" = None) -> None:
        self._begin(over, RUNNING if running is None else running)

    def _begin(self, over: Iterable[Any], running: "list[Counted]") -> None:
        before = generators()
        self._unseen = ""
        self._first = self._last = self._look(lambda: _parts_of(over), list[Part]())
        self.own = {("part", number): part.thing for number, part in enumerate(self._first)}
        self.iterable, self._iterator, self._running = over, iter(over), running
        self.count, self.exhausted, self.results, self.is_replaying = 0, False, KnownResults(), False
        self._item_seen, self._generator_states = 0, dict[int, bytes]()
        self._record_draw(before)

    def __reduce__(self) -> Any:
        """Pickle the iterable and the position."""
        return _restore_counted, (self.iterable, self.position())

    def __next__(self) -> Any:
        """Return the next item."""
        draws = type(self._iterator) not in BARE_ITERATORS
        before = generators() if draws else b""
        self._last = self._look(lambda: _parts_of(self.iterable), self._last)
        self._running.append(self)
        try:
            self.count += 1
            item = next(self._iterator)
        except StopIteration:
            self.exhausted = True
            raise
        else:
            self._item_seen = self._look(lambda: fingerprint([("", item)]), 0) if draws else 0
            return item
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

    _generator_states: dict[int, bytes] | None

    def _look(self, how: Callable[[], T], otherwise: T) -> T:
        """Return what is looked at; a script whose objects can't be looked at goes on, and can't be carried."""
        try:
            return how()
        except InjectedFault:
            raise
        except Exception as error:  # noqa: BLE001 whatever a script's objects raise
            self._unseen = repr(error)
            return otherwise

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
        if self._unseen:
            raise NotCarriedError(f"what {type(self.iterable).__name__} hands out can't be looked at: {self._unseen}")
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
            "first": _changed(self._first, _parts_of(self.iterable)),
            "last": _changed(self._last, self._first) if _skips(self._iterator) else [],
            "seen": (self._item_seen, _look_into(self._iterator)),
        }

    def advance_to(self, saved: dict[str, Any]) -> Any:
        """Advance to the position of another one; return the last item that it has yielded, None if there is none.

        Raises:
            NotCarriedError: it can't be brought there alone: what the body of its loop does is needed for that.
        """
        try:
            return self._advance_to(saved)
        except (NotCarriedError, GroupBrokenError, InjectedFault):
            raise
        except Exception as error:
            raise NotCarriedError(
                f"{describe(self._iterator)} fails when it is run forward alone, to item {saved['count']}: {error!r}; "
                "let what it hands out depend on nothing that the body of its loop changes"
            ) from error

    def begin_anew(self, iterable: Iterable[Any], saved: dict[str, Any]) -> None:
        """Go over this, as it was when the other one was made, and advance to its position; leave it as it is now."""
        now = [(thing, kind.state(thing)) for thing, _ in saved["first"] if (kind := kind_of(thing)) is not None]
        if (states := saved["drawn"].get(0)) is not None:
            set_generators(states)
        _restore_parts(saved["first"])
        self._begin(iterable, RUNNING)
        self.advance_to(saved)
        _restore_parts(now)

    def _advance_to(self, saved: dict[str, Any]) -> Any:
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
        if not self.exhausted and (self._item_seen, _look_into(self._iterator)) != saved["seen"]:
            raise NotCarriedError(f"{describe(self._iterator)} hands out something else when begun anew")
        self._generator_states, self.is_replaying = dict(saved["drawn"]), False
        return item


def _restore_counted(within: Iterable[Any], saved: dict[str, Any]) -> Counted:
    made = Counted.__new__(Counted)
    made.begin_anew(within, saved)
    return made


def counts_up(iterable: Any) -> bool:
    """Return whether what a loop goes over are numbers that tell how far it is, wherever they begin."""
    return isinstance(iterable, range | itertools.count)


def _skips(iterator: Any) -> bool:
    """Return whether an iterator's items are found by a sampler alone, whatever loading them draws."""
    return isinstance(iterator, _SingleProcessDataLoaderIter) and not isinstance(iterator._dataset, IterableDataset)  # noqa: SLF001


def _look_into(iterator: Any) -> int:
    """Return something that differs with the position of a generator, as far as that can be seen; 0 of others."""
    if not isinstance(iterator, GeneratorType) or iterator.gi_frame is None:
        return 0
    if iterator.gi_frame.f_globals.get("__name__", "").partition(".")[0] in BARS:
        return 0  # clocks
    return fingerprint([("", iterator.gi_frame.f_lasti), *iterator.gi_frame.f_locals.items()])


def fingerprint(named: Iterable[tuple[str, Any]]) -> int:
    """Return something that differs when plain values and tensors do, or those in containers, as far as it looks."""
    found, looked, left, todo = 0, 0, COMPARED_BYTES, deque(named)
    while todo and looked < LONGEST:
        name, each = todo.popleft()
        looked += 1
        if isinstance(each, torch.Tensor):
            own = type(each) in {torch.Tensor, torch.nn.Parameter}  # one of another class may be spread over ranks
            small = own and each.layout == torch.strided and each.device.type == "cpu" and each.nbytes <= left
            left -= each.nbytes if small else 0
            found = zlib.crc32(raw(each) if small else repr(each.shape).encode(), found)
        elif isinstance(each, tuple | list):
            todo.extend((name, one) for one in each[:LONGEST])
        elif isinstance(each, dict):
            todo.extend((f"{name}.{key}", one) for key, one in [*each.items()][:LONGEST])
        elif isinstance(each, int | float | str | bytes | None):
            found = zlib.crc32(f"{name} {each!r}".encode(), found)
    return found


def describe(iterator: Any) -> str:
    """Return what an iterator is, for people: of a generator, its function and where that begins."""
    if isinstance(iterator, Counted):
        return describe(iterator._iterator)  # noqa: SLF001
    if isinstance(iterator, GeneratorType):
        code = iterator.gi_code
        return f"the generator `{iterator.__qualname__}` ({Path(code.co_filename).name}:{code.co_firstlineno})"
    return f"the iterator {type(iterator).__qualname__}"


class Part(NamedTuple):
    """An object that items depend on.

    Attributes:
        look: what shows whether it has changed.
        state: to put back; None of one that is too large to be kept.
    """

    thing: Any
    kind: Kind
    look: tuple[Any, ...]
    state: Any


def _parts_of(over: Any) -> list[Part]:
    """Return the nearest objects that an iterator's items depend on, as they are."""
    found, todo, seen = list[Part](), deque([over]), set[int]()
    while todo and len(seen) < MOST_OWN:
        each = todo.popleft()
        if isinstance(each, _BaseDataLoaderIter):  # within a layer, that has called iter(): its items show where it is
            todo.extend((each._dataset, each._index_sampler))  # noqa: SLF001
            continue
        kind = kind_of(each)
        if kind is None or id(each) in seen:
            continue
        seen.add(id(each))
        if kind in BY_VALUE:
            size = getattr(each, "nbytes", 0)
            if size <= MOST_VALUE_BYTES:
                found.append(Part(each, kind, kind.fingerprint(each), kind.state(each)))
            elif kind is TENSOR:
                found.append(Part(each, kind, (each._version,), None))  # noqa: SLF001 what shows that it was written to
        elif kind in CONTAINERS and len(each) > LONGEST:
            found.append(Part(each, kind, (len(each),), None))
        elif kind in HOLDING:
            found.append(Part(each, kind, kind.fingerprint(each), kind.state(each)))
            todo.extend(value for _, value in kind.parts(each))
    return found


def _changed(before: list[Part], now: list[Part]) -> list[tuple[Any, Any]]:
    """Return those parts, and their states before, that are not now what they were before.

    Raises:
        NotCarriedError: one of them is too large for its state to be kept.
    """
    there, found = {id(each.thing): each.look for each in now}, list[tuple[Any, Any]]()
    for thing, kind, look, state in before:
        other = there.get(id(thing))
        if other is not None and len(other) == len(look):
            if kind.exact and all(map(operator.is_, other, look)):
                continue
            if other == look and not kind.exact:
                continue
        if state is None and other != look:
            raise NotCarriedError(
                f"a {type(thing).__qualname__} of more than {LONGEST} items or {MOST_VALUE_BYTES >> 10} KiB, which a "
                "loop's items depend on and which changes as it runs"
            )
        if state is not None:
            found.append((thing, state))
    return found


def _restore_parts(states: list[tuple[Any, Any]]) -> None:
    for thing, state in states:
        if (kind := kind_of(thing)) is not None:
            kind.set_state(thing, state)
