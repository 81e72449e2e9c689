"""The plain values of a script's variables, which is what it holds besides models, optimizers and data."""

import ctypes
import io
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch

from unicron.errors import InvalidInputError
from unicron.train.heard import Heard

MOST = 10_000
"""Values of a list or dictionary that are copied at each head; a longer one is the script's data, not its progress."""

LEAST_BYTES = 1 << 20
"""Tensors that take more are data, too."""

DEEPEST, MOST_OBJECTS = 4, 64
"""Attributes of attributes that are looked at; a list of more objects is data."""

PLAIN = (type(None), bool, int, float, str, bytes)
OWN = {"__main__", "accelerate.accelerator"}
"""Modules whose classes hold where a script is."""

_NOT_PLAIN = object()


class Counted(Iterator[Any]):
    """An iterator of a script that knows how far it is. What is random in it depends on that alone.

    Args:
        over: what it goes over.
        seed: seeds what is random for an item of that number.
        running: those that are just finding their next item.

    Attributes:
        count: items that were asked for.
        heard: what collectives have given in finding them.
        goes: it is just going to where another one is.
    """

    def __init__(self, over: Iterable[Any], seed: Callable[[int], None], running: "list[Counted]") -> None:
        self._over, self._seed, self._running = over, seed, running
        self._iterator: Iterator[Any] | None = None
        self.count, self.heard, self.goes = 0, Heard(), False

    def __next__(self) -> Any:
        """Return the next item."""
        numpy = sys.modules.get("numpy")
        before = torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None
        self._running.append(self)
        try:
            self._seed(self.count)
            if self._iterator is None:
                self._iterator = iter(self._over)
            self.count += 1
            return next(self._iterator)
        finally:
            self._running.pop()
            torch.set_rng_state(before[0])
            random.setstate(before[1])
            if numpy:
                numpy.random.set_state(before[2])

    def saved(self) -> dict[str, Any]:
        """Return how far it is."""
        return {"count": self.count, "heard": self.heard.saved()}

    def go_to(self, saved: dict[str, Any]) -> None:
        """Be as far as another one is; items that it has handed out are found once more, and dropped."""
        self.heard, self.goes = Heard(saved["heard"], self.heard), True
        while self.count < saved["count"]:
            next(self, None)
        self.goes = False


class Space:
    """The variables of a function that runs loops, or of the module.

    Args:
        frame: of the function, or of anything in the module.
        module: the module's, None where these are the module's.
        line: of the loop that is run first.

    Attributes:
        before: copies of them as that loop began.
    """

    def __init__(self, frame: FrameType, module: "Space | None", line: int) -> None:
        self.frame, self.module = frame, module
        self.before = self.copies(line)

    @property
    def _variables(self) -> dict[str, Any]:
        return self.frame.f_globals if self.module is None else self.frame.f_locals

    def take(self, values: Mapping[str, Any]) -> None:
        """Have the variables be what they are elsewhere."""
        variables = self._variables
        for path, value in values.items():
            *way, name = path.split(".")
            if way:
                holder = variables[way[0]]
                for each in way[1:]:
                    holder = holder[int(each)] if isinstance(holder, list) else getattr(holder, each)
                setattr(holder, name, value)
            elif isinstance(there := variables.get(name), Counted):
                there.go_to(value)
            else:
                variables[name] = value
        if self.module is not None and sys.version_info < (3, 13):  # from then on they are written through (PEP 667)
            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(self.frame), ctypes.c_int(0))

    def copies(self, line: int) -> dict[str, Any]:
        """Return copies of the plain values, those of its objects' attributes too.

        Raises:
            InvalidInputError: an iterator, about which nothing is known; it names the loop at `line`.
        """
        found: dict[str, Any] = {}
        for name, value in self._variables.items():
            if name.startswith("__"):
                continue
            if isinstance(value, Counted):
                found[name] = value.saved()
            elif isinstance(value, Iterator) and not isinstance(value, io.IOBase):
                raise InvalidInputError(
                    f"the loop at line {line} uses `{name}`, an iterator ({type(value).__name__}), which can't be "
                    "brought to where it is on another worker: loop over it with `for`, make it with `iter()` in this "
                    "file, or set `heal: restart`"
                )
            else:
                copies = ((path, _copied(each)) for path, each in _parts(name, value))
                found |= {path: each for path, each in copies if each is not _NOT_PLAIN}
        return found


def differing(copies: Mapping[str, Any], before: Mapping[str, Any], left_out: set[str]) -> dict[str, Any]:
    """Return what is not what it was before."""
    return {
        name: each
        for name, each in copies.items()
        if name not in left_out and (name not in before or not _same(each, before[name]))
    }


def _parts(path: str, value: Any, depth: int = 0) -> Iterable[tuple[str, Any]]:
    """Yield a value, or the attributes of one of a class in `OWN`, each with its name."""
    if depth > DEEPEST or not _holds(value):
        yield path, value
        return
    for name, each in vars(value).items():
        if type(each) is list and len(each) <= MOST_OBJECTS and any(map(_holds, each)):
            for number, one in enumerate(each):
                if _holds(one):
                    yield from _parts(f"{path}.{name}.{number}", one, depth + 1)
        else:
            yield from _parts(f"{path}.{name}", each, depth + 1)


def _holds(value: Any) -> bool:
    own = type(value).__module__ in OWN and not isinstance(value, torch.nn.Module | type)
    return own and hasattr(value, "__dict__")


def _copied(value: Any) -> Any:
    """Return a copy of what is plain, `_NOT_PLAIN` of all else."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        kept = not isinstance(value, torch.nn.Parameter) and value.nbytes <= LEAST_BYTES
        return value.detach().clone() if kept else _NOT_PLAIN
    if type(value) in {list, tuple, dict} and len(value) <= MOST:
        each = {key: _copied(part) for key, part in (value.items() if type(value) is dict else enumerate(value))}
        if any(part is _NOT_PLAIN for part in each.values()) or not all(isinstance(key, str | int) for key in each):
            return _NOT_PLAIN
        return each if type(value) is dict else type(value)(each.values())
    return _NOT_PLAIN


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
