"""Kinds of objects that are compared by value, left alone, or pickled with what holds them."""

import gc
import itertools
import types
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from unicron.train.carry.kinds import ATTACHED, Kind, Parts
from unicron.train.carry.values import is_plain
from unicron.train.carry.variables import NAME


class ByValue(Kind):
    """An object that is compared by its value; what it leads to are attributes that the script has given it."""

    exact = False

    def __init__(self, state: Callable[[Any], Any], put: Callable[[Any, Any], None], look: Any = None) -> None:
        self._state, self._put, self._look = state, put, look

    def parts(self, thing: Any) -> Parts:
        """Return its attributes."""
        return ATTACHED.parts(thing)

    def fingerprint(self, thing: Any) -> tuple[Any, ...]:
        """Return its value, or something that differs when it does."""
        return (self._look or self._state)(thing), *itertools.chain.from_iterable(ATTACHED.parts(thing))

    def state(self, thing: Any) -> Any:
        """Return its value."""
        return self._state(thing), ATTACHED.parts(thing)

    def set_state(self, thing: Any, state: Any) -> None:
        """Set its value."""
        self._put(thing, state[0])
        if hasattr(thing, "__dict__"):
            ATTACHED.set_state(thing, state[1])


class Position(ByValue):
    """An iterator, whose attributes are its own."""

    def parts(self, thing: Any) -> Parts:  # noqa: ARG002
        """Return none."""
        return []

    def fingerprint(self, thing: Any) -> tuple[Any, ...]:
        """Return how far it is."""
        return ((self._look or self._state)(thing),)

    def state(self, thing: Any) -> Any:
        """Return where it is."""
        return self._state(thing)

    def set_state(self, thing: Any, state: Any) -> None:
        """Have it be there."""
        self._put(thing, state)


class Opaque(Kind):
    """An object that is left alone: of this process, or carried by other means."""

    def parts(self, thing: Any) -> Parts:  # noqa: ARG002
        """Return none."""
        return []

    def fingerprint(self, thing: Any) -> tuple[Any, ...]:  # noqa: ARG002
        """Return nothing."""
        return ()

    exact = False


class Hidden(Opaque):
    """An object whose change can be detected, though it can't be restored elsewhere."""

    def __init__(self, look: Callable[[Any], Any]) -> None:
        self._look = look

    def fingerprint(self, thing: Any) -> tuple[Any, ...]:
        """Return what shows a change."""
        return (self._look(thing),)


class Inline(Kind):
    """An object that is pickled in place, as it can't be changed or is made anew."""

    def parts(self, thing: Any) -> Parts:
        """Return what it is made of."""
        if isinstance(thing, types.MethodType):
            return [("__self__", thing.__self__), ("__func__", thing.__func__)]
        if isinstance(thing, types.BuiltinFunctionType):
            return [("__self__", thing.__self__)]
        if isinstance(thing, weakref.ref):
            return [("()", thing())]
        if isinstance(thing, tuple | frozenset):
            return [*enumerate(thing)]
        reduced = thing.__reduce__()
        return [] if isinstance(reduced, str) else [*enumerate(reduced[1])]


class ObjectArray(Kind):
    """Arrays of objects, by what they hold."""

    def parts(self, thing: Any) -> Parts:
        """Return the objects."""
        return [*enumerate(thing.flat)]

    def fingerprint(self, thing: Any) -> tuple[Any, ...]:
        """Return the objects, and how they are laid out."""
        return *thing.flat, thing.shape

    def state(self, thing: Any) -> Any:
        """Return them by their places."""
        return thing.shape, [*zip(itertools.product(*map(range, thing.shape)), thing.flat, strict=True)]

    def set_state(self, thing: Any, state: Any) -> None:
        """Have it hold these."""
        shape, items = state
        if thing.shape != shape:
            thing.resize(shape, refcheck=False)
        for place, each in items:
            thing[place] = each


def look_at_cache(thing: Any) -> Any:
    """Return what shows whether a cached function of the script has come to hold something that can change.

    Values that never change each process computes anew, and so it does all that libraries keep.
    """
    if NAME not in getattr(thing.__wrapped__, "__globals__", ()):
        return None
    results = _cached(thing)
    if len(results) != thing.cache_info().currsize:
        return thing.cache_info()
    return tuple(id(each) for each in results if not _never_changes(each))


def _cached(thing: Any) -> list[Any]:
    """Return the results that a cached function holds; some others where this Python keeps them elsewhere."""
    held = gc.get_referents(thing)
    place = next((place for place, each in enumerate(held) if type(each) is dict), 0)
    if thing.cache_parameters()["maxsize"] is None:
        return [*held[place].values()] if place else []
    return [each for each, link in pairwise(held[:place]) if getattr(link, "__name__", "") == "_lru_list_elem"]


def _never_changes(thing: Any) -> bool:
    if type(thing) in {tuple, frozenset}:
        return all(map(_never_changes, thing))
    return is_plain(type(thing)) or isinstance(thing, type)
