"""The graph of objects that a script's variables lead to: their kinds, and the state of each kind.

An object's own state is what it holds by itself: of a list its items, of an instance its attributes. What these lead to
is looked at by itself. So whether something has changed is seen by the identity of what it holds, exactly and fast.
"""

import collections
import functools
import itertools
import sys
import types
from collections.abc import Callable, Collection
from typing import Any

from unicron.errors import InvalidInputError
from unicron.train.carry.values import NUMBERS, is_same
from unicron.train.carry.variables import NAME

Parts = list[tuple[Any, Any]]
"""An object's parts, with their names: attributes, keys, places."""


_ABSENT = object()


class NotCarriedError(InvalidInputError):
    """Something of a script can't be had by another process; its text names it."""


class GraphKeptError(Exception):
    """A tensor has the graph by which it was computed, which another process has not."""


class OwnCheckpointNewerError(NotCarriedError):
    """A script has begun from a checkpoint of its own that is newer than the snapshot to be taken, and so than any."""


class NotComparedError(NotCarriedError):
    """Something is too large to go along, and other ranks have it in a moment: once ranks have been compared."""


class Kind:
    """Objects of a kind, whose state can be looked at, taken, and put into another one of the kind.

    Attributes:
        exact: what `fingerprint` returns is compared by identity, and what is plain by type and value; else its first
            item is compared by what it says itself.
    """

    exact = True

    def parts(self, thing: Any) -> Parts:
        """Return what the object leads to, in an order that is the same in a process that did the same."""
        return [*enumerate(self.fingerprint(thing))]

    def fingerprint(self, thing: Any) -> tuple[Any, ...]:
        """Return what shows whether the object's own state has changed."""
        raise NotImplementedError

    def views(self, thing: Any) -> tuple[Collection[Any], ...]:  # noqa: ARG002
        """Return what holds all that `look` returns, in its order, now and later; nothing where there is no such."""
        return ()

    def state(self, thing: Any) -> Any:
        """Return the object's own state."""
        return self.fingerprint(thing)

    def set_state(self, thing: Any, state: Any) -> None:
        """Have the object be in a state."""
        raise NotImplementedError


class _Attributes(Kind):
    """Instances of classes, by their attributes."""

    def parts(self, thing: Any) -> Parts:
        found = [*vars(thing).items()] if hasattr(thing, "__dict__") else []
        return found + [(name, getattr(thing, name)) for name in slots_of(thing) if hasattr(thing, name)]

    def fingerprint(self, thing: Any) -> tuple[Any, ...]:
        attributes = getattr(thing, "__dict__", {})  # the many that there are of these are looked at in each iteration
        return *attributes, *attributes.values(), *(getattr(thing, name, _ABSENT) for name in slots_of(thing))

    def views(self, thing: Any) -> tuple[Collection[Any], ...]:
        attributes = getattr(thing, "__dict__", None)
        return (attributes, attributes.values()) if type(attributes) is dict and not slots_of(thing) else ()

    def state(self, thing: Any) -> Any:
        return self.parts(thing)

    def set_state(self, thing: Any, state: Any) -> None:
        own = slots_of(thing)
        if hasattr(thing, "__dict__"):
            attributes = {name: value for name, value in state if name not in own}
            if list(vars(thing)) != list(attributes):
                vars(thing).clear()
            vars(thing).update(attributes)
        given = dict(state)
        for name in own:
            if name in given:
                object.__setattr__(thing, name, given[name])
            elif hasattr(thing, name):
                object.__delattr__(thing, name)


class _Attached(_Attributes):
    """What a script has attached to an object whose own state goes another way."""

    def parts(self, thing: Any) -> Parts:
        return [*vars(thing).items()] if hasattr(thing, "__dict__") else []

    def set_state(self, thing: Any, state: Any) -> None:
        vars(thing).clear()
        vars(thing).update(state)


class _Module(_Attributes):
    """Modules of torch. Hooks that are no script's are left alone: torch makes its own as a model is first used."""

    def parts(self, thing: Any) -> Parts:
        own = own_hooks(thing)
        return [
            (name, value)
            for name, value in super().parts(thing)
            if name in own or not (_are_hooks(name, value) or name in _unwalked(thing))
        ]

    def set_state(self, thing: Any, state: Any) -> None:
        kept = dict(state)
        for name, value in [*vars(thing).items()]:
            if name not in kept and not (_are_hooks(name, value) or name in _unwalked(thing)):
                del vars(thing)[name]
        vars(thing).update(kept)


