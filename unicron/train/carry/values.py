"""Values that never change: their types, and when two of them are the same."""

import datetime as dt
import decimal
import enum
import fractions
import ipaddress
import math
import pathlib
import re
import struct
import sys
import types
import uuid
import zoneinfo
from collections.abc import Callable
from typing import Any

import torch

NUMBERS = (bool, int, float, complex)
LIBRARY: tuple[Any, ...] = (
    *(dt.date, dt.time, dt.timedelta, dt.timezone, zoneinfo.ZoneInfo, decimal.Decimal, fractions.Fraction),
    *(uuid.UUID, pathlib.PurePath, ipaddress.IPv4Address, ipaddress.IPv6Address),
)
"""Of Python's library, with a text that says all."""

PLAIN: tuple[Any, ...] = (
    *(type(None), *NUMBERS, str, bytes, type(...), type(NotImplemented), range, slice, enum.Enum, *LIBRARY),
    *(re.Pattern, torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
    types.CodeType,
)
"""Types that never change."""


def is_plain(cls: Any) -> bool:
    """Return whether nothing of a class ever changes; a script's own that is made of one may have attributes."""
    if not issubclass(cls, PLAIN):
        return "numpy" in sys.modules and issubclass(cls, (sys.modules["numpy"].generic, sys.modules["numpy"].dtype))
    return (
        not cls.__dictoffset__
        or issubclass(cls, enum.Enum)
        or cls.__module__.partition(".")[0] in {*sys.stdlib_module_names, "torch"}
    )


def value_of(thing: Any) -> Any:
    """Return what is equal for two plain values of a type that are the same; None where only identity says that.

    No number is the same as no number, and 0.0 is another value than -0.0.
    """
    cls = type(thing)
    if (text := _VALUES.get(cls)) is not None:
        return text(thing)
    if isinstance(thing, enum.Enum):
        return cls.__module__, cls.__qualname__, thing.name
    numpy = sys.modules.get("numpy")
    if numpy and isinstance(thing, numpy.generic) and not thing.dtype.hasobject:
        return bits_of(thing)
    return None


def _float(thing: float) -> Any:
    return "nan" if math.isnan(thing) else struct.pack("d", thing)


_VALUES: dict[Any, Callable[[Any], Any]] = {
    **dict.fromkeys((bool, int, str, bytes, torch.Size), lambda thing: (thing,)),
    **dict.fromkeys(
        (range, slice, torch.device, *LIBRARY, dt.datetime, pathlib.PosixPath, pathlib.PurePosixPath), repr
    ),
    float: _float,
    complex: lambda thing: (_float(thing.real), _float(thing.imag)),
    re.Pattern: lambda thing: (thing.pattern, thing.flags),
}


def bits_of(thing: Any) -> Any:
    """Return the bits of what NumPy has, with all that are no number alike."""
    numpy = sys.modules["numpy"]
    bits: Any = thing.tobytes()
    if thing.dtype.kind in "fc" and (lost := numpy.isnan(thing)).any():
        bits = lost.tobytes(), numpy.where(lost, 0, thing).tobytes()
    return str(thing.dtype), thing.shape, bits


def _members(found: frozenset[Any]) -> set[Any]:
    """Return what is equal for two sets whose members are the same; their order is that of the process."""
    return {id(each) if (value := value_of(each)) is None else (type(each), value) for each in found}


def is_same(ours: Any, theirs: Any) -> bool:
    """Return whether nobody can tell two things apart: they are one, or plain, of a type, and with the same value."""
    if ours is theirs:
        return True
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, tuple):
        return len(ours) == len(theirs) and all(map(is_same, ours, theirs))
    if isinstance(ours, frozenset):
        return _members(ours) == _members(theirs)
    if isinstance(ours, types.MethodType | types.BuiltinFunctionType):
        functions = [getattr(each, "__func__", each.__qualname__) for each in (ours, theirs)]
        return ours.__self__ is theirs.__self__ and is_same(*functions)
    return (value := value_of(ours)) is not None and bool(value == value_of(theirs))
