"""Iterators of a script, which a new process brings to where they were: what they have handed out is found once more.

What an iterator draws of the generators of random numbers is drawn between what the script draws, so it depends on all
that the script has done. Their states before each item that drew are kept, and are there again as it is found anew.

A generator that hands out what a loop of it goes over is entered in that loop; any other one is run forward.
"""

import gc
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType, GeneratorType
from typing import Any, TypeVar

import torch
from torch.utils.data import IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter, _SingleProcessDataLoaderIter

from unicron.errors import GroupBrokenError
from unicron.exception_texts import brief
from unicron.train.carry.by_value import Opaque
from unicron.train.carry.kept_workers import KeptWorkers, used_by
from unicron.train.carry.kinds import FUNCTION, NotCarriedError
from unicron.train.carry.objects import BARE_ITERATORS, KEPT_WORKERS, Resumable, kind_of
from unicron.train.carry.randomness import drawn_beside, generators, set_generators, thread_that_may_draw
from unicron.train.carry.variables import Variables
from unicron.train.loops.collective_results import KnownResults
from unicron.train.loops.parts import Part, changed, fingerprint, parts_of, restore_parts
from unicron.train.worker.injected import InjectedFault

T = TypeVar("T")

MOST_DRAWN = 16
"""Items for which the generators' states are kept, 11 KiB each."""

