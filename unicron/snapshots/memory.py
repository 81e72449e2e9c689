"""The folder in a node's memory that snapshots lie in: what its files are called, what is in them, and when they go.

Workers write their snapshots there; the agent of the node hands them out, takes copies of other nodes' and removes
what nobody needs any more. Both do it by `SnapshotMemory`. A file is one of these:

- a snapshot that a worker exports to others, `names.exported_name`. Its worker removes it, or the agent when that is
  gone; a kept one outlives its worker until it is ordered away;
- a snapshot that a worker saves while it computes on, `names.saved_name`. It is followed by a label, which says what
  it is; without one it is not whole. A copy of another node's looks the same;
- a snapshot fetched for a worker (`.fetched`), one not finished (`.part`), one being written to storage (`.stored`);
- a folder (`.trial`) of a drill.
"""

import contextlib
import mmap
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from xxhash import xxh3_128

from unicron.contracts.states import KEPT, LABEL_FOOT, LENT, SAVED, StateRef, label, read_label
from unicron.errors import InvalidInputError, StateTransferError, UnsoundStateError
from unicron.files import remove_if_possible
from unicron.snapshots.trials import Trial

FOLDER_VARIABLE, LIMIT_VARIABLE = "UNICRON_STATE_DIR", "UNICRON_STATE_LIMIT"
"""Of a worker's environment: the folder, and the bytes that saved states may take there, all together."""

FILLER = f"full.{SAVED}"
_TRIAL = ".trial"
_NAME = re.compile(rf"([A-Za-z0-9_-]{{1,200}})\.[0-9]+\.({LENT}|{KEPT}|{SAVED})")
_FETCHED, _UNFINISHED, _STORED = ".fetched", ".part", ".stored"
_LABEL_BYTES = 64 * 1024


class SnapshotMemory:
    """The snapshots in the memory of this node.

    Args:
        folder: where they lie.
        limit: bytes that saved states may take there; 0: half of its file system.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self.limit = limit or _file_system_bytes(folder) // 2

    @classmethod
    def of_worker(cls) -> Self:
        """Return the memory that the agent of this worker has named.

        Raises:
            KeyError: there is no agent.
        """
        return cls(Path(os.environ[FOLDER_VARIABLE]), int(os.environ.get(LIMIT_VARIABLE, "0")))

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables from which a worker knows this memory."""
        return {FOLDER_VARIABLE: str(self.folder), LIMIT_VARIABLE: str(self.limit)}

    # --- what lies here ----------------------------------------------------------------------------------------------

    def path(self, name: str) -> Path:
        """Return the file of a snapshot.

        Raises:
            StateTransferError: no snapshot can have this name, or there is none of it.
        """
        path = self.folder / self.check_name(name)
        if not path.is_file():
            raise StateTransferError(f"state {name}: it is not there (any more)")
        return path

    @staticmethod
    def check_name(name: str) -> str:
        """Return `name` if a snapshot can have it.

        Raises:
            StateTransferError: none can.
        """
        if not _NAME.fullmatch(name):
            raise StateTransferError(f"state {name!r}: expected WORKER.NUMBER.{LENT}, .{KEPT} or .{SAVED}")
        return name

    def kept(self) -> list[str]:
        """Return the names of the snapshots that workers have left behind."""
        names = (path.name for path in self.folder.glob(f"*.{KEPT}"))
        return sorted(name for name in names if _NAME.fullmatch(name))

    def saved(self) -> list[StateRef]:
        """Return the saved snapshots that are whole."""
        paths = sorted(path for path in self.folder.glob(f"*.{SAVED}") if _NAME.fullmatch(path.name))
        return [ref for ref in map(_labelled, paths) if ref is not None]

    def holds(self, ref: StateRef) -> bool:
        """Return whether a copy that came from another node is here, whole."""
        path = self.folder / ref.location.name
        return path.is_file() and _labelled(path) == ref

    def fetched_path(self, worker: str, name: str) -> Path:
        """Return the file for a snapshot that is fetched for a worker."""
        return self.folder / f"{worker}.{name}{_FETCHED}"

    # --- writing -----------------------------------------------------------------------------------------------------

    def check_room(self, name: str, size: int) -> None:
        """Raise if a saved snapshot of `size` bytes may not lie here beside the others.

        Raises:
            StateTransferError: it may not.
        """
        if not self.folder.is_dir():
            raise StateTransferError(f"the folder {self.folder} is gone: start the agent of this node again")
        others = sum(_size(path) for path in self.folder.glob(f"*.{SAVED}") if path.name != name)
        if others + size > self.limit:
            raise StateTransferError(
                f"{others + size} bytes of saved states are more than the limit of {self.limit} bytes: "
                f"raise {LIMIT_VARIABLE}"
            )

    def begin_overwrite(self, name: str, size: int) -> bool:
        """Have a saved snapshot be none from here on, as its file is written over with one of `size` bytes.

        Returns:
            whether the file is there still. One that is read under another name is left to its reader.
        """
        path = self.folder / name
        with contextlib.suppress(FileNotFoundError):  # the agent removes what was of a lost node
            found = path.stat()
            if found.st_nlink == 1:
                os.truncate(path, min(size, found.st_size))
                return True
            path.unlink()
        return False

    def add_label(self, ref: StateRef) -> None:
        """Make a file whose content is written, all of it, the saved snapshot `ref`."""
        with (self.folder / ref.location.name).open("ab") as file:
            file.write(label(ref))

    @contextlib.contextmanager
    def held_for_storage(self, ref: StateRef) -> Iterator[Path]:
        """Lend a second name of a snapshot's file: the next save leaves it as it is.

        Raises:
            StateTransferError: the snapshot is not there.
            OSError: the name can't be made.
        """
        path = self.path(ref.location.name)
        held = Path(f"{path}.{ref.iteration}{_STORED}")
        held.unlink(missing_ok=True)
        os.link(path, held)
        try:
            yield held
        finally:
            held.unlink(missing_ok=True)

    # --- removing ----------------------------------------------------------------------------------------------------

    def remove(self, name: str) -> None:
        """Remove a snapshot, if it is there."""
        if _NAME.fullmatch(name):
            remove_if_possible(self.folder / name)

    def remove_transient(self, worker: str) -> None:
        """Remove what a worker that is gone had exported to others or was fetching, whole or not."""
        for path in self.folder.glob(f"{worker}.*"):
            if path.name.endswith((f".{LENT}", _FETCHED, _UNFINISHED)):
                remove_if_possible(path)

    def trial(self, worker: str) -> Trial:
        """Return the trial of a worker, be there one or not."""
        return Trial(self.folder / trial_name(worker))

    def clean(self) -> None:
        """Remove what belongs to workers that are no more; kept and saved snapshots stay."""
        snapshots = {*self.kept(), *(ref.location.name for ref in self.saved())}
        for path in self.folder.iterdir():
            if path.name.endswith(_TRIAL):
                shutil.rmtree(path, ignore_errors=True)
            elif path.name not in snapshots:
                remove_if_possible(path)

    # --- chaos -------------------------------------------------------------------------------------------------------

    def fill(self) -> None:
        """Leave no room for saved snapshots: a file that takes none itself counts with the size that it has."""
        with (self.folder / FILLER).open("wb") as file:
            file.truncate(self.limit)

    def free(self) -> None:
        """Give the room back."""
        (self.folder / FILLER).unlink(missing_ok=True)