def _unwalked(thing: Any) -> Collection[str]:
    """Return the attributes of a module of ours that lead only to what its other ones do: names would go by them."""
    found: Collection[str] = getattr(type(thing), "unwalked", ())
    return found


def _are_hooks(name: str, value: Any) -> bool:
    return "_hooks" in name and isinstance(value, dict)


def own_hooks(thing: Any) -> dict[str, Any]:
    """Return those of the dictionaries of a module's hooks that have any of the script's, by name.

    Where there are such, those that are empty are among them: handles of hooks refer to them.
    """
    there = {name: hooks for name, hooks in vars(thing).items() if isinstance(hooks, dict) and "_hooks" in name}
    if not any(there.values()):
        return {}
    own = {number for hooks in there.values() for number, each in hooks.items() if is_of_script(each)}
    return {name: hooks for name, hooks in there.items() if own and (own & hooks.keys() or not hooks)}


def is_of_script(hook: Any) -> bool:
    """Return whether a hook is a function of the script."""
    return NAME in getattr(getattr(hook, "hook", hook), "__globals__", ())


class _Optimizer(_Attributes):
    """Optimizers, by their own attributes and the options of their groups: moments go with the state that all have."""

    def parts(self, thing: Any) -> Parts:
        groups = enumerate(self._options(thing))
        functions = (
            (f"param_groups.{number}.{name}", value)
            for number, each in groups
            for name, value in each.items()
            if isinstance(value, types.FunctionType)
        )
        return [*self._own(thing), *functions]

    def _own(self, thing: Any) -> Parts:
        return [(name, value) for name, value in super().parts(thing) if name not in _CARRIED]

    def _options(self, thing: Any) -> list[dict[str, Any]]:
        return [{name: value for name, value in each.items() if name != "params"} for each in thing.param_groups]

    def fingerprint(self, thing: Any) -> tuple[Any, ...]:
        return tuple(itertools.chain.from_iterable(self.parts(thing)))

    def views(self, thing: Any) -> tuple[Collection[Any], ...]:  # noqa: ARG002
        return ()

    def state(self, thing: Any) -> Any:
        return self._own(thing), self._options(thing)

    def set_state(self, thing: Any, state: Any) -> None:
        own, options = dict(state[0]), state[1]
        for name in vars(thing).keys() - own.keys() - _CARRIED:
            del vars(thing)[name]
        vars(thing).update(own)
        for group, each in zip(thing.param_groups, options, strict=True):
            for name in group.keys() - each.keys() - {"params"}:
                del group[name]
            group.update(each)


_CARRIED = frozenset({"state", "param_groups", "defaults"})

ATTRIBUTES, ATTACHED, MODULE, OPTIMIZER = _Attributes(), _Attached(), _Module(), _Optimizer()


class _Holding(Kind):
    """Containers, by what is in them; those of a script's own classes have attributes, too."""

    def __init__(
        self,
        look: Callable[[Any], tuple[Any, ...]],
        items: Callable[[Any], Parts],
        refill: Callable[[Any, list[Any]], None],
    ) -> None:
        self._look, self._items, self._refill = look, items, refill

    def parts(self, thing: Any) -> Parts:
        return self._items(thing) + (ATTRIBUTES.parts(thing) if type(thing) not in _BUILT_IN else [])

    def fingerprint(self, thing: Any) -> tuple[Any, ...]:
        own = self._look(thing)
        return own if type(thing) in _BUILT_IN else (*own, *ATTRIBUTES.fingerprint(thing))

    def views(self, thing: Any) -> tuple[Collection[Any], ...]:
        if type(thing) not in _BUILT_IN:
            return ()
        return (thing, thing.values()) if isinstance(thing, dict) else (thing,)

    def state(self, thing: Any) -> Any:
        return self._items(thing), ATTRIBUTES.parts(thing) if type(thing) not in _BUILT_IN else None

    def set_state(self, thing: Any, state: Any) -> None:
        self._refill(thing, state[0])
        if state[1] is not None:
            ATTRIBUTES.set_state(thing, state[1])


_BUILT_IN = {dict, list, set, collections.deque, collections.defaultdict, collections.OrderedDict}


def _refill_list(thing: Any, items: list[Any]) -> None:
    thing.clear()
    thing.extend(value for _, value in items)


def _refill_dict(thing: Any, items: list[Any]) -> None:
    set_item = collections.OrderedDict.__setitem__ if isinstance(thing, collections.OrderedDict) else dict.__setitem__
    clear = collections.OrderedDict.clear if isinstance(thing, collections.OrderedDict) else dict.clear
    clear(thing)  # a class of the script's may do more
    for key, value in items:
        set_item(thing, key, value)


