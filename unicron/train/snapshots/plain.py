"""States as plain values and tensors, and back: numbers of NumPy, values of Python's library, and objects of classes.

Nothing that is read is run: an object is made bare, of a class that this process has imported already, and gets its
attributes. Classes that do something when they are made or are gone, and Python's own, are none of these. Functions
among an optimizer's options are not given at all: a process keeps its own there, if it is the same one.
"""

import ast
import collections
import datetime as dt
import decimal
import enum
import fractions
import pathlib
import sys
import types
import uuid
import zoneinfo
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any

import msgspec
import torch

from unicron.errors import StateTransferError

MARK = "__value__"
PLAIN = frozenset({str, float, bool, bytes, type(None)})
SMALL_BYTES = 1 << 16
"""An array of more is written as a tensor."""

_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
}
_DTYPES = {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
_LAYOUTS = {str(layout): layout for layout in _PARTS}
_TEXTS: dict[str, tuple[Any, Callable[[Any], str], Callable[[str], Any]]] = {
    "int": (int, str, int),
    "complex": (complex, lambda each: f"{each.real!r} {each.imag!r}", lambda text: complex(*map(float, text.split()))),
    "date": (dt.date, dt.date.isoformat, dt.date.fromisoformat),
    "decimal": (decimal.Decimal, str, decimal.Decimal),
    "fraction": (fractions.Fraction, str, fractions.Fraction),
    "uuid": (uuid.UUID, str, uuid.UUID),
    "path": (pathlib.PosixPath, str, pathlib.PosixPath),
    "zone": (zoneinfo.ZoneInfo, str, zoneinfo.ZoneInfo),
    "device": (torch.device, str, torch.device),
    "dtype": (torch.dtype, str, lambda text: _DTYPES[text]),
}
"""Values that a text says all of, by name: their type, to a text, and from there."""

_SEQUENCES: dict[str, Any] = {"set": set, "frozenset": frozenset, "size": torch.Size}
_SPLIT: dict[Any, Callable[[Any], tuple[Any, ...]]] = {
    collections.deque: lambda each: (each.maxlen, list(each)),
    range: lambda each: (each.start, each.stop, each.step),
    slice: lambda each: (each.start, each.stop, each.step),
    dt.timedelta: lambda each: (each.days, each.seconds, each.microseconds),
    dt.timezone: lambda each: (each.utcoffset(None),),
    dt.datetime: lambda each: (each.replace(tzinfo=None).isoformat(), each.fold, each.tzinfo),
    dt.time: lambda each: (each.replace(tzinfo=None).isoformat(), each.fold, each.tzinfo),
}
"""Values that are made from other ones."""

_BY_TYPE = {cls: (name, write) for name, (cls, write, _) in _TEXTS.items()}
_NAMES = {cls: name for name, cls in _SEQUENCES.items()}


def to_plain(value: Any, where: str, options: str | None = None) -> Any:
    """Return a value in mappings, sequences, tensors and plain values.

    Args:
        value: whatever a state has.
        where: its name, for errors.
        options: the name of a part of it in which functions may be, as each process that takes the value has made its
            own there.

    Raises:
        StateTransferError: it holds what no other process can be given; the text says where.
    """
    try:
        return _Writing(options).of(value, where)
    except RecursionError:
        raise StateTransferError(f"{where} leads to itself: keep in it what is no part of what holds it") from None


def objects_in(value: Any, where: str, options: str | None = None) -> dict[str, Any]:
    """Return the objects of classes, and functions, that a value leads to, by the names that `to_plain` gives them."""
    writing = _Writing(options)
    writing.of(value, where)
    return writing.objects


class _Writing:
    def __init__(self, options: str | None) -> None:
        self.objects, self._places = dict[str, Any](), dict[int, str]()
        self._depth, self._options = 0, options

    def of(self, value: Any, where: str) -> Any:
        cls = type(value)
        if cls in PLAIN or (cls is int and -(2**63) <= value < 2**63):
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value, where)
        if isinstance(value, Mapping):
            return self._mapping(value, where)
        return self._items(value, where) if cls in {list, tuple} else {MARK: self._marked(value, where)}

    def _items(self, value: Any, where: str) -> Any:
        kind: Any = tuple if type(value) is tuple else list
        return kind(self.of(each, f"{where}.{number}") for number, each in enumerate(value))

    def _mapping(self, value: Mapping[Any, Any], where: str) -> Any:
        if all(type(key) is int or (type(key) is str and key[:2] != "__") for key in value):
            return {key: self.of(each, f"{where}.{key}") for key, each in value.items()}
        return {MARK: ["map", [self._items(pair, f"{where}.{pair[0]}") for pair in map(list, value.items())]]}

    def _tensor(self, tensor: torch.Tensor, where: str) -> Any:
        if self._depth and (isinstance(tensor, torch.nn.Parameter) or tensor.requires_grad):
            raise _refused(tensor, where)
        if (names := _PARTS.get(tensor.layout)) is not None:
            whole = tensor.detach()
            coalesced = tensor.layout is torch.sparse_coo and tensor.is_coalesced()
            parts = [getattr(whole, name)() for name in names]
            return {MARK: ["sparse", str(tensor.layout), coalesced, list(tensor.shape), parts]}
        return {MARK: ["on", tensor.device.type, tensor]} if self._depth else tensor

    def _marked(self, value: Any, where: str) -> list[Any]:
        cls = type(value)
        if cls in _BY_TYPE:
            name, write = _BY_TYPE[cls]
            return [name, write(value)]
        if cls in _NAMES:
            return [_NAMES[cls], self._items(list(value), where)]
        if cls in _SPLIT:
            return [cls.__name__, *self._items(_SPLIT[cls](value), where)]
        numpy = sys.modules.get("numpy")
        if numpy and isinstance(value, numpy.generic | numpy.ndarray):
            return _array(numpy, value, where)
        if isinstance(value, _FUNCTIONS) and self._options is not None and where.startswith(self._options):
            self.objects[where] = value
            return ["function", where, *_identity(value, where)]
        return self._of_class(value, where)

    def _of_class(self, value: Any, where: str) -> list[Any]:
        cls = type(value)
        if not _is_known(cls):
            raise _refused(value, where)
        if isinstance(value, enum.Enum):
            return ["enum", cls.__module__, cls.__qualname__, value.name]
        if isinstance(value, tuple):
            return ["tuple", cls.__module__, cls.__qualname__, self._items(list(value), where)]
        return self._object(value, where)

    def _object(self, value: Any, where: str) -> list[Any]:
        cls = type(value)
        if not _is_bare(cls):
            raise _refused(value, where)
        known = self._places.setdefault(id(value), where)
        if known != where:
            return ["object", known, cls.__module__, cls.__qualname__, None]
        self.objects[where] = value
        self._depth += 1
        attributes = {name: self.of(each, f"{where}.{name}") for name, each in _attributes(value).items()}
        self._depth -= 1
        return ["object", where, cls.__module__, cls.__qualname__, attributes]


