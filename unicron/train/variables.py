"""The plain values of a script's variables, which is what it holds besides models, optimizers and data."""

import contextlib
import ctypes
import io
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

import msgpack
import torch

from unicron.errors import InvalidInputError
from unicron.train.heard import Heard
from unicron.train.instrument import holds_state

MOST, MOST_PACKED = 10_000, 100_000
"""Values of a list or dictionary that are copied at each head, one by one or, of numbers and texts, in one go; a longer
one is the script's data, not its progress."""

LEAST_BYTES = 1 << 20
"""Tensors that take more are data, too."""

DEEPEST, MOST_OBJECTS = 6, 64
"""Attributes of attributes that are looked at; a list of more objects, or of more groups of tensors, is data."""

PLAIN = (type(None), bool, int, float, str, bytes)
_NOT_PLAIN = object()


class Packed(bytes):
    """A copy of a list or dictionary of numbers and texts: made, and compared, without a look at each."""


class Counted(Iterator[Any]):
    """An iterator of a script that knows how far it is. What is random in it depends on that alone.

    Args:
        over: what it goes over.
        seed: seeds what is random for an item of that number.
        running: those that are just finding their next item.

    Attributes:
        within: what it goes over.
        count: items that were asked for.
        over: there are no more.
        heard: what collectives have given in finding them.
        goes: it is just going to where another one is.
    """

    def __init__(self, over: Iterable[Any], seed: Callable[[int], None], running: "list[Counted]") -> None:
        self.within, self._iterator, self._seed, self._running = over, iter(over), seed, running
        self.count, self.over, self.heard, self.goes = 0, False, Heard(), False

    def __next__(self) -> Any:
        """Return the next item."""
        numpy = sys.modules.get("numpy")
        before = torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None
        self._running.append(self)
        try:
            self._seed(self.count)
            self.count += 1
            return next(self._iterator)
        except StopIteration:
            self.over = True
            raise
        finally:
            self._running.pop()
            torch.set_rng_state(before[0])
            random.setstate(before[1])
            if numpy:
                numpy.random.set_state(before[2])

    def saved(self) -> dict[str, Any]:
        """Return how far it is."""
        return {"count": self.count, "over": self.over, "heard": self.heard.saved()}

    def go_to(self, saved: dict[str, Any]) -> None:
        """Be as far as another one is; items that it has handed out are found once more, and dropped."""
        if saved["over"]:
            self._iterator, self.count, self.over = iter(()), saved["count"], True
        self.heard, self.goes = Heard(saved["heard"], self.heard), True
        while self.count < saved["count"]:
            next(self, None)
        self.goes = False


class Space:
    """The variables of a function that runs loops, or of a module.

    Args:
        scope: the function's frame, or the module's variables.
        place: of the loop that is run first.

    Attributes:
        before: copies of them as that loop began.
    """

    def __init__(self, scope: FrameType | dict[str, Any], place: str) -> None:
        self.scope = scope
        self.before = self.copies(place)

    @property
    def _variables(self) -> dict[str, Any]:
        return self.scope if isinstance(self.scope, dict) else self.scope.f_locals

    def take(self, values: Mapping[str, Any]) -> None:
        """Have the variables be what they are elsewhere."""
        variables = self._variables
        for path, value in values.items():
            *way, name = path.split(".")
            holder = variables[way[0]] if way else None
            for each in way[1:]:
                holder = holder[int(each)] if isinstance(holder, list) else getattr(holder, each)
            there = getattr(holder, name, None) if way else variables.get(name)
            if isinstance(there, Counted):
                there.go_to(value)
            elif way:
                setattr(holder, name, value)
            else:
                variables[name] = value
        # from 3.13 on they are written through (PEP 667)
        if not isinstance(self.scope, dict) and sys.version_info < (3, 13):
            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(self.scope), ctypes.c_int(0))

    def copies(self, place: str) -> dict[str, Any]:
        """Return copies of the plain values, those of its objects' attributes too.

        Raises:
            InvalidInputError: an iterator, about which nothing is known; it names the loop at `place`.
        """
        found: dict[str, Any] = {}
        own = [(name, value) for name, value in self._variables.items() if not name.startswith("__")]
        parts = [part for each in own for part in _parts(*each)]
        counted = {id(each.within) for _, each in parts if isinstance(each, Counted)}
        for path, each in parts:
            if isinstance(each, Iterator) and not isinstance(each, Counted | io.IOBase) and id(each) not in counted:
                raise InvalidInputError(
                    f"the loop at {place} uses `{path}`, an iterator ({type(each).__name__}), which can't be brought "
                    "to where it is on another worker: loop over it with `for`, make it with `iter()` in the function "
                    "that loops, or set `heal: restart`"
                )
            copied = each.saved() if isinstance(each, Counted) else _copied(each)
            if copied is not _NOT_PLAIN:
                found[path] = copied
        return found


