"""The metadata of a checkpoint, as JSON: the manifest of the whole, and for each part the index of its pieces.

The manifest is written last: a folder without one is no checkpoint. It has the checksum of each index, an index those
of its pieces, and pieces follow one another from the first byte of their file to its last.
"""

import re
from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec
from xxhash import xxh3_128_hexdigest

from unicron.contracts.base import Record
from unicron.contracts.storage import StoredFile, StoredPart
from unicron.contracts.tasks import ParallelLayout
from unicron.errors import CheckpointError

FORMAT = 1
"""Raised when an older Unicron could no longer read what is written."""

MANIFEST = "unicron.json"

REWOUND = "rewound.json"
"""Beside a manifest: the task went on from an earlier checkpoint, and this one no longer counts."""

T = TypeVar("T", bound=msgspec.Struct)

_TASK = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Piece(Record, kw_only=True, frozen=True):
    """A tensor, a part of one or a plain value, as `torch.save` writes it.

    Attributes:
        path: where it is in the nested state.
        offset: its first byte in the file.
        length: in bytes.
        checksum: XXH3 of these bytes, 16 bytes in hex.
        dtype: of a tensor, as "float32"; empty for a value.
        whole: shape of the tensor.
        at: where in the tensor the part begins, in each dimension.
        shape: of the part.
        listed: the parameters that a group of an optimizer lists, where that is the value.
    """

    path: list[str | int]
    offset: int
    length: int
    checksum: str
    dtype: str = ""
    whole: list[int] = []
    at: list[int] = []
    shape: list[int] = []
    listed: list[str] = []

    @property
    def key(self) -> str:
        """Name of the metadata file of torch.distributed.checkpoint."""
        return ".".join(map(str, self.path))


class Index(Record, kw_only=True, frozen=True):
    """The part that one place has written.

    Attributes:
        attempt: of which it is a part.
        pieces: as they follow one another in the file; the last is the state with its tensors left out.
    """

    task: str
    iteration: int
    layout: ParallelLayout
    attempt: str
    place: int
    pieces: list[Piece]


class Manifest(Record, kw_only=True, frozen=True):
    """A checkpoint.

    Attributes:
        version: of the format.
        task: whose state it is.
        iteration: from before whose update it is.
        layout: the shape of the replica whose places wrote the parts.
        attempt: that it came of.
        written: when it was completed, in Unix seconds.
        parts: one for each place.
        others: files that are for torch.distributed.checkpoint alone.
        checksum: of this manifest without it.
    """

    version: int
    task: str
    iteration: int
    layout: ParallelLayout
    attempt: str
    written: float
    parts: list[StoredPart]
    others: list[StoredFile]
    checksum: str = ""

    @property
    def files(self) -> list[StoredFile]:
        """All files but the manifest."""
        return [file for part in self.parts for file in (part.index, part.data)] + self.others

    @property
    def size(self) -> int:
        """Of all files but the manifest, in bytes."""
        return sum(file.size for file in self.files)


def index_name(place: int) -> str:
    """Return the name of a part's index."""
    return f"__{place}.index.json"


def data_name(place: int | str) -> str:
    """Return the name of a part's data, as torch.distributed.checkpoint names it."""
    return f"__{place}_0.distcp"


def checksum_of(content: bytes | memoryview) -> str:
    """Return XXH3 of it, 16 bytes in hex."""
    return xxh3_128_hexdigest(content)


def joint_checksum(pieces: Iterable[Piece]) -> str:
    """Return the checksum of a file that consists of these pieces."""
    return checksum_of("".join(piece.checksum for piece in pieces).encode())


def sealed(manifest: Manifest) -> bytes:
    """Return a manifest as it is written, with its checksum."""
    bare = msgspec.structs.replace(manifest, checksum="")
    return msgspec.json.encode(msgspec.structs.replace(bare, checksum=checksum_of(msgspec.json.encode(bare))))


def manifest_in(content: bytes, where: str) -> Manifest:
    """Return the manifest that was written as this.

    Raises:
        CheckpointError: it is none, or a newer Unicron wrote it.
    """
    version = _decoded(content, _Version, where).version
    if version != FORMAT:
        raise CheckpointError(f"{where} is of format {version}, and this Unicron reads {FORMAT}: use a newer one")
    found = _decoded(content, Manifest, where)
    if sealed(found) != content:
        raise CheckpointError(f"{where} was altered after it had been written")
    return found


def index_in(content: bytes, where: str) -> Index:
    """Return the index that was written as this.

    Raises:
        CheckpointError: it is none.
    """
    return _decoded(content, Index, where)


def folder_name(iteration: int, attempt: str = "") -> str:
    """Return the name of a checkpoint's folder."""
    return f"step-{iteration:06d}" + (f".{attempt}" if attempt else "")


def check_task(task: str) -> None:
    """Refuse a name that is no task's, for it becomes part of a path.

    Raises:
        CheckpointError: it is none.
    """
    if not _TASK.fullmatch(task):
        raise CheckpointError(f"{task!r} names no task: names have up to 64 letters, digits, '-' and '_'")


def gaps(pieces: Sequence[Piece], size: int) -> str:
    """Return what is wrong with how pieces follow one another in a file of `size` bytes, empty where nothing is."""
    end = 0
    for piece in pieces:
        if piece.offset != end or piece.length < 0:
            return f"its index has {piece.key} at byte {piece.offset} instead of {end}"
        end += piece.length
    return "" if end == size else f"its index ends at byte {end} of {size}"


class _Version(msgspec.Struct):
    """All that any format says."""

    version: int


def _decoded(content: bytes, kind: type[T], where: str) -> T:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{where} is not what Unicron writes there: {error}") from error
