"""Makes the `.metadata` that torch.distributed.checkpoint needs of a checkpoint, from the indexes of all places.

torch makes it from an exchange of all ranks; nothing here needs a group. Unicron never reads it: it is a
pickle.
"""

import math
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from unicron.errors import CheckpointError
from unicron.snapshots.storage.manifest import Piece
from unicron.train.snapshots.shards import Box

METADATA = ".metadata"


class Lying(NamedTuple):
    """A piece, and the file that it is in."""

    piece: Piece
    file: str


def box_of(piece: Piece) -> Box:
    """Return which part of its tensor a piece is."""
    return Box(tuple(piece.whole), tuple(piece.at), tuple(piece.shape))


def pickle_metadata(pieces: Sequence[Lying]) -> bytes:
    """Return the content of the file.

    What several places have alike is named once, as it lies with the first of them.

    Args:
        pieces: of all places in their order; of a value that is to count instead of others, the first.

    Raises:
        CheckpointError: they do not make up whole tensors.
    """
    named: dict[str, list[Lying]] = {}
    for each in pieces:
        named.setdefault(each.piece.key, []).append(each)
    described: dict[str, Any] = {}
    where: dict[MetadataIndex, _StorageInfo] = {}
    for key, lying in named.items():
        if any(bool(each.piece.dtype) != bool(lying[0].piece.dtype) for each in lying):
            raise CheckpointError(f"{key} is a tensor in one place and none in another: run one script everywhere")
        chosen = _distinct(key, lying) if lying[0].piece.dtype else lying[:1]
        described[key] = _describe([each.piece for each in chosen])
        for number, each in enumerate(chosen):
            at = MetadataIndex(key, each.piece.at, number) if each.piece.dtype else MetadataIndex(key)
            where[at] = _StorageInfo(each.file, each.piece.offset, each.piece.length)
    paths = {key: tuple(lying[0].piece.path) for key, lying in named.items()}
    return pickle.dumps(Metadata(described, paths, where, StorageMeta(), CURRENT_DCP_VERSION))


def _describe(pieces: Sequence[Piece]) -> TensorStorageMetadata | BytesStorageMetadata:
    first = pieces[0]
    if not first.dtype:
        return BytesStorageMetadata()
    chunks = [ChunkStorageMetadata(torch.Size(each.at), torch.Size(each.shape)) for each in pieces]
    return TensorStorageMetadata(TensorProperties(getattr(torch, first.dtype)), torch.Size(first.whole), chunks)


def _distinct(key: str, lying: Sequence[Lying]) -> list[Lying]:
    """Return the fewest of the pieces of a tensor that others of them do not hold already.

    Raises:
        CheckpointError: they are of different tensors, or lack a part.
    """
    first = lying[0].piece
    for each in lying:
        if (each.piece.whole, each.piece.dtype) != (first.whole, first.dtype):
            raise CheckpointError(
                f"{key} is {first.dtype} of {first.whole} in {lying[0].file} and {each.piece.dtype} of "
                f"{each.piece.whole} in {each.file}: run one script with the same arguments everywhere"
            )
    chosen = list({(*each.piece.at, *each.piece.shape): each for each in reversed(lying)}.values())
    if sum(_elements(each.piece) for each in chosen) != math.prod(first.whole):
        chosen = _largest(chosen[::-1])
    if not _fills([box_of(each.piece) for each in chosen]):
        parts = ", ".join(f"{each.piece.shape} at {each.piece.at}" for each in chosen)
        raise CheckpointError(f"{key} of {first.whole} is not whole, for there is {parts} alone")
    return sorted(chosen, key=lambda each: each.piece.at)


def _largest(lying: Sequence[Lying]) -> list[Lying]:
    """Return the pieces that no other holds: the same tensor may be whole in one stage and spread in another."""
    chosen: list[Lying] = []
    for each in sorted(lying, key=lambda each: -_elements(each.piece)):
        box = box_of(each.piece)
        if not chosen or (_elements(each.piece) and all(box.overlap(box_of(other.piece)) != box for other in chosen)):
            chosen.append(each)
    return chosen


def _elements(piece: Piece) -> int:
    return math.prod(piece.shape)


def _fills(boxes: Sequence[Box]) -> bool:
    """Return whether boxes leave nothing out of the whole: looked at on the grid that their edges make."""
    edges = [
        sorted({0, size} | {end for box in boxes for end in (box.offset[axis], box.offset[axis] + box.shape[axis])})
        for axis, size in enumerate(boxes[0].whole)
    ]
    number = [{edge: at for at, edge in enumerate(each)} for each in edges]
    filled = torch.zeros([len(each) - 1 for each in edges], dtype=torch.bool)
    for box in boxes:
        ends = (begin + size for begin, size in zip(box.offset, box.shape, strict=True))
        where = zip(number, box.offset, ends, strict=True)
        filled[tuple(slice(at[begin], at[end]) for at, begin, end in where)] = True
    return bool(filled.all())