HOLDERS = (torch.Tensor, list, tuple, dict, deque)
"""What earlier items may be held in."""

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
        entering: where the loops of a generator are to be entered, while that is just being done.
        handed: variables of a generator that its loops set as it is entered.
    """

    def __init__(self, over: Iterable[Any], running: "list[Counted] | None" = None) -> None:
        self._begin(over, RUNNING if running is None else running)

    def _begin(self, over: Iterable[Any], running: "list[Counted]") -> None:
        before = generators()
        self._unseen = ""
        self._first = self._last = self._look(lambda: parts_of(over), list[Part]())
        self.own: dict[Any, Any] = {("part", number): part.thing for number, part in enumerate(self._first)}
        self._began_at, self._loops, self._number_of_loops = 0, dict[str, Counted](), 1
        self.entering, self.handed, self._made = None, tuple[str, ...](), dict[str, Any]()
        self._reached: Any = None  # the item to which it was brought, until the next one is asked for
        if isinstance(over, Counted):
            self._began_at = over.count
            self.own |= {("in", *key): each for key, each in over.own.items()}
        with used_by(self):
            self.iterable, self._iterator, self._running = over, iter(over), running
        self.count, self.exhausted, self.results, self.is_replaying = 0, False, KnownResults(), False
        self._item_seen, self._generator_states = 0, dict[int, bytes]()
        self._begun_with, self._beside = before, ""
        self._look_beside()
        self._record_draw(before)

    entering: dict[str, Any] | None

    def __reduce__(self) -> Any:
        """Pickle the iterable and the position."""
        return _restore_counted, (self.iterable, self.whole_position())

    def _changed_since(self) -> list[tuple[Any, Any]]:
        """Return what its items depend on and has changed since it was made, with the states before."""
        return changed(self._first, parts_of(self.iterable))

    def __next__(self) -> Any:
        """Return the next item."""
        draws = type(self._iterator) not in BARE_ITERATORS
        before, self._reached = generators() if draws else b"", None
        self._last = self._look(lambda: parts_of(self.iterable), self._last)
        self._running.append(self)
        try:
            self.count += 1
            with used_by(self):
                item = next(self._iterator)
        except StopIteration:
            self.exhausted = True
            raise
        else:
            self._item_seen = self._look(lambda: fingerprint([("", item)]), 0) if draws else 0
            if self.count == 1 and self.can_be_entered:
                self._made = self.variables.values()
            return item
        finally:
            self._running.pop()
            if self._generator_states is not None and self.count > 2 and _skips(self._iterator):
                self._generator_states.pop(self.count - 1, None)  # a later rank loads the last item alone
            if draws:
                self._look_beside()
                self._record_draw(before)

    def _look_beside(self) -> None:
        """Note a thread that may find items beside the loop: it may be through here, and not in another process."""
        self._beside = self._beside or thread_that_may_draw()

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
            self._unseen = brief(error)
            return otherwise

    def _record_draw(self, before: bytes) -> None:
        if self._generator_states is not None and generators() != before:
            self._generator_states[self.count] = before
            if len(self._generator_states) > MOST_DRAWN:
                loads = _only_loads(self._iterator)
                needed = {0, 1, self.count - loads, self.count}
                kept = {count: state for count, state in self._generator_states.items() if count in needed}
                self._generator_states = kept if self._loops or loads else None

    # --- generators that are entered at their `yield` ----------------------------------------------------------------

    @property
    def frame(self) -> FrameType | None:
        """The frame of a generator that is not done."""
        return self._iterator.gi_frame if isinstance(self._iterator, GeneratorType) else None

    def note_loops(self, number: int, handed: Sequence[str]) -> bool:
        """Note how many loops are around a generator's `yield`, and which variables they set; return if one began."""
        self._number_of_loops, self.handed = number, tuple(handed)
        return bool(self._loops)

    def begin_loop(self, place: str, position: "Callable[[], Counted]") -> "tuple[Counted, list[Any]]":
        """Begin a loop of a generator; return its position, and the item at which it is entered, if it is being so.

        Args:
            place: of it.
            position: makes the position.
        """
        saved = None if self.entering is None else self.entering.pop(place, None)
        if saved is not None:
            if (states := saved["drawn"].get(0)) is not None:
                set_generators(states)
            restore_parts(saved["before"])
        self._loops.pop(place, None)
        self._loops[place] = found = position()
        return found, [] if saved is None else [found.advance_to(saved)]

    @property
    def can_be_entered(self) -> bool:
        """Whether another process's generator can be entered where this one waits: all loops around that are known."""
        inside = self._iterator
        waits = isinstance(inside, GeneratorType) and inside.gi_frame is not None and not inside.gi_running
        return waits and len(self._loops) == self._number_of_loops

    @property
    def variables(self) -> Variables:
        """Those of a generator, but for what is set as it is entered."""
        return Variables(self.frame or {}, self.handed)

    def generators(self) -> "Iterator[Counted]":
        """Yield the generators that items come through, the last one first."""
        if isinstance(self._iterator, GeneratorType):
            yield self
        inside = [self._iterator] if isinstance(self._iterator, Counted) else []
        for each in (*inside, *self._loops.values()):
            yield from each.generators()

    def _enter(self, saved: dict[str, Any]) -> Any:
        """Begin a generator anew, in the loops in which another one waits; return the item that it then yields."""
        if self.count:
            self._iterator, self.results = iter(self.iterable), KnownResults(saved["heard"])
        self._loops.clear()
        self.entering = dict(saved["loops"])
        if (states := saved["drawn"].get(1)) is not None:
            set_generators(states)
        try:
            item = next(self, None)
            if self.entering or not self.can_be_entered:
                raise NotCarriedError(f"{describe(self._iterator)} does not come to the loop in which the other one is")
        finally:
            self.entering = None
        self.count = saved["count"]
        return item

    def _positions_of_loops(self) -> dict[str, Any]:
        """Return the positions of a generator's loops, and what was changed on the way to where each one began."""
        there, found = {id(part.thing) for part in self._first}, dict[str, Any]()
        for place, each in self._loops.items():
            known = [part for part in each._first if id(part.thing) in there]  # noqa: SLF001
            before = [*each._changed_since(), *changed(known, self._first)]  # noqa: SLF001
            found[place] = each.position() | {"before": before}
        return found

    # --- positions ---------------------------------------------------------------------------------------------------

    def whole_position(self) -> dict[str, Any]:
        """Return the position, and the variables of generators inside, where those are not kept as the script's are."""
        variables = [each._variables() for each in self._entered()]  # noqa: SLF001
        return self.position() | {"variables": variables, "first": self._changed_since()}

    def _entered(self) -> "list[Counted]":
        return [each for each in self.generators() if each.can_be_entered]

    def _variables(self) -> tuple[dict[str, Any], list[str]]:
        """Return a generator's variables, and which are what another process's has made by itself, as functions are."""
        values = self.variables.values()
        made = [name for name, value in values.items() if value is self._made.get(name) and not _is_carried(value)]
        return {name: value for name, value in values.items() if name not in made}, made

    def position(self) -> dict[str, Any]:
        """Return how far it is, and what another process needs to get there.

        Raises:
            NotCarriedError: no other process could.
        """
        if self._unseen:
            raise NotCarriedError(f"what {type(self.iterable).__name__} hands out can't be looked at: {self._unseen}")
        if self._beside and generators() != self._begun_with:
            raise NotCarriedError(drawn_beside(self._beside))
        inside = self._iterator if isinstance(self._iterator, Counted) else None
        if inside is not None and inside.count - self._began_at != self.count:
            raise NotCarriedError("an iterator that the body of its loop asks for items, too")
        if self._generator_states is None and inside is None:
            raise NotCarriedError(
                f"what draws random numbers for more than {MOST_DRAWN} of its items ({type(self.iterable).__name__})"
            )
        kept = isinstance(self._iterator, _BaseDataLoaderIter) and self._iterator._persistent_workers  # noqa: SLF001
        if kept and not isinstance(self._iterator, KeptWorkers):
            raise NotCarriedError(KEPT_WORKERS)
        return {
            "count": self.count,
            "over": self.exhausted,
            "drawn": dict(self._generator_states or {}) if inside is None else {},
            "heard": self.results.to_list(),
            "last": changed(self._last, self._first) if _skips(self._iterator) else [],
            "seen": self._seen,
            "within": inside.position() if inside is not None else None,
            "loops": self._positions_of_loops() if self.can_be_entered else {},
        }

    @property
    def _seen(self) -> tuple[int, int]:
        return self._item_seen, 0 if self.can_be_entered else _look_into(self._iterator)

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
                f"{describe(self._iterator)} fails when it is run forward alone, to item {saved['count']}: "
                f"{brief(error)}; let what it hands out depend on nothing that the body of its loop changes"
            ) from error

    def begin_anew(self, iterable: Iterable[Any], saved: dict[str, Any]) -> None:
        """Go over this, as it was when the other one was made, and advance to its position; leave it as it is now."""
        now = [(thing, kind.state(thing)) for thing, _ in saved["first"] if (kind := kind_of(thing)) is not None]
        if (states := saved["drawn"].get(0)) is not None:
            set_generators(states)
        restore_parts(saved["first"])
        self._begin(iterable, RUNNING)
        self.advance_to(saved)
        restore_parts(now)

    def _advance_to(self, saved: dict[str, Any]) -> Any:
        if saved["over"]:
            self._iterator, self.count, self.exhausted = iter(()), saved["count"], True
        self.results, self.is_replaying, item = KnownResults(saved["heard"], self.results), True, self._reached
        if self.count < saved["count"] and saved["within"] is not None and isinstance(self._iterator, Counted):
            item, self.count = self._iterator.advance_to(saved["within"]), saved["count"]
            self._item_seen = self._iterator._item_seen  # noqa: SLF001 the same item
            self._began_at = self._iterator.count - self.count
        elif self.count < saved["count"] and saved["loops"]:
            item = self._enter(saved)
        while self.count < saved["count"]:
            item = self._step_towards(saved)
            if self.exhausted and not saved["over"]:
                raise NotCarriedError(f"{describe(self._iterator)} has only {self.count - 1} items here")
        if not self.exhausted and self._seen != saved["seen"]:
            raise NotCarriedError(f"{describe(self._iterator)} hands out something else when begun anew")
        for each, (variables, made) in zip(self._entered(), saved.get("variables", ()), strict=False):
            each.variables.assign(variables, {*variables, *made})
        self._generator_states, self.is_replaying, self._reached = dict(saved["drawn"]), False, item
        return item

    def _step_towards(self, saved: dict[str, Any]) -> Any:
        """Go over the next item on the way to a position; return it, unless it is dropped and need not be loaded."""
        left, skips = saved["count"] - self.count, self.count and _skips(self._iterator)
        if (states := saved["drawn"].get(self.count + 1)) is not None:
            set_generators(states)
        if left > 1 and skips:
            loader: Any = self._iterator
            self.exhausted = next(loader._sampler_iter, None) is None  # noqa: SLF001
            loader._num_yielded += 1  # noqa: SLF001
            self.count += 1
            return None
        if skips:
            restore_parts(saved["last"])
        return next(self, None)


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


