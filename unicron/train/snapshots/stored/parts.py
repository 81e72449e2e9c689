"""One place's part of a checkpoint, written by the process that has it, with nobody else's help."""

from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from xxhash import xxh3_128

from unicron.contracts.storage import Saving, StoredFile, StoredPart
from unicron.errors import CheckpointError
from unicron.snapshots.storage.manifest import (
    Index,
    Piece,
    checksum_of,
    data_name,
    folder_name,
    index_name,
    joint_checksum,
)
from unicron.snapshots.storage.root import UNFINISHED, Storage
from unicron.train.snapshots.stored.pieces import StatePiece, check_plain, list_pieces, split

PIECE = 2048
"""Most bytes that `torch.save` adds to the content of a piece, and that its entry in the index takes."""


def working_folder(storage: Storage, saving: Saving) -> str:
    """Return the name of the folder that a checkpoint is written in."""
    return folder_name(saving.iteration, saving.attempt) + (UNFINISHED if storage.is_directory else "")


def write_part(saving: Saving, place: int, state: Mapping[str, Any]) -> StoredPart:
    """Write a place's part of the state; the result is needed to complete the checkpoint.

    Args:
        saving: what it is a part of.
        place: in the replica.
        state: as `gathering.collect_state` makes it.

    Raises:
        CheckpointError: it can't be written, or is no part of this checkpoint; no other checkpoint was touched.
    """
    if not 0 <= place < saving.layout.replica_workers or state["iteration"] != saving.iteration:
        raise CheckpointError(
            f"place {place} of iteration {state['iteration']} is no part of iteration {saving.iteration} of "
            f"{saving.task}, whose replica has {saving.layout.replica_workers} places"
        )
    storage, (taken, rest) = Storage(saving.root), split(state)
    check_plain(rest)
    held = sum(each.value.nbytes for each in taken if each.box is not None)
    storage.check_room(held + PIECE * (2 * len(taken) + 2))
    folder = (saving.task, working_folder(storage, saving))
    with storage.writing(*folder, data_name(place)) as stream:
        pieces = PieceWriter(stream)
        for each in taken:
            pieces.add(each)
        pieces.add(StatePiece((), rest, None))
    index = msgspec.json.encode(
        Index(
            task=saving.task,
            iteration=saving.iteration,
            layout=saving.layout,
            attempt=saving.attempt,
            place=place,
            pieces=pieces.written,
        )
    )
    storage.write(index, *folder, index_name(place))
    return StoredPart(
        place=place,
        index=StoredFile(name=index_name(place), size=len(index), checksum=checksum_of(index)),
        data=pieces.file(data_name(place)),
    )


class PieceWriter:
    """Writes pieces one after the other.

    Args:
        stream: the file.
    """

    def __init__(self, stream: Any) -> None:
        self.written: list[Piece] = []
        self._stream, self._end = stream, 0

    def add(self, taken: StatePiece) -> None:
        """Write a piece as `torch.save` does."""
        counted: Any = _Counted(self._stream)
        value = taken.value if taken.box is None else _bare(taken.value)
        try:
            torch.save(value, counted)
        except Exception as error:
            if counted.failed is not None:  # torch says something else of it
                raise counted.failed from error
            raise
        self.written.append(
            Piece(
                path=list(taken.path),
                offset=self._end,
                length=counted.length,
                checksum=counted.digest.hexdigest(),
                listed=list_pieces(taken.path, taken.value),
                **_shape(taken),
            )
        )
        self._end += counted.length

    def file(self, name: str) -> StoredFile:
        """Return what came of it."""
        return StoredFile(name=name, size=self._end, checksum=joint_checksum(self.written))


class _Counted:
    """A stream for `torch.save` that passes on, counts and sums what is written.

    Args:
        stream: where it goes.
    """

    def __init__(self, stream: Any) -> None:
        self.length, self.digest = 0, xxh3_128()
        self.failed: Exception | None = None
        self._stream = stream

    def write(self, content: bytes | memoryview) -> int:
        """Write it all."""
        try:
            self._stream.write(content)
        except Exception as error:
            self.failed = error
            raise
        size = memoryview(content).nbytes
        self.digest.update(content)
        self.length += size
        return size

    def flush(self) -> None:
        """Do nothing: the file is flushed once, at its end."""


def _bare(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with nothing around it: `torch.save` writes all of a storage that a tensor is a view of."""
    held = tensor.detach().cpu().contiguous()
    return held if held.untyped_storage().nbytes() == held.nbytes else held.clone()


def _shape(taken: StatePiece) -> dict[str, Any]:
    if taken.box is None:
        return {}
    whole, at, shape = map(list, taken.box)
    return {"dtype": str(taken.value.dtype).removeprefix("torch."), "whole": whole, "at": at, "shape": shape}
