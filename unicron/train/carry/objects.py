"""Of which kind an object of a script is, and the kinds of those that are compared by value, or left alone."""

import collections
import contextlib
import functools
import io
import itertools
import os
import pickle
import random
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from inspect import GEN_RUNNING, GEN_SUSPENDED, getgeneratorstate
from typing import Any

import torch
from torch.jit._script import RecursiveScriptModule
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter
from xxhash import xxh3_128_digest

from unicron.train.carry.bars import BAR, library_of
from unicron.train.carry.by_value import ByValue, Hidden, Inline, ObjectArray, Opaque, Position, look_at_cache
from unicron.train.carry.files import FILE, is_file
from unicron.train.carry.kinds import (
    ATTACHED,
    ATTRIBUTES,
    CELL,
    CLASS,
    DICT,
    FUNCTION,
    LIST,
    MODULE,
    OPTIMIZER,
    PARTIAL,
    SET,
    Kind,
    NotCarriedError,
    Parts,
    slots,
)
from unicron.train.carry.numpy_generators import NUMPY_GENERATOR, SEEDS
from unicron.train.carry.scripted import ScriptedModule
from unicron.train.carry.tensors import raw, unraw
from unicron.train.carry.values import NUMBERS, is_plain, value_of

_ITERATED: tuple[Any, ...] = ([], (), {}, {}.values(), {}.items(), set(), range(1), range(1 << 70), "", b"")
BARE_ITERATORS = frozenset({type(iter(each)) for each in _ITERATED})
"""Types of iterators that run no line of Python as they yield an item."""

ITERATORS: tuple[Any, ...] = (
    *BARE_ITERATORS,
    *(type(reversed([])), zip, map, filter, enumerate, reversed),
    *(each for each in vars(itertools).values() if isinstance(each, type) and each.__name__ != "_tee"),
)
"""Types of iterators whose pickle has their position."""

BOUND = (
    *(types.ModuleType, types.FrameType, io.IOBase, threading.Thread, threading.Event),
    *(type(threading.Lock()), type(threading.RLock())),
    *weakref.ProxyTypes,
    *(weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet),
)
BOUND_MODULES = (
    *("torch._C", "torch.distributed.", "multiprocessing", "concurrent"),
    *("_thread", "_io", "socket", "logging", "queue", "unicron"),
)
"""Of this process alone: each has its own, and is left with it."""

KEPT_WORKERS = "a DataLoader with persistent_workers, whose processes have a state of their own"

SMALL_BYTES = 64 << 10
COMPARED_BYTES = 256 << 10
"""Of a tensor of more its version and some of its numbers show whether it has changed."""

ARRAY_BYTES, ARRAYS_BYTES = 8 << 20, 16 << 20
"""An array of more, and arrays that together have more, are data that may not change: `large` looks at them."""


class Resumable:
    """Something that has a position, and can be advanced to that of another one.

    Attributes:
        is_left: nobody asks it for anything any more.
    """

    count: int
    iterable: Any
    is_left = False

    def position(self) -> Any:
        """Return the position."""
        raise NotImplementedError

    def whole_position(self) -> Any:
        """Return the position, with what else another process does not have by itself."""
        raise NotImplementedError

    def advance_to(self, saved: Any) -> Any:
        """Advance to a position."""
        raise NotImplementedError

    def begin_anew(self, iterable: Any, saved: Any) -> None:
        """Be made from something, where nothing is yet but the object, and advance to a position."""
        raise NotImplementedError

    def expect(self, iterable: Any, saved: Any) -> None:
        """Note that this is to come, before anything goes over what it is to be made from."""

    @classmethod
    def found_in(cls, iterable: Any) -> "Resumable | None":  # noqa: ARG003
        """Return the one that something has by itself; None where each is made anew."""
        return None


