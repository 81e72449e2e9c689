"""Known accelerators and the usual sizes of GPT-3. The figures and their sources are data files."""

import functools
import tomllib
from importlib.resources import files
from typing import Any, TypeVar

import msgspec

from unicron.errors import InvalidInputError

Kind = TypeVar("Kind")


class Accelerator(msgspec.Struct, kw_only=True, frozen=True):
    """One kind of GPU, in the server that it usually comes in.

    Attributes:
        peak_flops: dense bfloat16 FLOP/s.
        memory_bytes: nominal size of its memory.
        memory_bandwidth: bytes/s to its memory.
        link_bandwidth: bytes/s, in one direction, to the other GPUs of its node.
        node_bandwidth: bytes/s, in one direction, from one node to the network.
        gpus_per_node: GPUs of one node.
    """

    peak_flops: float
    memory_bytes: float
    memory_bandwidth: float
    link_bandwidth: float
    node_bandwidth: float
    gpus_per_node: int


class Size(msgspec.Struct, kw_only=True, frozen=True):
    """The shape of a transformer under its usual name."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int


def accelerator(name: str) -> Accelerator:
    """Return the accelerator `name`.

    Raises:
        InvalidInputError: it is not in the catalogue; those that are, are named.
    """
    return _entry(accelerators(), name, "accelerator")


def size(name: str) -> Size:
    """Return the model size `name`, as in "7B".

    Raises:
        InvalidInputError: it is not in the catalogue; those that are, are named.
    """
    return _entry(sizes(), name, "size")


@functools.cache
def accelerators() -> dict[str, Accelerator]:
    """Return all accelerators by name."""
    return msgspec.convert(_read("accelerators.toml"), dict[str, Accelerator], strict=False)


@functools.cache
def sizes() -> dict[str, Size]:
    """Return all model sizes by name."""
    return msgspec.convert(_read("models.toml"), dict[str, Size])


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads(files("unicron.costmodel").joinpath(name).read_text(encoding="utf-8"))


def _entry(known: dict[str, Kind], name: str, what: str) -> Kind:
    if name in known:
        return known[name]
    raise InvalidInputError(f"no such {what} as {name!r}; known are {', '.join(known)}")
