"""Compares values, and snapshots of a script, and says where they first differ."""

import collections
import copyreg
import functools
import io
import operator
import random
import sys
import types
import weakref
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch

from unicron.train.carry.bars import BAR, library_of
from unicron.train.carry.inert import Made, Reader, read, shown, without_aids
from unicron.train.carry.kinds import NotCarriedError, slots
from unicron.train.carry.values import bits_of, value_of
from unicron.train.carry.variables import space_name

Pairs = list[tuple[str, Any, Any]]
"""Parts of two values that are to be compared, each with the path to it."""

GRADIENTS = "the gradients"

ITEMS_SHOWN, BYTES_SHOWN = 2, 16

_IDENTICAL = (type, types.ModuleType, types.CodeType, torch.dtype)
_SHARED = (list, dict, set, bytearray, collections.deque, torch.Tensor)
"""Containers that can be changed: whoever shares one sees what another does to it."""


_MADE_ANEW = (tuple, frozenset, types.MethodType, types.BuiltinFunctionType, weakref.ref)
_MADE_SHARED, _NEVER_CHANGED = {"_tensor", "_frombuffer", "_reconstruct"}, {"dtype"}
_SHOWN_ONLY = {"new_bar"}


class _Nothing:
    def __repr__(self) -> str:
        return "nothing"


_NOTHING = _Nothing()


def never_read(snapshot: bytes) -> set[Any]:
    """Return the keys of the variables that a snapshot leaves out, as each is set before anybody reads it."""
    variables, *_ = Reader(io.BytesIO(snapshot)).load()
    return {
        ("", space, name)
        for space, values, names, as_first, *_ in variables
        for name in names
        if name not in values and name not in as_first
    }


def snapshot_differences(ours: bytes, theirs: bytes, dead: AbstractSet[Any] = frozenset()) -> dict[str, str]:
    """Return where two snapshots of a script differ, by the name of a variable, each where it does first.

    Args:
        ours: of a process that began from another snapshot.
        theirs: of the one that was there all the while.
        dead: variables that the snapshot had left out from which ours began: those that are not set yet are not missed.
    """
    mine, other = _Snapshot(ours), _Snapshot(theirs)
    partners, found = _Partners(), dict[str, str]()
    for key, name in (mine.names | other.names).items():
        if key in dead and key not in mine.parts:
            continue
        if key not in mine.left_out | other.left_out:
            pair = mine.parts.get(key, _NOTHING), other.parts.get(key, _NOTHING)
            if where := _first_difference([(name, *pair)], partners):
                found[name] = where
    return found


class _Snapshot:
    """A snapshot of a script as it is compared.

    Attributes:
        parts: variables, states of objects and generators, by key.
        names: for people, likewise.
        left_out: keys of what is not compared: objects that nothing leads to any more, gradients that are made anew.
    """

    def __init__(self, data: bytes) -> None:
        reader = Reader(io.BytesIO(data))
        variables, entries, states, gradients, summed, *_ = reader.load()
        self.parts, self.names, self.left_out = dict[Any, Any](), dict[Any, str](), set[Any]()
        for space, values, *_ in variables:
            for name, value in values.items():
                self._add(("", space, name), f"`{name}` of {space_name(space)}", value)
        rebound = {key[1:] for key in self.parts if isinstance(key, tuple)}
        changed = rebound | {key[1:] for key, _ in entries}
        for key, state in entries:
            self._add((*key, ""), f"`{'.'.join(map(str, key[2:]))}` of {space_name(key[1])}", state)
            if (key[1:] in rebound or key[1:-1] in changed) and key not in reader.referred:
                self.left_out.add((*key, ""))  # what held it has something else now, and nothing refers to it
            if isinstance(state, list) and {"n", "iterable"} <= {name for name, *_ in state if isinstance(name, str)}:
                self.left_out.add((*key, ""))  # a bar: what it shows people, and what goes over it is compared
        for number, each in enumerate(read(states)):
            self._add(number, f"the random numbers of {('torch', 'Python', 'NumPy', 'the accelerator')[number]}", each)
        self._add(GRADIENTS, GRADIENTS, summed)
        if not gradients:
            self.left_out.add(GRADIENTS)

    def _add(self, key: Any, name: str, value: Any) -> None:
        self.parts[key], self.names[key] = without_aids(value), name