class Stateful:
    """Something whose state is more than what it holds, and that says itself what it is.

    Attributes:
        comes_last: only the last of several snapshots is for it: it has a part of what all ranks have alike, and an
            earlier one would put something older in its place.
    """

    comes_last = False

    def look(self) -> Any:
        """Return what shows whether it has changed."""
        raise NotImplementedError

    def state(self) -> Any:
        """Return its state."""
        raise NotImplementedError

    def check(self) -> None:
        """See whether its state can be part of a snapshot.

        Raises:
            NotCarriedError: it can't.
        """

    def set_state(self, state: Any) -> None:
        """Take over a state."""
        raise NotImplementedError


class Call:
    """The result of a generator function, called with these arguments.

    Args:
        function: that wraps it.
    """

    def __init__(self, function: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._function, self._arguments, self._named = function, [*arguments], named

    def __iter__(self) -> Iterator[Any]:
        """Call it."""
        found: Iterator[Any] = self._function.__wrapped__(*self._arguments, **self._named)
        return found


class _Tensor(Kind):
    exact = False

    def parts(self, thing: torch.Tensor) -> Parts:
        own = ATTACHED.parts(thing)
        return [("grad", thing.grad), *own] if thing.is_leaf and thing.grad is not None else own

    def fingerprint(self, thing: torch.Tensor) -> tuple[Any, ...]:
        # a fused optimizer, or BatchNorm, leaves the version as it is
        is_large = is_large_tensor(thing, TENSOR)
        value = (thing._version, thing.data_ptr()) if is_large else raw(thing)  # noqa: SLF001
        own = itertools.chain.from_iterable(ATTACHED.parts(thing))
        return value, thing.requires_grad, thing.grad if thing.is_leaf else None, thing.shape, thing.dtype, *own

    def state(self, thing: torch.Tensor) -> Any:
        return self.state_with(thing, raw(thing))

    def state_with(self, thing: torch.Tensor, data: Any) -> Any:
        """Return its state with this in place of its bytes."""
        grad = thing.grad if thing.is_leaf else None
        return data, thing.dtype, tuple(thing.shape), thing.requires_grad, grad, ATTACHED.parts(thing)

    @torch.no_grad()
    def set_state(self, thing: torch.Tensor, state: Any) -> None:
        new = thing if state[0] is None else unraw(*state[:3])
        in_place = (thing.shape, thing.dtype, thing.layout) == (new.shape, new.dtype, new.layout)
        if new is thing:
            pass
        elif in_place and thing.layout != torch.sparse_coo:
            thing.detach().copy_(new)
        else:
            thing.data = new.to(thing.device)
        if thing.is_leaf:
            thing.requires_grad_(state[3])
            thing.grad = state[4]
        ATTACHED.set_state(thing, state[5])


def _advance_loader(thing: Any, count: int) -> None:
    """Have a loader's iterator be so far, unless what goes over it has brought it there."""
    while thing._num_yielded < count:  # noqa: SLF001
        next(thing._sampler_iter, None)  # noqa: SLF001 what was loaded need not be loaded again
        thing._num_yielded += 1  # noqa: SLF001


def _fetched(thing: Any) -> int:
    """Return how many batches a loader's iterator with processes has yielded.

    Raises:
        NotCarriedError: those of another process would not have what these have by now.
    """
    if thing._persistent_workers:  # noqa: SLF001
        raise NotCarriedError(KEPT_WORKERS)
    with contextlib.suppress(TypeError, NotImplementedError):  # it has no length
        if thing._num_yielded > len(thing._index_sampler):  # noqa: SLF001
            raise NotCarriedError("a DataLoader's iterator that is begun once for several epochs")
    return int(thing._num_yielded)  # noqa: SLF001


def _fetch(thing: Any, count: int) -> None:
    """Have a loader's iterator with processes be so far: these load it all, as what they draw depends on that."""
    while thing._num_yielded < count:  # noqa: SLF001
        next(thing)


def _is_under_way(thing: Any) -> bool:
    return getgeneratorstate(thing) in {GEN_RUNNING, GEN_SUSPENDED}


def _set_state(thing: Any, state: Any) -> None:
    thing.set_state(state)


def _pickle_small(thing: Any) -> bytes:
    """Return something that differs when an object of unknown kind does."""
    try:
        data = pickle.dumps(thing)
    except Exception:  # noqa: BLE001 it is as it is
        return b""
    return data if len(data) <= SMALL_BYTES else b""


UNKNOWN = Hidden(_pickle_small)
OPAQUE, INLINE = Opaque(), Inline()
TENSOR = _Tensor()
TORCH_GENERATOR = ByValue(lambda thing: thing.get_state(), _set_state, lambda thing: bytes(thing.get_state().numpy()))
PYTHON_GENERATOR = ByValue(random.Random.getstate, random.Random.setstate)
BYTES = ByValue(bytes, lambda thing, state: thing.__setitem__(slice(None), state))


def _put_array(thing: Any, state: Any) -> None:
    if thing.shape != state.shape:
        thing.resize(state.shape, refcheck=False)
    thing[...] = state


def _look_array(thing: Any) -> Any:
    if thing.dtype.hasobject:
        raise NotCarriedError("an array of objects")
    if thing.nbytes <= SMALL_BYTES:
        return thing.tobytes(), thing.shape, str(thing.dtype)
    return xxh3_128_digest(thing if thing.flags.c_contiguous else thing.copy()), thing.shape, str(thing.dtype)


DATA, OBJECT_ARRAY = Opaque(), ObjectArray()
ARRAY = ByValue(lambda thing: thing.copy(), _put_array, _look_array)


def _set_stream(thing: Any, state: Any) -> None:
    if state is None:
        thing.close()
        return
    thing.seek(0)
    thing.truncate()
    thing.write(state[0])
    thing.seek(state[1])


IN_MEMORY = ByValue(lambda thing: None if thing.closed else (thing.getvalue(), thing.tell()), _set_stream)


class _Iterated(Position):
    """An iterator that knows how far it is; what it goes over is a part of it."""

    def parts(self, thing: Any) -> Parts:
        return [("iterable", thing.iterable)]


POSITION = _Iterated(
    lambda thing: thing.whole_position(), lambda thing, position: thing.advance_to(position), lambda thing: thing.count
)
LOADING = Position(lambda thing: thing._num_yielded, _advance_loader)  # noqa: SLF001
FETCHING = Position(_fetched, _fetch, lambda thing: thing._num_yielded)  # noqa: SLF001

STATEFUL = ByValue(lambda thing: thing.state(), lambda thing, state: thing.set_state(state), lambda thing: thing.look())

_BY_CLASS: dict[Any, Kind] = {
    Resumable: POSITION,
    Stateful: STATEFUL,
    Call: ATTRIBUTES,
    (io.BytesIO, io.StringIO): IN_MEMORY,
    _SingleProcessDataLoaderIter: LOADING,
    _MultiProcessingDataLoaderIter: FETCHING,
    type(os.environ): Hidden(lambda thing: thing._data.copy()),  # noqa: SLF001 as bytes, which takes no decoding
    type(functools.lru_cache(len)): Hidden(look_at_cache),
    threading.local: Hidden(lambda thing: list(map(id, vars(thing).values()))),
    # these move where nobody sees it
    type(itertools.tee(())[0]): Hidden(lambda _: object()),
    types.GeneratorType: Hidden(lambda thing: object() if _is_under_way(thing) else getgeneratorstate(thing)),
    RecursiveScriptModule: ScriptedModule(),
    torch.nn.Module: MODULE,
    torch.optim.Optimizer: OPTIMIZER,
    torch.Tensor: TENSOR,
    torch.Generator: TORCH_GENERATOR,
    random.Random: PYTHON_GENERATOR,
    tuple: INLINE,
    frozenset: INLINE,
    weakref.ref: INLINE,
    functools.partial: PARTIAL,
    types.MethodType: INLINE,
    types.BuiltinFunctionType: INLINE,
    dict: DICT,
    list: LIST,
    collections.deque: LIST,
    set: SET,
    bytearray: BYTES,
    types.CellType: CELL,
    types.FunctionType: FUNCTION,
    type: CLASS,
}


@functools.cache
def _numpy() -> dict[Any, Kind]:
    numpy = sys.modules["numpy"]
    random_kinds = (numpy.random.Generator, numpy.random.RandomState, numpy.random.BitGenerator)
    return {numpy.ndarray: ARRAY, random_kinds: NUMPY_GENERATOR, numpy.random.SeedSequence: SEEDS}


def kind_of(thing: Any) -> Kind | None:
    """Return the kind of an object, None for one that never changes."""
    cls: Any = type(thing)
    kind = _kind(cls)
    if kind is OPAQUE and isinstance(thing, io.IOBase) and is_file(thing):
        return FILE
    if kind is ARRAY and thing.dtype == object:
        return OBJECT_ARRAY
    if kind is ARRAY and thing.nbytes > ARRAY_BYTES:
        return DATA if thing.flags.writeable else OPAQUE
    return kind


@functools.cache
def _kind(cls: Any) -> Kind | None:
    if is_plain(cls):
        return None
    tables: list[dict[Any, Kind]] = [{ITERATORS: INLINE}, _BY_CLASS]
    if "numpy" in sys.modules:
        tables.append(_numpy())
    for each, kind in itertools.chain.from_iterable(table.items() for table in tables):
        if issubclass(cls, each):
            return kind
    if library := library_of(cls):
        return _kind_of_display(cls, library)
    if issubclass(cls, BOUND) or (cls.__module__ or "").startswith(BOUND_MODULES):
        return OPAQUE
    return ATTRIBUTES if cls.__dictoffset__ or slots(cls) else UNKNOWN


def _kind_of_display(cls: Any, library: str) -> Kind:
    """Return the kind of a class of a library of progress bars: what shows them is left with the process."""
    if library == "rich":
        return ATTRIBUTES if cls.__module__ == "rich.progress" else OPAQUE
    return BAR if hasattr(cls, "update") and hasattr(cls, "close") else OPAQUE


def is_large_tensor(thing: Any, kind: Kind) -> bool:
    """Return whether too much is in a tensor for all of it to be looked at in each iteration."""
    return kind is TENSOR and thing.layout == torch.strided and thing.nbytes > COMPARED_BYTES


def is_moving(thing: Any) -> bool:
    """Return whether something changes where nobody sees it: an iterator, by itself or in a tuple."""
    return isinstance(thing, ITERATORS) or (isinstance(thing, tuple) and any(map(is_moving, thing)))


def text_of(value: Any, deep: int = 8) -> str:
    """Return a text that is the same in all processes for what has the same value; of what has none, its type."""
    cls = type(value)
    if kind_of(value) is OBJECT_ARRAY:
        value = value.tolist()
    if isinstance(value, dict) and deep:
        pairs = (f"{text_of(key, deep - 1)}: {text_of(each, deep - 1)}" for key, each in value.items())
        return f"{{{', '.join(sorted(pairs))}}}"
    if isinstance(value, list | tuple | set | frozenset) and deep:
        texts = [text_of(each, deep - 1) for each in value]
        return f"{cls.__name__}({', '.join(texts if isinstance(value, list | tuple) else sorted(texts))})"
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and value.nbytes <= COMPARED_BYTES:
        return f"tensor({value.tolist()}, {value.dtype})"
    if kind_of(value) is ARRAY:
        return f"array({xxh3_128_digest(value.tobytes()).hex()}, {value.dtype})"
    return repr(value) if cls in NUMBERS or value_of(value) is not None else cls.__qualname__