def differing(copies: Mapping[str, Any], before: Mapping[str, Any], left_out: set[str]) -> dict[str, Any]:
    """Return what is not what it was before."""
    return {
        name: each
        for name, each in copies.items()
        if name not in left_out and (name not in before or not _same(each, before[name]))
    }


def unpacked(copies: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies with nothing packed in them."""
    return {name: _unpacked(each) for name, each in copies.items()}


def _unpacked(value: Any) -> Any:
    if isinstance(value, Packed):
        return msgpack.unpackb(value, strict_map_key=False)
    if type(value) is dict:
        return {name: _unpacked(each) for name, each in value.items()}
    return type(value)(map(_unpacked, value)) if type(value) in {list, tuple} else value


def _parts(name: str, variable: Any) -> Iterable[tuple[str, Any]]:
    """Yield a variable, or the attributes of one that holds where a program is, each with its shortest path."""
    found, seen = [(name, variable, 0)], set[int]()
    for path, value, depth in found:  # which grows meanwhile
        if depth > DEEPEST or not _holds(value):
            yield path, value
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))
        for attribute, each in vars(value).items():
            there = f"{path}.{attribute}"
            if type(each) is list and len(each) <= MOST_OBJECTS and any(map(_holds, each)):
                found += [(f"{there}.{place}", one, depth + 1) for place, one in enumerate(each) if _holds(one)]
            else:
                found.append((there, each, depth + 1))


def _holds(value: Any) -> bool:
    own = holds_state(value.__class__) and not isinstance(value, torch.nn.Module | type)
    return own and hasattr(value, "__dict__")


def _copied(value: Any) -> Any:
    """Return a copy of what is plain, `_NOT_PLAIN` of all else."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        kept = not isinstance(value, torch.nn.Parameter) and value.nbytes <= LEAST_BYTES
        return value.detach().clone() if kept else _NOT_PLAIN
    return _copied_group(value) if type(value) in {list, tuple, dict} else _NOT_PLAIN


def _copied_group(value: Any) -> Any:
    if len(value) > MOST_PACKED:
        return _NOT_PLAIN
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        return Packed(msgpack.packb(value, strict_types=True))
    data = len(value) > MOST_OBJECTS and type(value) is not dict and _has_tensors(value[0])
    if data or len(value) > MOST:
        return _NOT_PLAIN
    each = {key: _copied(part) for key, part in (value.items() if type(value) is dict else enumerate(value))}
    if any(part is _NOT_PLAIN for part in each.values()) or not all(isinstance(key, str | int) for key in each):
        return _NOT_PLAIN
    return each if type(value) is dict else type(value)(each.values())


def _has_tensors(group: Any) -> bool:
    parts = group.values() if type(group) is dict else group if type(group) in {list, tuple} else ()
    return any(isinstance(each, torch.Tensor) for each in parts)


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(each, other[key]) for key, each in one.items())
    return bool(one == other)