def refill_set(thing: Any, items: list[Any]) -> None:
    """Have a set hold these items, in their order if it is the same in all processes."""
    thing.clear()
    thing.update(value for name, value in items if name == "?")
    check_order(thing, items)


def items_of_set(thing: Any) -> Parts:
    """Return the items of a set; with its size in memory if its order is the same in all processes, as of numbers."""
    found = [("?", each) for each in thing]
    return [*found, ("size", sys.getsizeof(thing))] if all(type(each) in NUMBERS for each in thing) else found


def check_order(thing: Any, items: list[Any]) -> None:
    """Check whether a set has the order that another has, and will have as more is added.

    Raises:
        NotCarriedError: it has another, as items were taken from the other one.
    """
    if items and items[-1][0] == "size" and not is_same((*items_of_set(thing),), (*items,)):
        raise NotCarriedError("a set of numbers from which some were taken, so that its order is no other's: sort it")


class _Cell(Kind):
    def parts(self, thing: Any) -> Parts:
        try:
            return [("cell", thing.cell_contents)]
        except ValueError:
            return []

    def fingerprint(self, thing: Any) -> tuple[Any, ...]:
        return tuple(value for _, value in self.parts(thing))

    def set_state(self, thing: Any, state: Any) -> None:
        if state:
            thing.cell_contents = state[0]


class _Function(Kind):
    """Functions, by their closures, defaults and attributes; a library's own are as they are in each process."""

    def parts(self, thing: Any) -> Parts:
        if NAME not in thing.__globals__ and not thing.__closure__:
            return []
        found: Parts = [*zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True)]
        found += [*enumerate(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).items()]
        return [*found, *vars(thing).items()]

    def fingerprint(self, thing: Any) -> tuple[Any, ...]:
        if NAME not in thing.__globals__:  # torch sets attributes of some as they are first called
            return ()
        return thing.__defaults__, thing.__kwdefaults__, *vars(thing).values()

    def state(self, thing: Any) -> Any:
        return thing.__defaults__, thing.__kwdefaults__, dict(vars(thing))

    def set_state(self, thing: Any, state: Any) -> None:
        thing.__defaults__, thing.__kwdefaults__ = state[:2]
        vars(thing).update(state[2])


class _Partial(Kind):
    """What functools.partial makes."""

    def parts(self, thing: Any) -> Parts:
        return [("func", thing.func), ("args", thing.args), ("keywords", thing.keywords), *vars(thing).items()]

    def fingerprint(self, thing: Any) -> tuple[Any, ...]:
        return thing.func, thing.args, thing.keywords, *itertools.chain.from_iterable(vars(thing).items())

    def state(self, thing: Any) -> Any:
        return thing.func, thing.args, thing.keywords, dict(vars(thing))

    def set_state(self, thing: Any, state: Any) -> None:
        thing.__setstate__(state)


class _Class(Kind):
    """Classes of the script, by attributes that are no methods."""

    def parts(self, thing: Any) -> Parts:
        if getattr(sys.modules.get(thing.__module__), NAME, None) is None:
            return []
        return [
            (name, value)
            for name, value in vars(thing).items()
            if not (name.startswith("__") or isinstance(value, types.FunctionType) or hasattr(type(value), "__get__"))
        ]

    def fingerprint(self, thing: Any) -> tuple[Any, ...]:
        return tuple(itertools.chain.from_iterable(self.parts(thing)))

    def state(self, thing: Any) -> Any:
        return self.parts(thing)

    def set_state(self, thing: Any, state: Any) -> None:
        for name, value in state:
            type.__setattr__(thing, name, value)


LIST = _Holding(tuple, lambda thing: [*enumerate(thing)], _refill_list)
DICT = _Holding(lambda thing: (*thing, *thing.values()), lambda thing: [*thing.items()], _refill_dict)
SET = _Holding(tuple, items_of_set, refill_set)
CELL, FUNCTION, PARTIAL, CLASS = _Cell(), _Function(), _Partial(), _Class()


def slots_of(thing: Any) -> tuple[str, ...]:
    """Return the names of an object's slots."""
    cls: Any = type(thing)
    return slots(cls)


@functools.cache
def slots(kind: Any) -> tuple[str, ...]:
    """Return the names of a class's slots."""
    found: list[str] = []
    for each in kind.__mro__:
        own = vars(each).get("__slots__", ())
        found += (own,) if isinstance(own, str) else own
    return tuple(name for name in found if name not in {"__weakref__", "__dict__"})
