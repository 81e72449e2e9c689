"""The objects that what a loop goes over is made of: whether they have changed, and how they are put back."""

import operator
import zlib
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from unicron.train.carry.kinds import ATTRIBUTES, CELL, DICT, FUNCTION, LIST, SET, Kind, NotCarriedError
from unicron.train.carry.numpy_generators import NUMPY_GENERATOR
from unicron.train.carry.objects import (
    ARRAY,
    BYTES,
    PYTHON_GENERATOR,
    TENSOR,
    TORCH_GENERATOR,
    kind_of,
)
from unicron.train.carry.tensors import raw
from unicron.train.carry.values import is_same

CONTAINERS = (LIST, DICT, SET)
HOLDING = (*CONTAINERS, ATTRIBUTES, CELL, FUNCTION)
BY_VALUE = (TORCH_GENERATOR, PYTHON_GENERATOR, NUMPY_GENERATOR, TENSOR, ARRAY, BYTES)
MOST_OWN, LONGEST, MOST_VALUE_BYTES, COMPARED_BYTES = 64, 1000, 4 << 10, 64 << 10
"""Objects that what is gone over is made of, and items of a container, that are looked at before each item."""


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
        elif isinstance(each, tuple | list | deque):
            todo.extend((name, one) for one in [*each][:LONGEST])
        elif isinstance(each, dict):
            todo.extend((f"{name}.{key}", one) for key, one in [*each.items()][:LONGEST])
        elif isinstance(each, int | float | str | bytes | None):
            found = zlib.crc32(f"{name} {each!r}".encode(), found)
    return found


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


def parts_of(over: Any) -> list[Part]:
    """Return the nearest objects that an iterator's items depend on, as they are."""
    found, todo, seen = list[Part](), deque([over]), set[int]()
    while todo and len(seen) < MOST_OWN:
        each = todo.popleft()
        if isinstance(each, _BaseDataLoaderIter):  # within a layer, that has called iter(): its items show where it is
            todo.extend(getattr(each, name, None) for name in ("_dataset", "_index_sampler"))  # one may not have begun
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


def changed(before: list[Part], now: list[Part]) -> list[tuple[Any, Any]]:
    """Return those parts, and their states before, that are not now what they were before.

    Raises:
        NotCarriedError: one of them is too large for its state to be kept.
    """
    there, found = {id(each.thing): each.look for each in now}, list[tuple[Any, Any]]()
    for part in before:
        if _is_as_before(part, there.get(id(part.thing))):
            continue
        if part.state is None:
            raise NotCarriedError(
                f"a {type(part.thing).__qualname__} of more than {LONGEST} items or {MOST_VALUE_BYTES >> 10} KiB, "
                "which a loop's items depend on and which changes as it runs"
            )
        found.append((part.thing, part.state))
    return found


def _is_as_before(part: Part, look: tuple[Any, ...] | None) -> bool:
    if look is None or len(look) != len(part.look):
        return False
    if part.state is None:
        return look == part.look
    if part.kind.exact:
        return all(map(operator.is_, look, part.look))
    return bool(look[:1] == part.look[:1]) and all(map(is_same, look[1:], part.look[1:]))  # attributes may be arrays


def restore_parts(states: list[tuple[Any, Any]]) -> None:
    """Put objects back to these states."""
    for thing, state in states:
        if (kind := kind_of(thing)) is not None:
            kind.set_state(thing, state)
