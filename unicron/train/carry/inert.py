"""Reads pickles as plain containers, calls and references: nothing that they name is imported or run."""

import functools
import io
import pickle
from typing import Any, Self

import torch

SHOWN = 60
"""Characters of a value in a text."""

POSITION = frozenset({"count", "over", "last", "seen"})


def without_aids(value: Any) -> Any:
    """Return how far something is that a loop goes over, without what finds it anew: one process may need less."""
    if not (isinstance(value, dict) and value.keys() >= POSITION):
        return value
    loops = {place: without_aids(each) for place, each in value.get("loops", {}).items()}
    inside = {"within": without_aids(value.get("within")), "loops": loops}
    return {name: each for name, each in (value | inside).items() if name not in {"first", "last", "before"}}


class Made:
    """An object as a pickle makes it: by a function or class, from arguments, with a state and items."""

    __slots__ = ("arguments", "items", "named", "state")
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    items: list[Any]
    state: Any

    def __new__(cls, *arguments: Any, **named: Any) -> Self:
        """Make one as a class or function would be called."""
        made = super().__new__(cls)
        made.arguments, made.named, made.items = tuple(map(without_aids, arguments)), named, []
        return made

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, *arguments: Any, **named: Any) -> "Made":
        """Make one as an object of a library does that is called."""
        return type(self)(self, *arguments, **named)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, item: Any) -> None:
        """Add an item, as to a list or a set."""
        self.items.append(item)

    add = append

    def __setitem__(self, key: Any, item: Any) -> None:
        self.items.append((key, item))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(shown, self.arguments))})"


class Reference(type):
    """What is numbered, in a snapshot that is read without the objects that it refers to; it may be a class to call.

    Attributes:
        key: of the object.
    """

    key: tuple[Any, ...]

    def __repr__(cls) -> str:
        """Return its path."""
        return ".".join(map(str, cls.key[2:]))


@functools.cache
def _reference(key: tuple[Any, ...]) -> Reference:
    return Reference("numbered", (Made,), {"key": key, "__slots__": ()})


class Reader(pickle.Unpickler):
    """Reads a pickle without running or importing what it names."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a class or function; only torch's dtypes are themselves."""
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        return _made_by(module, name)

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self.referred = set[Any]()

    def persistent_load(self, key: Any) -> Reference:
        """Return what stands for an object that is numbered."""
        self.referred.add(key)
        return _reference(key)


@functools.cache
def _made_by(module: str, name: str) -> type:
    return type(name, (Made,), {"__module__": module, "__slots__": ()})


def read(data: bytes) -> Any:
    """Return what a pickle holds as plain containers, calls and references; nothing that it names is run."""
    return Reader(io.BytesIO(data)).load()


def shown(value: Any) -> str:
    """Return a value as a text shows it; of a long one both ends, as it may differ in either. Bytes are counted."""
    if isinstance(value, bytes) and len(value) > SHOWN:
        return f"{len(value)} bytes"
    try:
        text = " ".join(repr(value).split())
    except Exception:  # noqa: BLE001 whatever a script's objects raise
        text = f"a {type(value).__qualname__}"
    return text if len(text) <= SHOWN else f"{text[: SHOWN // 2 - 3]}...{text[-SHOWN // 2 :]}"
