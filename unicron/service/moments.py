"""Moves the moments that a state remembers where the clock they were read from was set, or nobody looked at it.

What a core decides by time compares a moment that it remembers with one that it is given. Both are of one clock, and it
is people who set that, or the machine that sleeps. So all that is remembered moves with it, and the time between the
two stays what this process has seen pass.
"""

from collections.abc import Callable
from functools import cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec

from unicron.contracts.base import Message
from unicron.contracts.ranges import Moment

EARLIEST = 1.0
"""Unix seconds; 0 stands for no time at all."""

Move = Callable[[Any, float], Any]


def move(value: Any, seconds: float) -> Any:
    """Return `value` with all moments in it moved; what of it can be changed in place, is.

    Messages that are remembered keep their stamps, which are for people.
    """
    moves = _of_struct(type(value)) if isinstance(value, msgspec.Struct) else None
    return moves(value, seconds) if moves else value


@cache
def _of_struct(kind: type[msgspec.Struct]) -> Move | None:
    """Return what moves the moments of such a struct; None where it has none."""
    if issubclass(kind, Message):
        return None
    hints = get_type_hints(kind, include_extras=True)
    moves = {field.name: found for field in msgspec.structs.fields(kind) if (found := _of(hints[field.name]))}
    frozen = kind.__struct_config__.frozen

    def change(struct: Any, seconds: float) -> Any:
        changed = {name: each(getattr(struct, name), seconds) for name, each in moves.items()}
        if frozen:
            return msgspec.structs.replace(struct, **changed)
        for name, value in changed.items():
            match getattr(struct, name):
                case dict() as kept:  # others may hold it, too
                    kept.update(value)
                case list() as kept:
                    kept[:] = value
                case _:
                    setattr(struct, name, value)
        return struct

    return change if moves else None


def _moved(at: float | None, seconds: float) -> float | None:
    return max(EARLIEST, at + seconds) if at else at


def _of(hint: Any) -> Move | None:
    """Return what moves the moments in a value of this type; None where it has none."""
    if hint == Moment:
        return _moved
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _of(args[0])
    if origin in {Union, UnionType}:
        return _of_union(args)
    if origin is list and (item := _of(args[0])) is not None:
        return _of_list(item)
    if origin is dict and (item := _of(args[1])) is not None:
        return _of_dict(item)
    return _of_struct(hint) if isinstance(hint, type) and issubclass(hint, msgspec.Struct) else None


def _of_list(item: Move) -> Move:
    return lambda values, seconds: [item(value, seconds) for value in values]


def _of_dict(item: Move) -> Move:
    return lambda values, seconds: {key: item(value, seconds) for key, value in values.items()}


def _of_union(kinds: tuple[Any, ...]) -> Move | None:
    if Moment in kinds:
        return _moved
    return move if any(_of(kind) for kind in kinds) else None
