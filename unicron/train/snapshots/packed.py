"""A state as a file that can be mapped: its tensors, then the values that hold them, then where those begin.

A file that is written over costs no more than a copy of memory: nothing is serialized but names and numbers. torch.save
takes five times as long, most of it for the sums of zip files.
"""

import mmap
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from unicron.errors import StateTransferError

FOOT = struct.Struct("<8sQ")
MAGIC = b"UNICRON\1"
ALIGNMENT = 64
"""Of tensors in the file, in bytes."""

TENSOR, TUPLE = "__tensor__", "__tuple__"
DTYPES = {str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
NAMES = {each: name for name, each in DTYPES.items()}


Copy = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]


class Packing:
    """The layout of a state's tensors in a file.

    Args:
        state: mappings and sequences of tensors and plain values, as `plain.to_plain` returns them. The tensors are
            read when it is written, all else is as it is now.
        copy: copies tensors to where they go; None: this thread does, at once.

    Attributes:
        size: of the file, in bytes.
    """

    def __init__(self, state: Any, copy: Copy | None = None) -> None:
        self._copy = copy or torch._foreach_copy_
        self._sources: list[torch.Tensor] = []
        self._offsets: list[int] = []
        self._placed: dict[tuple[Any, ...], int] = {}
        self._end = 0
        held = msgspec.msgpack.encode(self._encode(state))
        self._tail = held + FOOT.pack(MAGIC, len(held))
        self.size = self._end + len(self._tail)

    def write(self, mapped: mmap.mmap, before: "Targets | None" = None) -> "Targets":
        """Write it to a mapped file of this size.

        Args:
            mapped: the file.
            before: what this returned for the same file; where tensors go is not worked out again.
        """
        places = [(offset, each.dtype, each.shape) for offset, each in zip(self._offsets, self._sources, strict=True)]
        if before is None or before.places != places:
            flat = torch.frombuffer(mapped, dtype=torch.uint8)
            before = Targets(places, [_part(flat, *place) for place in places])
        if places:
            self._copy(before.tensors, self._sources)
        mapped[self._end : self.size] = self._tail
        return before

    def _encode(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return {TENSOR: [NAMES[value.dtype], list(value.shape), self._place(value)]}
        if isinstance(value, Mapping):
            return {key: self._encode(each) for key, each in value.items()}
        if type(value) is list:
            return [self._encode(each) for each in value]
        return {TUPLE: [self._encode(each) for each in value]} if type(value) is tuple else value

    def _place(self, tensor: torch.Tensor) -> int:
        """Return where a tensor begins; one that is there twice, as tied weights are, is written once."""
        size = tensor.nbytes
        if not size:
            return self._end
        same = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        offset = self._placed.setdefault(same, self._end)
        if offset == self._end:
            self._sources.append(tensor.detach())
            self._offsets.append(offset)
            self._end = -(-(offset + size) // ALIGNMENT) * ALIGNMENT
        return offset


class Targets(NamedTuple):
    """The tensors of a mapped file, each with its place."""

    places: list[tuple[int, torch.dtype, torch.Size]]
    tensors: list[torch.Tensor]


def _part(flat: torch.Tensor, offset: int, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return flat[offset : offset + shape.numel() * dtype.itemsize].view(dtype).view(shape)


def map_file(path: Path, size: int) -> mmap.mmap:
    """Return a file of this size to write a state to; one that is there is written over.

    Raises:
        OSError: there is no room: that is found out here, and not by a signal on the way.
    """
    with path.open("ab") as file:
        os.posix_fallocate(file.fileno(), 0, size)
        os.ftruncate(file.fileno(), size)
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), size)


def unpack(path: Path, size: int) -> Any:
    """Return the state in a file; what is read of its tensors is read from the file when it is used.

    Args:
        path: of the file.
        size: of the state in bytes; the file may say behind it what it holds.

    Raises:
        StateTransferError: there is none.
        OSError: the file can't be read.
    """
    with path.open("rb") as file:
        if not FOOT.size < size <= path.stat().st_size:
            raise StateTransferError(f"{path.name} is no state of {size} bytes: it has {path.stat().st_size}")
        mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    magic, length = FOOT.unpack(mapped[-FOOT.size :])
    end = size - FOOT.size - length
    if magic != MAGIC or end < 0:
        raise StateTransferError(f"{path.name} is no state: it does not end as one")
    flat = torch.frombuffer(mapped, dtype=torch.uint8)
    try:
        return _decode(msgspec.msgpack.decode(mapped[end : end + length]), flat[:end])
    except (KeyError, TypeError, ValueError, RuntimeError, EOFError) as error:
        raise StateTransferError(f"{path.name} is no state: {error!r}") from error


def _decode(value: Any, flat: torch.Tensor) -> Any:
    if isinstance(value, list):
        return [_decode(each, flat) for each in value]
    if not isinstance(value, dict):
        return value
    if TENSOR in value:
        return _tensor(value[TENSOR], flat)
    if TUPLE in value:
        return tuple(_decode(each, flat) for each in value[TUPLE])
    return {key: _decode(each, flat) for key, each in value.items()}


def _tensor(entry: Any, flat: torch.Tensor) -> torch.Tensor:
    name, shape, offset = entry
    empty = torch.empty(shape, dtype=DTYPES[name], device="meta")
    if offset < 0 or offset + empty.nbytes > len(flat):
        raise ValueError(f"a tensor of {empty.nbytes} bytes at {offset} of {len(flat)}")
    return flat[offset : offset + empty.nbytes].view(empty.dtype).view(empty.shape)