def _only_loads(iterator: Any) -> bool:
    """Return whether an iterator of another kind goes over one of those, so that it draws for loading, as a rule."""
    inside = [*gc.get_referents(iterator), *getattr(iterator, "__dict__", {}).values()]
    return any(_skips(each._iterator if isinstance(each, Counted) else each) for each in inside)  # noqa: SLF001


def _is_carried(value: Any) -> bool:
    """Return whether another process may be given something by its value."""
    kind = kind_of(value)
    return kind is not FUNCTION and not isinstance(kind, Opaque)


def _look_into(iterator: Any) -> int:
    """Return something that differs with the position of a generator, as far as that can be seen.

    Of what only loads, it differs with the items that it holds; it is 0 of others.
    """
    if not isinstance(iterator, GeneratorType) or iterator.gi_frame is None:
        held = [each for each in getattr(iterator, "__dict__", {}).items() if isinstance(each[1], HOLDERS)]
        return fingerprint(held) if held and _only_loads(iterator) else 0
    if iterator.gi_frame.f_globals.get("__name__", "").partition(".")[0] in BARS:
        return 0  # clocks
    return fingerprint([("", iterator.gi_frame.f_lasti), *iterator.gi_frame.f_locals.items()])


def describe(iterator: Any) -> str:
    """Return what an iterator is, for people: of a generator, its function and where that begins."""
    if isinstance(iterator, Counted):
        return describe(iterator._iterator)  # noqa: SLF001
    if isinstance(iterator, GeneratorType):
        code = iterator.gi_code
        return f"the generator `{iterator.__qualname__}` ({Path(code.co_filename).name}:{code.co_firstlineno})"
    return f"the iterator {type(iterator).__qualname__}"
