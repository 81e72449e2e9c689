"""Progress bars: what they count is carried, and how they show it is left with the process.

They are known by the library that their class, or one of its bases, is from: a script may call and wrap them as it
likes. When a bar was drawn last, and how fast it goes, depends on clocks; its file, lock and row are this process's.
"""

import dis
import functools
import gc
import inspect
import types
import weakref
from typing import Any

from unicron.train.carry.kinds import ATTRIBUTES, Kind, Parts

LIBRARIES = frozenset({"tqdm", "rich", "progressbar", "alive_progress", "enlighten"})
COUNTS = frozenset(
    {
        *("n", "total", "initial", "iterable", "desc", "postfix", "unit", "disable", "leave"),
        *("value", "max_value", "min_value", "currval", "maxval", "count"),
        *("id", "description", "completed", "visible", "fields", "_tasks", "_task_index"),
    }
)
"""Attributes of a library's bars that depend on what the script does alone."""

_OPTIONS = ("total", "desc", "leave", "disable", "unit")
_drivers = weakref.WeakKeyDictionary[Any, Any]()
"""Generators that go over bars' items; a bar's own count lags behind theirs."""


def library_of(cls: Any) -> str:
    """Return the library of progress bars that a class is from, empty where it is from none."""
    roots = [(each.__module__ or "").partition(".")[0] for each in cls.__mro__]
    return next((root for root in roots if root in LIBRARIES), "")


@functools.cache
def left_names(cls: Any) -> frozenset[str]:
    """Return the attributes that a library's own code sets, and that are no counts."""
    found = set[str]()
    for each in cls.__mro__:
        if (each.__module__ or "").partition(".")[0] in LIBRARIES:
            functions = [_unwrapped(member) for member in vars(each).values()]
            codes = [member.__code__ for member in functions if isinstance(member, types.FunctionType)]
            found |= {at.argval for code in codes for at in dis.get_instructions(code) if at.opname == "STORE_ATTR"}
    return frozenset(found - COUNTS)


def _unwrapped(member: Any) -> Any:
    while isinstance(member, functools.partial | functools.partialmethod):
        member = member.func
    return inspect.unwrap(member) if callable(member) else member


class _Bar(Kind):
    """Bars, by their counts and what the script has added to them."""

    exact = True

    def parts(self, thing: Any) -> Parts:
        cls: Any = type(thing)
        left = left_names(cls)
        found = [(name, value) for name, value in ATTRIBUTES.parts(thing) if name not in left]
        count = _driven_count(thing)
        return found if count is None else [(name, count if name == "n" else value) for name, value in found]

    def fingerprint(self, thing: Any) -> tuple[Any, ...]:
        return tuple(part for pair in self.parts(thing) for part in pair)

    def state(self, thing: Any) -> Any:
        return self.parts(thing)

    def set_state(self, thing: Any, state: Any) -> None:
        new = dict(state)
        if _driver(thing) is not None:  # its own count
            del new["n"]
        for name, _ in self.parts(thing):
            if name not in new and name not in COUNTS:
                delattr(thing, name)
        vars(thing).update(new)
        if "n" in new and hasattr(thing, "last_print_n"):
            thing.last_print_n = new["n"]


def _driver(bar: Any) -> Any:
    """Return the generator that goes over a bar's items, None where there is none."""
    if getattr(bar, "iterable", None) is None or getattr(bar, "disable", False):
        return None
    known = _drivers.get(bar)
    if known is not None:
        return known() if known else None
    own = [each for each in gc.get_referrers(bar) if isinstance(each, types.GeneratorType)]
    driver = next(
        (each for each in own if each.gi_frame is not None and each.gi_frame.f_locals.get("self") is bar), None
    )
    if driver is not None or bar.n:  # none will come any more: the script counts by itself
        _drivers[bar] = weakref.ref(driver) if driver is not None else ()
    return driver


def _driven_count(bar: Any) -> int | None:
    driver = _driver(bar)
    return None if driver is None or driver.gi_frame is None else driver.gi_frame.f_locals.get("n")


def new_bar(cls: Any, iterable: Any, count: int, options: dict[str, Any], own: dict[str, Any]) -> Any:
    """Return a bar at a count."""
    bar = cls(iterable, initial=count, **options)
    vars(bar).update(own)
    return bar


def remade(bar: Any) -> Any:
    """Return how pickle makes a bar anew, as one that works in another process."""
    parts = dict(BAR.parts(bar))
    options = {name: parts.pop(name) for name in _OPTIONS if name in parts}
    iterable, count = parts.pop("iterable", None), parts.pop("n", 0)
    return new_bar, (type(bar), iterable, count, options, parts)


BAR = _Bar()
