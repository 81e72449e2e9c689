"""Pickles a script's objects so that another process puts them into its own, which it finds by their keys."""

import contextlib
import io
import marshal
import pickle
import sys
import weakref
from collections.abc import Callable, Mapping
from inspect import GEN_CLOSED, getgeneratorstate
from types import FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter

from unicron.errors import GroupBrokenError
from unicron.exception_texts import brief
from unicron.train.carry.aliases import Memories, alias_of, owner_of
from unicron.train.carry.bars import BAR, remade
from unicron.train.carry.beside import Mark
from unicron.train.carry.by_value import Opaque
from unicron.train.carry.graphs import cloned_leaf, keeps_graph
from unicron.train.carry.kinds import FUNCTION, GraphKeptError, NotCarriedError, check_order, items_of_set, refill_set
from unicron.train.carry.objects import KEPT_WORKERS, Resumable, kind_of
from unicron.train.carry.tensors import order_of, raw, unraw
from unicron.train.worker.injected import InjectedFault

Key = tuple[Any, ...]
"""Of an object: the loop before which it was made, whose variable leads to it, and the way from there."""

LARGEST_BYTES, LARGE_BYTES = 15 << 20, 4 << 20
"""Of a snapshot: at most; and from when on another rank is to give what it can."""


def _tensor(
    cls: type,
    data: Any,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    trained: bool,
    grad: Any,
    device: str = "cpu",
    order: tuple[int, ...] = (),
) -> Any:
    made = unraw(data, dtype, shape).to(device)
    if order:
        made = made.permute(order).contiguous().permute([order.index(each) for each in range(len(order))])
    if cls is torch.nn.Parameter:
        made = torch.nn.Parameter(made, trained)
    elif trained:
        made.requires_grad_()
    made.grad = grad
    return made


def _frozenset(items: list[Any]) -> Any:
    made = frozenset(value for name, value in items if name == "?")
    check_order(made, items)
    return made


def _reduce_method(thing: MethodType) -> Any:
    """Return the parts of a bound method: by its name another process might find what the object has instead of it."""
    owner, function, name = thing.__self__, thing.__func__, thing.__func__.__name__
    for place, cls in enumerate(_line_of(owner)):
        found = vars(cls).get(name)
        if found is function or getattr(found, "__func__", None) is function:
            return _method, (owner, place, name)
    return _bound, (function, owner)


def _bound(function: Any, owner: Any) -> MethodType:
    return MethodType(function, owner)  # which pickle can't name


def _method(owner: Any, place: int, name: str) -> Any:
    found = vars(_line_of(owner)[place])[name]
    return found.__get__(None, owner) if isinstance(owner, type) else found.__get__(owner)


def _line_of(owner: Any) -> tuple[type, ...]:
    return (owner if isinstance(owner, type) else type(owner)).__mro__


def _reference(thing: Any) -> Any:
    return weakref.ref(thing if thing is not None else type("Gone", (), {})())


def _remaining_of(thing: Any) -> dict[str, Any]:
    """Return what a loader's iterator is that is through.

    Raises:
        NotCarriedError: it is not, or has processes that go on.
    """
    if thing._persistent_workers:  # noqa: SLF001
        raise NotCarriedError(KEPT_WORKERS)
    sampler, left = thing._sampler_iter, None  # noqa: SLF001
    with contextlib.suppress(TypeError, NotImplementedError):  # it has no length
        left = len(thing._index_sampler) - thing._num_yielded  # noqa: SLF001
    if left != 0 and not (isinstance(sampler, GeneratorType) and getgeneratorstate(sampler) == GEN_CLOSED):
        raise NotCarriedError("a DataLoader's iterator that was made since the loop began, and is under way")
    alone = isinstance(thing, _SingleProcessDataLoaderIter)  # else it has processes, that are ended
    plain = {name: value for name, value in vars(thing).items() if alone or isinstance(value, int | str | None)}
    return {name: value for name, value in plain.items() if name != "_sampler_iter"}


def _exhausted(cls: Any, attributes: dict[str, Any]) -> Any:
    made = cls.__new__(cls)
    vars(made).update(attributes, _sampler_iter=iter(()))
    return made


def _module(name: str) -> ModuleType:
    return sys.modules[name]


