"""A model in one file that plain torch loads: what the places of a replica have, brought to one, and written."""

import errno
import glob
import io
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import distributed
from xxhash import xxh3_128

from unicron.errors import GroupBrokenError

if TYPE_CHECKING:
    from unicron.train.groups.inner import InnerGroups

PIECE = 1 << 26
"""Bytes that are sent at once."""


def gather_parts(part: Any, groups: "InnerGroups") -> Iterator[Any]:
    """Gather the parts of all places of a replica at its first, and yield them there, one after the other.

    All places have to iterate over it; the others get nothing.

    Raises:
        GroupBrokenError: the replica broke.
    """
    stream = io.BytesIO()
    if groups.place == 0:
        yield part
    else:
        torch.save(part, stream)
    for place, (size,) in enumerate(groups.gather([float(stream.tell())])):
        if not size or groups.place not in {0, place}:
            continue
        data = torch.frombuffer(
            stream.getbuffer() if place == groups.place else bytearray(int(size)), dtype=torch.uint8
        )
        for begin in range(0, len(data), PIECE):
            piece = data[begin : begin + PIECE]
            there = piece.to(groups.device)
            if place == groups.place:
                distributed.send(there, 0)
            else:
                distributed.recv(there, place)
                piece.copy_(there)
        if groups.place == 0:
            if groups.epoch < 0:
                raise GroupBrokenError(f"place {place} of this replica is gone, or what it sent is noise")
            yield torch.load(io.BytesIO(data.numpy().data), weights_only=True, map_location="cpu")


def save_file(value: Any, path: Path) -> None:
    """Save a value, so that a file of this name is whole at any time, and outlives a crash of the machine.

    Raises:
        OSError: it can't be; a file that was there is as it was.
    """
    unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        with unfinished.open("wb") as file:
            stream: Any = _Summed(file)
            torch.save(value, stream)
            file.flush()
            os.fsync(file.fileno())
        _check(unfinished, stream.sum.digest())
        unfinished.rename(path)
    except OSError as error:
        raise OSError(error.errno, f"{path} can't be saved: {error.strerror}") from error
    finally:
        unfinished.unlink(missing_ok=True)
    _sync_folder(path.parent)
    for left in path.parent.glob(f"{glob.escape(path.name)}.????????.part"):
        left.unlink(missing_ok=True)  # of a writer that died


class _Summed:
    """A file that knows the checksum of what is written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self.sum = xxh3_128()
        self._file = file

    def write(self, data: Any) -> int:
        self.sum.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def _check(path: Path, checksum: bytes) -> None:
    """Raise if a file is not what was written to it."""
    found = xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            found.update(piece)
    if found.digest() != checksum:
        raise OSError(errno.EIO, "what was written is not what can be read there")


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