def first_difference(ours: Any, theirs: Any) -> str:
    """Return where two values first differ and both, shortened; empty where they are equal.

    Types have to be the same, numbers to have the same bits, with any NaN equal to any other. Sets have no order. What
    is shared within one has to be shared in the other.
    """
    return _first_difference([("", ours, theirs)], _Partners())


class _Partners:
    """Which object of theirs goes with which of ours."""

    def __init__(self) -> None:
        self._theirs, self._ours = dict[int, Any](), dict[int, Any]()  # who is in there lives on, and keeps its address

    def add(self, ours: Any, theirs: Any) -> bool | None:
        """Add a pair; return None if it is new, else whether it is as before."""
        if id(ours) not in self._theirs and id(theirs) not in self._ours:
            self._theirs[id(ours)], self._ours[id(theirs)] = theirs, ours
            return None
        return self._theirs.get(id(ours)) is theirs and self._ours.get(id(theirs)) is ours

    def copy(self) -> "_Partners":
        copied = _Partners()
        copied._theirs, copied._ours = self._theirs.copy(), self._ours.copy()
        return copied


def _first_difference(todo: Pairs, partners: _Partners) -> str:
    seen, kept = set[tuple[int, int]](), [*todo]  # what is made on the way lives on, as others may get its address
    while todo:
        path, ours, theirs = todo.pop()
        if ours is theirs or (id(ours), id(theirs)) in seen:
            continue
        if type(ours) is not type(theirs):
            return _words(path, ours, theirs)
        seen.add((id(ours), id(theirs)))
        if _is_shared(ours) and partners.add(ours, theirs) is False:
            return f"{path}: it is shared with something else here than there".removeprefix(": ")
        found = _compare(path, ours, theirs, partners)
        if isinstance(found, str):
            return found
        kept += found
        todo += reversed(found)
    return ""


def _is_shared(thing: Any) -> bool:
    """Return whether it matters who else has an object, as it may be changed."""
    if isinstance(thing, Made):
        name = type(thing).__name__
        return name not in _NEVER_CHANGED and (bool(thing.items) or hasattr(thing, "state") or name in _MADE_SHARED)
    return isinstance(thing, _SHARED) or (hasattr(thing, "__dict__") and not isinstance(thing, _MADE_ANEW))


def _compare(path: str, ours: Any, theirs: Any, partners: _Partners) -> str | Pairs:
    """Return a difference between two objects of a type by themselves, or else what is to be compared in them."""
    if (value := _value(ours)) is not None:
        return [] if value == _value(theirs) else _words(path, ours, theirs)
    if isinstance(ours, _IDENTICAL):
        return _words(path, ours, theirs)
    if isinstance(ours, torch.Tensor):
        return _tensors_difference(path, ours, theirs) or [(f"{path}.grad", ours.grad, theirs.grad)] * ours.is_leaf
    items = _items(path, ours, theirs, partners)
    return items if isinstance(items, str) else items + _parts(path, ours, theirs)