def _refused(value: Any, where: str) -> StateTransferError:
    cls = type(value)
    return StateTransferError(
        f"{where} is a {cls.__module__}.{cls.__qualname__}, which can't be given to another process: keep tensors, "
        "arrays, plain values and objects of ordinary classes there"
    )


_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, type)
"""What a program that is set up alike has alike."""


def _identity(function: Any, where: str) -> list[Any]:
    """Return the name of a function or class, and a digest of what else tells it from others of that name.

    Raises:
        StateTransferError: it keeps what may be another one elsewhere.
    """
    if not isinstance(owner := getattr(function, "__self__", None), types.ModuleType | None):
        raise _refused(owner, f"{where}.__self__")
    kept = [getattr(function, name, None) for name in ("__defaults__", "__kwdefaults__")]
    if isinstance(function, types.FunctionType):
        kept += [vars(function), [_content(each) for each in function.__closure__ or ()]]
    values = to_plain(kept, f"{where}.__closure__", where)
    code = _code(function.__code__) if function.__name__ == "<lambda>" else None
    try:
        digest = blake2b(_ordered([values, code]), digest_size=16).hexdigest()
    except TypeError:  # a tensor
        raise _refused(function, where) from None
    return [f"{function.__module__}.{function.__qualname__}", digest]


