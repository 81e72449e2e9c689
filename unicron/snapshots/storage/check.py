"""Whether the files of a checkpoint are those that its writers wrote: missing, cut short, altered, or not theirs."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from xxhash import xxh3_128

from unicron.contracts.storage import StoredFile, StoredPart
from unicron.errors import CheckpointError
from unicron.snapshots.storage.manifest import (
    MANIFEST,
    REWOUND,
    Index,
    Manifest,
    checksum_of,
    gaps,
    index_in,
    joint_checksum,
)
from unicron.snapshots.storage.root import Storage, StoredEntry

Folder = tuple[str, str]
"""A task, and the name of a folder of it."""

_BLOCK = 8 << 20
_READERS = 4


def faults(storage: Storage, folder: Folder, manifest: Manifest) -> list[str]:
    """Return what is wrong with the files of a checkpoint, each by its name; all of them are read.

    Raises:
        CheckpointError: the storage can't be listed.
    """
    there = storage.entries(*folder)
    jobs = [partial(_part_faults, storage, folder, part, there) for part in manifest.parts]
    jobs += [partial(_file_faults, storage, folder, file, there) for file in manifest.others]
    with ThreadPoolExecutor(_READERS) as readers:
        return [fault for found in readers.map(lambda job: job(), jobs) for fault in found]


def strangers(storage: Storage, folder: Folder, manifest: Manifest) -> list[str]:
    """Return the files in a checkpoint's folder that are none of its own; they harm nobody.

    Raises:
        CheckpointError: the storage can't be listed.
    """
    return sorted(storage.entries(*folder).keys() - {MANIFEST, REWOUND} - {file.name for file in manifest.files})


def index_of(storage: Storage, folder: Folder, part: StoredPart) -> Index:
    """Return the index of a part, checked.

    Raises:
        CheckpointError: it can't be read, or is not what was written.
    """
    where, content = storage.address(*folder, part.index.name), storage.read(*folder, part.index.name)
    if checksum_of(content) != part.index.checksum:
        raise CheckpointError(f"{where} is not as it was written")
    return index_in(content, where)


def part_faults(storage: Storage, folder: Folder, part: StoredPart) -> list[str]:
    """Return what is wrong with the files of one part; all of it is read.

    Raises:
        CheckpointError: the storage can't be listed.
    """
    return _part_faults(storage, folder, part, storage.entries(*folder))


def _part_faults(storage: Storage, folder: Folder, part: StoredPart, there: dict[str, StoredEntry]) -> list[str]:
    wrong = [fault for file in (part.index, part.data) for fault in _size_faults(file, there)]
    if wrong:
        return wrong
    try:
        index = index_of(storage, folder, part)
        if index.place != part.place:
            return [f"{part.index.name}: of place {index.place} instead of {part.place}"]
        with storage.reading(*folder, part.data.name) as stream:
            return _piece_faults(stream, index, part.data)
    except CheckpointError as error:
        return [str(error)]


def _piece_faults(stream: Any, index: Index, data: StoredFile) -> list[str]:
    """Return which pieces are not as they were written."""
    if wrong := gaps(index.pieces, data.size):
        return [f"{data.name}: {wrong}"]
    if joint_checksum(index.pieces) != data.checksum:
        return [f"{data.name}: its index lists other pieces than were written"]
    found: list[str] = []
    for piece in index.pieces:
        digest = xxh3_128()
        for block in _blocks(stream, piece.length):
            digest.update(block)
        if digest.hexdigest() != piece.checksum:
            found.append(f"{data.name}: altered in {piece.key or 'the state'}, bytes {piece.offset} and after")
    return found


def _file_faults(storage: Storage, folder: Folder, file: StoredFile, there: dict[str, StoredEntry]) -> list[str]:
    if wrong := _size_faults(file, there):
        return wrong
    try:
        same = checksum_of(storage.read(*folder, file.name)) == file.checksum
    except CheckpointError as error:
        return [str(error)]
    return [] if same else [f"{file.name}: altered"]


def _size_faults(file: StoredFile, there: dict[str, StoredEntry]) -> list[str]:
    entry = there.get(file.name)
    if entry is None or entry.folder:
        return [f"{file.name}: missing"]
    if entry.size != file.size:
        kind = "cut short" if entry.size < file.size else "longer than was written"
        return [f"{file.name}: {kind}, {entry.size} of {file.size} bytes"]
    return []


def _blocks(stream: Any, length: int) -> Iterator[bytes]:
    while length:
        block = stream.read(min(length, _BLOCK))
        if not block:
            return
        length -= len(block)
        yield block