def _generator(state: torch.Tensor) -> torch.Generator:
    made = torch.Generator()
    made.set_state(state)
    return made


def _resumable(cls: type[Resumable], iterable: Any, position: Any) -> Resumable:
    """Return what goes over something from a position: `Unpickler` does."""
    raise NotImplementedError


class TooLargeError(Exception):
    """The changes are more than a snapshot may have."""


class Limited(io.BytesIO):
    """Takes no more, so that no time is lost with what is not sent.

    Args:
        most: bytes that it takes.
    """

    def __init__(self, most: int = LARGEST_BYTES) -> None:
        super().__init__()
        self._most = most

    def write(self, data: Any) -> int:
        """Take data.

        Raises:
            TooLargeError: it is too much.
        """
        if self.tell() + memoryview(data).nbytes > self._most:
            raise TooLargeError(f"what has changed since the loop began takes more than {self._most >> 20} MiB")
        return super().write(data)


class Pickler(pickle.Pickler):
    """Pickles what a script has, with the keys of objects in their place that another process has, too.

    Args:
        stream: where it goes.
        keys: of these, by their identity.
        memories: of tensors among these, which others may share.
        mark: returns the bytes of a tensor, or a mark in their place.
        marked: object from which on that is called, as it comes along.
    """

    def __init__(
        self,
        stream: io.BytesIO,
        keys: Mapping[int, Key],
        memories: Memories | None = None,
        mark: Callable[[torch.Tensor], Any] = raw,
        marked: object = None,
    ) -> None:
        super().__init__(stream, pickle.HIGHEST_PROTOCOL)
        self._keys, self._memories, self._mark, self._marked = keys, memories or {}, mark, marked
        self._read: Callable[[torch.Tensor], Any] = raw

    def dump(self, thing: Any) -> None:
        """Pickle it.

        Raises:
            NotCarriedError: a part of it is too deep inside, or another process can't have it.
        """
        try:
            super().dump(thing)
        except RecursionError:
            raise NotCarriedError(
                "it leads to objects that hold one another in too long a chain, as a linked list's do: keep them in a "
                "list"
            ) from None

    def persistent_id(self, thing: Any) -> Any:
        """Return the key of an object, or a mark; None for one that has none."""
        if thing is self._marked and thing is not None:
            self._read = self._mark
        return thing.key if type(thing) is Mark else self._keys.get(id(thing))

    def reducer_override(self, thing: Any) -> Any:
        """Return how to make an object again, where pickle would do otherwise.

        Raises:
            NotCarriedError: another process can't have it.
        """
        owner = owner_of(thing, self._memories)
        if owner is not None and id(owner) in self._keys:
            made = owner, tuple(thing.shape), thing.stride(), thing.storage_offset()
            return (alias_of, made, dict(vars(thing)), None, None, _attach) if vars(thing) else (alias_of, made)
        if isinstance(thing, torch.Tensor):
            return _reduce_tensor(thing, self._read, self._keys)
        for cls, reduce in _REDUCED.items():
            if isinstance(thing, cls):
                return reduce(thing)
        kind = kind_of(thing)
        if kind is BAR:
            return remade(thing)
        if isinstance(kind, Opaque):
            raise NotCarriedError(f"{type(thing).__module__}.{type(thing).__qualname__}, which only this process has")
        if isinstance(thing, FunctionType) and "<" in thing.__qualname__:
            return _reduce_function(thing)
        return NotImplemented


def _reduce_function(thing: FunctionType) -> Any:
    """Return the code of a function that was made in another; pickle can't name it.

    Raises:
        NotCarriedError: it shares variables with the function that has made it, or is of no module.
    """
    if thing.__closure__ or thing.__globals__ is not getattr(sys.modules.get(thing.__module__), "__dict__", None):
        raise NotCarriedError(f"the function {thing.__qualname__}, which was made since the loop began")
    code = marshal.dumps(thing.__code__, 2)  # later formats may be other ones in each process
    made = code, thing.__module__, thing.__name__, thing.__qualname__
    return _function, made, FUNCTION.state(thing), None, None, _complete_function