def _content(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # nothing yet
        return []


def _ordered(plain: Any) -> bytes:
    """Return a text of plain values that is the same in all processes: sets are in another order in each."""
    if isinstance(plain, Mapping):
        kind, *rest = plain.get(MARK, [""])
        is_set = kind in {"set", "frozenset"}
        parts = sorted(map(_ordered, rest[0])) if is_set else [*map(_ordered, [*plain, *plain.values()])]
    elif isinstance(plain, list | tuple):
        parts = [*map(_ordered, plain)]
    else:
        return msgspec.msgpack.encode(plain)
    return msgspec.msgpack.encode([type(plain).__name__, *parts])


def _code(code: types.CodeType) -> list[Any]:
    consts = (sorted(map(repr, each)) if isinstance(each, frozenset) else each for each in code.co_consts)
    return [
        *(code.co_code, code.co_names),
        [_code(each) if isinstance(each, types.CodeType) else repr(each) for each in consts],
    ]


def _array(numpy: Any, value: Any, where: str) -> list[Any]:
    descr = numpy.lib.format.dtype_to_descr(value.dtype) if not value.dtype.hasobject else None
    if descr is None or numpy.lib.format.descr_to_dtype(descr) != value.dtype or type(value).__module__ != "numpy":
        raise _refused(value, where)
    kind = "number" if isinstance(value, numpy.generic) else "array"
    data: Any = value.tobytes()
    if len(data) > SMALL_BYTES:
        data = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return [kind, repr(descr), list(value.shape), data]


def _attributes(value: Any) -> dict[str, Any]:
    own = {name: getattr(value, name) for name in _slots(type(value)) if hasattr(value, name)}
    return {**getattr(value, "__dict__", {}), **own}


def _slots(cls: type) -> list[str]:
    names = (vars(each).get("__slots__", ()) for each in cls.__mro__)
    return [name for each in names for name in ((each,) if isinstance(each, str) else each) if name[:2] != "__"]


def _is_known(cls: type) -> bool:
    """Return whether a class is the one of its name, and neither Python's nor made in a function."""
    root = cls.__module__.partition(".")[0]
    return (root not in sys.stdlib_module_names or root == "__main__") and _find(
        cls.__module__, cls.__qualname__
    ) is cls


def _is_bare(cls: type) -> bool:
    """Return whether objects of a class can be made without running anything, and are their attributes alone."""
    made_in_python = all(each.__flags__ & 1 << 9 for each in cls.__mro__ if each is not object)
    new: Any = cls.__new__
    return made_in_python and new is object.__new__ and not hasattr(cls, "__del__")


def _find(module: str, name: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found


def from_plain(value: Any, device: torch.device | None = None, there: Mapping[str, Any] | None = None) -> Any:
    """Undo `to_plain`.

    Args:
        value: what that returned, and another process has written.
        device: for tensors in objects that were on an accelerator.
        there: objects that are to be as those of the same names were; others may refer to them.

    Raises:
        StateTransferError: it is of something that this process does not have.
    """
    try:
        return _Reading(device, there or {}).of(value)
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError, ArithmeticError) as error:
        raise error if isinstance(error, StateTransferError) else StateTransferError(f"no state: {error!r}") from error


class _Reading:
    def __init__(self, device: torch.device | None, there: Mapping[str, Any]) -> None:
        self._device, self._there, self._objects = device, there, dict[str, Any]()

    def of(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            if MARK in value:
                return self._marked(*value[MARK])
            return {key: self.of(each) for key, each in value.items()}
        return type(value)(map(self.of, value)) if type(value) in {list, tuple} else value

    def _marked(self, kind: str, *parts: Any) -> Any:
        if kind in _TEXTS:
            return _TEXTS[kind][2](parts[0])
        if kind in _SEQUENCES:
            return _SEQUENCES[kind](self.of(parts[0]))
        read = getattr(self, f"_read_{kind}", None)
        if read is None:
            raise StateTransferError(f"a state has a {kind}, which nobody here knows")
        return read(*parts)

    def _read_map(self, items: list[Any]) -> Any:
        return {self.of(key): self.of(each) for key, each in items}

    def _read_deque(self, most: int | None, items: list[Any]) -> Any:
        return collections.deque(self.of(items), most)

    def _read_range(self, *parts: Any) -> Any:
        return range(*map(self.of, parts))

    def _read_slice(self, *parts: Any) -> Any:
        return slice(*map(self.of, parts))

    def _read_timedelta(self, *parts: int) -> Any:
        return dt.timedelta(*parts)

    def _read_timezone(self, offset: Any) -> Any:
        return dt.timezone(self.of(offset))

    def _read_datetime(self, text: str, fold: int, zone: Any) -> Any:
        return dt.datetime.fromisoformat(text).replace(fold=fold, tzinfo=self.of(zone))

    def _read_time(self, text: str, fold: int, zone: Any) -> Any:
        return dt.time.fromisoformat(text).replace(fold=fold, tzinfo=self.of(zone))

    def _read_sparse(self, layout: str, coalesced: bool, shape: list[int], parts: list[torch.Tensor]) -> Any:
        if layout == str(torch.sparse_coo):
            made: Any = torch.sparse_coo_tensor
            return made(*parts, shape, is_coalesced=coalesced, check_invariants=True)
        made = torch.sparse_compressed_tensor
        return made(*parts, shape, layout=_LAYOUTS[layout], check_invariants=True)

    def _read_on(self, kind: str, tensor: torch.Tensor) -> Any:
        return tensor.clone() if kind == "cpu" or self._device is None else tensor.to(self._device, copy=True)

    def _read_number(self, descr: str, shape: list[int], data: Any) -> Any:
        return self._read_array(descr, shape, data)[()]

    def _read_array(self, descr: str, shape: list[int], data: Any) -> Any:
        import numpy as np  # noqa: PLC0415 hardly any state has one

        held = bytearray(data.numpy().tobytes() if isinstance(data, torch.Tensor) else data)
        return np.frombuffer(held, np.lib.format.descr_to_dtype(ast.literal_eval(descr))).reshape(shape)

    def _read_enum(self, module: str, name: str, member: str) -> Any:
        return self._class(module, name, enum.Enum)[member]

    def _read_tuple(self, module: str, name: str, items: list[Any]) -> Any:
        return tuple.__new__(self._class(module, name, tuple), self.of(items))

    def _read_function(self, where: str, *identity: str) -> Any:
        own = self._there.get(where)
        if not isinstance(own, _FUNCTIONS) or _identity(own, where) != [*identity]:
            here = getattr(own, "__qualname__", "none")
            raise StateTransferError(
                f"{where} is {identity[0]} in the state, and {here} here, or one that keeps other values: "
                "set functions before the first iteration"
            )
        return own

    def _read_object(self, key: str, module: str, name: str, attributes: dict[str, Any] | None) -> Any:
        cls = self._class(module, name, object)
        if not _is_bare(cls):
            raise StateTransferError(f"a state has a {module}.{name}, which is no ordinary class here")
        if key not in self._objects:
            known = self._there.get(key)
            self._objects[key] = known if type(known) is cls else object.__new__(cls)
        made, own = self._objects[key], _slots(cls)
        if attributes is not None and hasattr(made, "__dict__"):
            vars(made).clear()
        for attribute, each in (attributes or {}).items():
            if attribute in own:
                object.__setattr__(made, attribute, self.of(each))
            else:
                vars(made)[attribute] = self.of(each)
        return made

    def _class(self, module: str, name: str, base: type) -> Any:
        found = _find(module, name)
        if not (isinstance(found, type) and issubclass(found, base) and _is_known(found)):
            raise StateTransferError(f"a state has a {module}.{name}, which this process has not imported")
        return found