def _items(path: str, ours: Any, theirs: Any, partners: _Partners) -> str | Pairs:
    """Return a difference between what two containers hold, or else what is to be compared in them."""
    if isinstance(ours, set | frozenset):
        return _sets_difference(path, ours, theirs, partners) or []
    if not isinstance(ours, Mapping | list | tuple | collections.deque):
        return []
    if len(ours) != len(theirs):
        return f"{path}: {len(ours)} items here, {len(theirs)} there: {_first_apart(ours, theirs)}".lstrip(": ")
    if isinstance(ours, Mapping):
        if words := _keys_difference(path, ours, theirs):
            return words
        found = [(f"{path}, key {shown(key)}", key, other) for key, other in zip(ours, theirs, strict=True)]
        values = zip(ours.items(), theirs.values(), strict=True)
        return found + [(f"{path}[{shown(key)}]", one, other) for (key, one), other in values]
    names = getattr(ours, "_fields", None) if isinstance(ours, tuple) else None
    found = [
        (f"{path}.{names[number]}" if names else f"{path}[{number}]", *pair)
        for number, pair in enumerate(zip(ours, theirs, strict=True))
    ]
    if isinstance(ours, collections.deque):
        found.append((f"{path}.maxlen", ours.maxlen, theirs.maxlen))
    return found


def _first_apart(ours: Any, theirs: Any) -> str:
    """Return what shows why one of two containers has more items than the other."""
    if isinstance(ours, Mapping):
        apart = [(each, "here") for each in ours if each not in theirs]
        apart += [(each, "there") for each in theirs if each not in ours]
        return "keys " + ", ".join(f"{shown(each)} only {where}" for each, where in apart[:ITEMS_SHOWN])
    least = min(len(ours), len(theirs))
    return f"{shown(ours[least:])} here, {shown(theirs[least:])} there behind the first {least}"


def _parts(path: str, ours: Any, theirs: Any) -> Pairs:
    """Return the attributes of two objects; of those without any, what pickle makes them again from."""
    mine, other = _attributes(ours), _attributes(theirs)
    if mine is not None and other is not None:
        names = [*mine, *(name for name in other if name not in mine)]
        return [(f"{path}.{name}", mine.get(name, _NOTHING), other.get(name, _NOTHING)) for name in names]
    if isinstance(ours, _BUILT_IN):
        return []
    return [(path, _reduced(ours), _reduced(theirs))]


_BUILT_IN = (*_SHARED, tuple, frozenset, collections.OrderedDict, collections.defaultdict, collections.Counter)


_UNLIKE_OTHERS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, weakref.ref, functools.partial)


def _attributes(thing: Any) -> dict[str, Any] | None:
    cls: Any = type(thing)
    if isinstance(thing, _UNLIKE_OTHERS) or cls.__module__ == "numpy":
        return None
    if not cls.__dictoffset__ and not slots(cls):
        return None
    if library_of(cls) and not isinstance(thing, Made):
        return dict(BAR.parts(thing))
    own = {name: getattr(thing, name) for name in slots(cls) if hasattr(thing, name)}
    if isinstance(thing, random.Random):
        own["state"] = thing.getstate()
    return {**getattr(thing, "__dict__", {}), **own}


def _reduced(thing: Any) -> Any:
    """Return what an object can be made from, in containers.

    Raises:
        NotCarriedError: nobody knows.
    """
    for cls, names in _MADE_FROM.items():
        if isinstance(thing, cls):
            parts = [getattr(thing, name) for name in names]
            return [
                each() if callable(each) and name in _ASKED else each for name, each in zip(names, parts, strict=True)
            ]
    reduce = copyreg.dispatch_table.get(type(thing))
    try:
        made: Any = reduce(thing) if reduce else thing.__reduce_ex__(4)
    except Exception as error:
        raise NotCarriedError(f"{type(thing).__qualname__}: {error}") from error
    if isinstance(made, str):
        return [made]
    return [each if number < 3 or each is None else [*each] for number, each in enumerate(made)]


_ASKED = {"__call__", "get_state"}
_MADE_FROM: dict[Any, tuple[str, ...]] = {
    weakref.ref: ("__call__",),
    types.MethodType: ("__self__", "__func__"),
    functools.partial: ("func", "args", "keywords", "__dict__"),
    types.BuiltinFunctionType: ("__self__", "__qualname__"),
    types.FunctionType: ("__code__", "__defaults__", "__kwdefaults__", "__closure__"),
    types.CellType: ("cell_contents",),
    torch.Generator: ("get_state",),
}


