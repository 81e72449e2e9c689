"""Reads the parts of a checkpoint that a rank of any layout needs, and no more.

Nothing of it is code: an index says where a tensor lies, and torch loads it with `weights_only`.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from unicron.contracts.storage import StoredPart, StoredState
from unicron.contracts.tasks import ParallelLayout
from unicron.errors import CheckpointError, StateTransferError
from unicron.snapshots.storage.catalog import Stored, list_checkpoints
from unicron.snapshots.storage.check import index_of
from unicron.snapshots.storage.manifest import Index, Manifest, Piece, checksum_of
from unicron.snapshots.storage.root import Storage
from unicron.train.snapshots.gathering import Gathering, Needs, Protected, assemble
from unicron.train.snapshots.stored.metadata import box_of
from unicron.train.snapshots.stored.pieces import join, loads
from unicron.train.worker.redistribute import nearest_places

_GAP = 1 << 20
"""Bytes that nobody wants, which are read where that spares asking once more."""

_STRETCH = 16 << 20
"""Longest stretch that is asked for at once, unless a tensor is longer, in bytes."""

_READERS = 4
"""Stretches that are read and checked side by side."""


def read(storage: Storage, stored: Stored, place: int, needs: Needs | None = None) -> dict[str, Any]:
    """Return the state that a place wrote, as `gathering.collect_state` made it.

    Args:
        storage: where it is.
        stored: a complete checkpoint.
        place: of the layout that wrote it.
        needs: what of the parameters is needed; None for all.

    Raises:
        CheckpointError: it can't be read, or is not what was written.
    """
    manifest = _manifest(stored)
    folder, part = (manifest.task, stored.folder), manifest.parts[place]
    index = index_of(storage, folder, part)
    numbers = [number for number, each in enumerate(index.pieces) if each.dtype and _is_needed(each, needs)]
    values: dict[int, Any] = {}
    with ThreadPoolExecutor(_READERS) as readers:
        stretches = _stretches(index.pieces, [*numbers, len(index.pieces) - 1])
        for some in readers.map(partial(_values, storage, folder, part, index), stretches):
            values.update(some)
    rest = values.pop(len(index.pieces) - 1)
    found: dict[str, Any] = join(rest, values.get)
    return found


def gather_state(
    storage: Storage, stored: Stored, layout: ParallelLayout, place: int, protected: Protected
) -> dict[str, Any]:
    """Return the state of a rank, for `gathering.loaded`: put together from the parts that it needs, nearest first.

    Args:
        storage: where it is.
        stored: a complete checkpoint, of any layout.
        layout: of the rank.
        place: of the rank.
        protected: what it is for.

    Raises:
        CheckpointError: it can't be read, or is not what was written.
        StateTransferError: it does not fit this rank.
    """
    manifest, gathering, needs = _manifest(stored), Gathering(protected), Needs(protected)
    for other in nearest_places(layout, place, manifest.layout, range(len(manifest.parts))):
        gathering.add(read(storage, stored, other, needs))
        if not gathering.missing:
            break
    return gathering.result(manifest.iteration)


def read_whole(storage: Storage, stored: Stored) -> dict[str, Any]:
    """Return all that a checkpoint holds, put together from the parts of all places, and its iteration.

    Raises:
        CheckpointError: it can't be read, or is not what was written.
        StateTransferError: its parts do not make up whole tensors.
    """
    manifest = _manifest(stored)
    parts = (read(storage, stored, place)["objects"] for place in range(len(manifest.parts)))
    return {**assemble(parts), "iteration": manifest.iteration}


def restore(stored: StoredState, task: str, layout: ParallelLayout, place: int, protected: Protected) -> dict[str, Any]:
    """Return the state of a rank from a checkpoint that was found before, as `gathered` does.

    Raises:
        StateTransferError: it can't be had, or does not fit.
    """
    try:
        storage = Storage(stored.root)
        known = next((each for each in list_checkpoints(storage, task) if each.folder == stored.folder), None)
        if known is None:
            raise CheckpointError(f"{storage.address(task, stored.folder)} is not there any more")  # noqa: TRY301
        return gather_state(storage, known, layout, place, protected)
    except CheckpointError as error:
        raise StateTransferError(str(error)) from error


def _manifest(stored: Stored) -> Manifest:
    if stored.manifest is None:
        raise CheckpointError(f"{stored.address} is no complete checkpoint: {stored.fault or 'it has no manifest'}")
    return stored.manifest


def _is_needed(piece: Piece, needs: Needs | None) -> bool:
    return needs is None or needs.has(piece.path, box_of(piece))


def _values(
    storage: Storage, folder: tuple[str, str], part: StoredPart, index: Index, numbers: Sequence[int]
) -> dict[int, Any]:
    """Return what some pieces hold that lie close to one another, checked."""
    begin, end = index.pieces[numbers[0]].offset, _end(index.pieces[numbers[-1]])
    content = memoryview(storage.stretch(begin, end, *folder, part.data.name))
    found: dict[int, Any] = {}
    for number in numbers:
        piece = index.pieces[number]
        try:
            found[number] = _value(piece, content[piece.offset - begin : _end(piece) - begin])
        except CheckpointError as error:
            where = f"{storage.address(*folder, part.data.name)}: {piece.key or 'the state'}"
            raise CheckpointError(f"{where} {error}") from error
    return found


def _value(piece: Piece, content: memoryview) -> Any:
    if checksum_of(content) != piece.checksum:
        raise CheckpointError("is not as it was written")
    value = loads(content)
    if piece.dtype and list(getattr(value, "shape", [])) != piece.shape:
        raise CheckpointError(f"is not of the shape {piece.shape} that its index says")
    return value


def _stretches(pieces: Sequence[Piece], numbers: Sequence[int]) -> list[list[int]]:
    """Return which of these pieces are read at once, for they lie close to one another."""
    found: list[list[int]] = []
    for number in numbers:
        near = found and pieces[number].offset - _end(pieces[found[-1][-1]]) <= _GAP
        if near and _end(pieces[number]) - pieces[found[-1][0]].offset <= _STRETCH:
            found[-1].append(number)
        else:
            found.append([number])
    return found


def _end(piece: Piece) -> int:
    return piece.offset + piece.length