def _function(code: bytes, module: str, name: str, qualname: str) -> FunctionType:
    made = FunctionType(marshal.loads(code), vars(sys.modules[module]), name)  # noqa: S302 a rank of this task has made it
    made.__qualname__ = qualname
    return made


def _complete_function(thing: FunctionType, state: Any) -> None:
    FUNCTION.set_state(thing, state)


@torch.enable_grad()
def _clone(leaf: torch.Tensor, data: Any) -> torch.Tensor:
    made = leaf.clone()
    made.data.copy_(unraw(data, leaf.dtype, tuple(leaf.shape)))
    return made


def _reduce_tensor(thing: torch.Tensor, read: Callable[[torch.Tensor], Any], keys: Mapping[int, Key]) -> Any:
    """Return the parts of a tensor; of one that was computed the value is kept, and not from what.

    A clone of a leaf that has a key is made as such.

    Raises:
        GraphKeptError: a backward pass may go through that yet.
    """
    if (leaf := cloned_leaf(thing)) is not None and id(leaf) in keys and not vars(thing):
        return _clone, (leaf, read(thing))
    if keeps_graph(thing):
        raise GraphKeptError(
            "still has the graph by which it was computed, which a later backward pass may go through: compute it "
            "where it is used, or keep it detached"
        )
    trained = thing.requires_grad and thing.is_leaf
    grad = thing.grad if thing.is_leaf else None
    made = type(thing), read(thing), thing.dtype, tuple(thing.shape), trained, grad, thing.device.type, order_of(thing)
    return (_tensor, made, dict(vars(thing)), None, None, _attach) if vars(thing) else (_tensor, made)


def _attach(thing: Any, attributes: dict[str, Any]) -> None:
    vars(thing).update(attributes)


def _reduce_set(thing: Any) -> Any:
    if type(thing) is set:
        return set, (), items_of_set(thing), None, None, refill_set
    return (_frozenset, (items_of_set(thing),)) if type(thing) is frozenset else NotImplemented


_REDUCED: dict[Any, Callable[[Any], Any]] = {
    torch.Generator: lambda thing: (_generator, (thing.get_state(),)),
    weakref.ref: lambda thing: (_reference, (thing(),)),
    MethodType: _reduce_method,
    Resumable: lambda thing: (_resumable, (type(thing), thing.iterable, thing.whole_position())),
    (_SingleProcessDataLoaderIter, _MultiProcessingDataLoaderIter): lambda thing: (
        _exhausted,
        (type(thing), _remaining_of(thing)),
    ),
    (set, frozenset): _reduce_set,
    ModuleType: lambda thing: (_module, (thing.__name__,)),
}


class Unpickler(pickle.Unpickler):
    """Unpickles it.

    Args:
        stream: where it is.
        find: returns the object with a key.
    """

    def __init__(self, stream: io.BytesIO, find: Callable[[Key], Any]) -> None:
        super().__init__(stream)
        self._find, self._unbegun = find, list[tuple[Resumable, Any, Any]]()

    def find_class(self, module: str, name: str) -> Any:
        """Return what makes an object."""
        found = super().find_class(module, name)
        return self._put_off if found is _resumable else found

    def _put_off(self, cls: type[Resumable], iterable: Any, position: Any) -> Resumable:
        made = cls.found_in(iterable) or cls.__new__(cls)
        self._unbegun.append((made, iterable, position))
        return made

    def expect_unbegun(self) -> None:
        """Have all iterators know what they are to be, before others go over what they are to be made from."""
        for made, iterable, position in self._unbegun:
            made.expect(iterable, position)

    def begin_unbegun(self, restore: Callable[[], None]) -> None:
        """Have all iterators begin where they were, once what they go over is what it was.

        Args:
            restore: makes it so again, as each of them changes that.

        Raises:
            NotCarriedError: one can't be brought there.
        """
        for made, iterable, position in self._unbegun:
            try:
                made.begin_anew(iterable, position)
            except (NotCarriedError, GroupBrokenError, InjectedFault):
                raise
            except Exception as error:
                raise NotCarriedError(
                    f"a {type(iterable).__qualname__} can't be gone over anew: {brief(error)}"
                ) from error
            restore()

    def persistent_load(self, key: Any) -> Any:
        """Return the object with this key."""
        return self._find(key)