def trial_name(worker: str) -> str:
    """Return the name of the folder in which a worker records what a process on trial is to do in its place."""
    return f"{worker}{_TRIAL}"


@contextlib.contextmanager
def finished_or_removed(target: Path) -> Iterator[Path]:
    """Lend a file to write to; it becomes `target` if nothing is raised inside, else it is removed.

    Raises:
        OSError: it can't be made `target`.
    """
    unfinished = target.with_suffix(_UNFINISHED)
    try:
        unfinished.unlink(missing_ok=True)
        yield unfinished
        unfinished.rename(target)
    finally:
        unfinished.unlink(missing_ok=True)


def checksum(path: Path, size: int) -> bytes:
    """Return the XXH3 of the first `size` bytes of a file, 16 bytes; none where it has fewer."""
    with path.open("rb") as file:
        if not 0 < size <= path.stat().st_size:
            return b""
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as content:
            return xxh3_128(content).digest()


def verify(ref: StateRef, path: Path) -> None:
    """Compare the file of a snapshot with its checksum.

    Raises:
        UnsoundStateError: they differ.
    """
    if checksum(path, ref.size) != ref.checksum:
        raise unsound(ref)


def unsound(ref: StateRef) -> UnsoundStateError:
    """Return the error that a snapshot is not what its checksum says."""
    name, node = ref.location.name, ref.location.node
    return UnsoundStateError(f"state {name!r} of {node}: wrong checksum; this is not what was exported")


def _size(path: Path) -> int:
    """Return how large a file is; 0 where it has just been removed."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _file_system_bytes(folder: Path) -> int:
    system = os.statvfs(folder)
    return system.f_blocks * system.f_frsize


def _labelled(path: Path) -> StateRef | None:
    """Return what a file says that it holds, None where it is not whole."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _LABEL_BYTES))
        end = file.read()
    try:
        ref = read_label(end)
    except InvalidInputError:
        return None
    length = LABEL_FOOT.size + LABEL_FOOT.unpack(end[-LABEL_FOOT.size :])[0]
    return ref if ref.location.name == path.name and ref.size + length == size else None
