"""Completes a checkpoint: only when all parts are there as their writers reported, it becomes the newest."""

import io
import time
from collections.abc import Sequence

from unicron.contracts.storage import Saving, StoredFile, StoredPart
from unicron.errors import CheckpointError
from unicron.snapshots.storage import catalog
from unicron.snapshots.storage.catalog import Stored
from unicron.snapshots.storage.check import index_of, part_faults
from unicron.snapshots.storage.manifest import (
    FORMAT,
    MANIFEST,
    Index,
    Manifest,
    checksum_of,
    data_name,
    folder_name,
    manifest_in,
    sealed,
)
from unicron.snapshots.storage.root import Storage
from unicron.train.snapshots.stored.metadata import METADATA, Lying, pickle_metadata
from unicron.train.snapshots.stored.parts import PieceWriter, working_folder
from unicron.train.snapshots.stored.pieces import StatePiece

MERGED = "merged"


def commit(saving: Saving, parts: Sequence[StoredPart], at: float | None = None) -> Stored:
    """Complete a checkpoint, once each place has reported its part; all of it is read for that.

    A caller that does not know whether it has done so already may do it again.

    Args:
        saving: which one.
        parts: what `write_part` returned, of each place once.
        at: Unix seconds that it counts as completed at; None: now.

    Raises:
        CheckpointError: parts are missing, or not as their writers reported, or do not make up the state. The
            checkpoint does not come to be then, and the others are as they were.
    """
    storage = Storage(saving.root)
    for each in catalog.list_checkpoints(storage, saving.task):
        if each.manifest is not None and each.manifest.attempt == saving.attempt:
            return each
    parts = sorted(parts, key=lambda part: part.place)
    places = [part.place for part in parts]
    if places != list(range(saving.layout.replica_workers)):
        raise CheckpointError(
            f"iteration {saving.iteration} of {saving.task} has the parts of places {places} instead of "
            f"{list(range(saving.layout.replica_workers))}"
        )
    folder = (saving.task, working_folder(storage, saving))
    others = _for_torch(storage, folder, _indexes(storage, saving, folder, parts))
    manifest = Manifest(
        version=FORMAT,
        task=saving.task,
        iteration=saving.iteration,
        layout=saving.layout,
        attempt=saving.attempt,
        written=time.time() if at is None else at,
        parts=list(parts),
        others=others,
    )
    content = sealed(manifest)
    storage.write(content, *folder, MANIFEST)
    name = _finished(storage, saving, folder[1])
    return Stored(
        folder=name,
        address=storage.address(saving.task, name),
        iteration=saving.iteration,
        manifest=manifest_in(content, name),
        modified=manifest.written,
    )


def abandon(saving: Saving) -> None:
    """Remove what was written of a checkpoint that will not be completed.

    Raises:
        CheckpointError: it can't be removed; a day later pruning tries as well.
    """
    storage = Storage(saving.root)
    folder = working_folder(storage, saving)
    if folder in storage.entries(saving.task) and MANIFEST not in storage.entries(saving.task, folder):
        storage.remove(saving.task, folder)


def _indexes(storage: Storage, saving: Saving, folder: tuple[str, str], parts: Sequence[StoredPart]) -> list[Index]:
    """Return the indexes of parts, once they were read and found to be as reported."""
    if wrong := [fault for part in parts for fault in part_faults(storage, folder, part)]:
        raise CheckpointError(
            f"{storage.address(*folder)} is not as its writers reported: {'; '.join(wrong[:5])}; every node must see "
            "the same storage there"
        )
    found = [index_of(storage, folder, part) for part in parts]
    for index in found:
        header = (index.task, index.iteration, index.attempt, index.layout)
        if header != (saving.task, saving.iteration, saving.attempt, saving.layout):
            raise CheckpointError(
                f"the part of place {index.place} is of iteration {index.iteration} of {index.task}, attempt "
                f"{index.attempt}, and not of {saving.iteration} of {saving.task}, attempt {saving.attempt}"
            )
    return found


def _for_torch(storage: Storage, folder: tuple[str, str], indexes: Sequence[Index]) -> list[StoredFile]:
    """Write the files that are for torch.distributed.checkpoint alone."""
    lying = [Lying(piece, data_name(index.place)) for index in indexes for piece in index.pieces if piece.path]
    files: dict[str, bytes] = {}
    if merged := _merged_groups(indexes):
        stream = io.BytesIO()
        pieces = PieceWriter(stream)
        for each in merged:
            pieces.add(each)
        files[data_name(MERGED)] = stream.getvalue()
        lying = [Lying(piece, data_name(MERGED)) for piece in pieces.written] + lying
    files[METADATA] = pickle_metadata(lying)
    for name, content in files.items():
        storage.write(content, *folder, name)
    return [StoredFile(name=name, size=len(each), checksum=checksum_of(each)) for name, each in files.items()]


def _merged_groups(indexes: Sequence[Index]) -> list[StatePiece]:
    """Return the parameters that each group of an optimizer has in all places, where they have different ones."""
    listed: dict[tuple[str | int, ...], list[list[str]]] = {}
    for index in indexes:
        for piece in index.pieces:
            if piece.listed:
                listed.setdefault(tuple(piece.path), []).append(piece.listed)
    return [
        StatePiece(path, list(dict.fromkeys(name for names in every for name in names)), None)
        for path, every in listed.items()
        if any(names != every[0] for names in every)
    ]


def _finished(storage: Storage, saving: Saving, folder: str) -> str:
    """Let a folder be found, and return its name; that of an earlier checkpoint of the same iteration is not taken."""
    if not storage.is_directory:
        return folder
    name = folder_name(saving.iteration)
    try:
        storage.rename(saving.task, folder, name)
    except FileExistsError:
        name = folder_name(saving.iteration, saving.attempt)
        storage.rename(saving.task, folder, name)
    return name