# --- values -----------------------------------------------------------------------------------------------------------


def _value(thing: Any) -> Any:
    """Return what is equal for two values of a type that are the same, None for what has parts."""
    if isinstance(thing, Made) and type(thing).__name__ in _SHOWN_ONLY:
        return "a bar"
    if isinstance(thing, Made) and type(thing).__name__ in _NEVER_CHANGED:
        return repr([thing.arguments, getattr(thing, "state", None)])
    if type(thing) is bytearray:
        return bytes(thing)
    numpy = sys.modules.get("numpy")
    if numpy and isinstance(thing, numpy.ndarray) and not thing.dtype.hasobject:
        return bits_of(thing)
    return value_of(thing)


def _tensors_difference(path: str, ours: torch.Tensor, theirs: torch.Tensor) -> str:
    for name in ("dtype", "shape", "layout", "requires_grad"):
        if getattr(ours, name) != getattr(theirs, name):
            return _words(f"{path}.{name}", getattr(ours, name), getattr(theirs, name))
    mine, other = _strided(ours), _strided(theirs)
    if mine.shape != other.shape:
        return _words(path, ours, theirs)
    if mine.device.type == "meta" or not mine.numel():
        return ""
    other = other.to(mine.device)
    bits = [each.contiguous().reshape(-1).view(torch.uint8).view(each.numel(), -1) for each in (mine, other)]
    different = (bits[0] != bits[1]).any(dim=1)
    if mine.is_floating_point():
        mine, other = mine.reshape(-1), other.reshape(-1)
        different &= ~(mine.isnan() & other.isnan())
    if not different.any():
        return ""
    at = int(different.nonzero()[0])
    return _words(f"{path}[{at} of {len(different)}]", mine.reshape(-1)[at].item(), other.reshape(-1)[at].item())


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.detach()
    if dense.layout != torch.strided:
        dense = dense.to_dense()
    dense = dense.resolve_conj().resolve_neg()
    return torch.view_as_real(dense) if dense.is_complex() else dense


def _keys_difference(path: str, ours: Mapping[Any, Any], theirs: Mapping[Any, Any]) -> str:
    for mine, other in zip(ours, theirs, strict=True):
        value = _value(mine)
        if (value is not None or type(mine) is not type(other)) and (type(mine), value) != (type(other), _value(other)):
            return _words(f"{path}, order of keys" if mine in theirs else f"{path}, key", mine, other)
    return ""


def _sets_difference(path: str, ours: Iterable[Any], theirs: Iterable[Any], partners: _Partners) -> str:
    left: dict[Any, list[Any]] = {}
    for each in theirs:
        left.setdefault((type(each), _value(each)), []).append(each)
    for mine in ours:
        same = left.get((type(mine), _value(mine)), [])
        for number, other in enumerate(same):
            if mine is other or not _first_difference([("", mine, other)], partners.copy()):
                del same[number]
                break
        else:
            return f"{path}: {shown(mine)} is in the set here, and not there".removeprefix(": ")
    if more := [one for each in left.values() for one in each]:
        return f"{path}: {shown(more[0])} is not in the set here, but there".removeprefix(": ")
    return ""


def _words(path: str, ours: Any, theirs: Any) -> str:
    if isinstance(ours, bytes) and isinstance(theirs, bytes) and len(ours) == len(theirs) > BYTES_SHOWN:  # a tensor's
        apart = sum(map(operator.ne, ours, theirs))
        return f"{path}: {apart} of {len(ours)} bytes differ".lstrip(".: ")
    mine, other = shown(ours), shown(theirs)
    if mine == other:
        mine, other = f"{mine} ({type(ours).__qualname__})", f"{other} ({type(theirs).__qualname__})"
    return f"{path}: {mine} here, {other} there".lstrip(".: ")
