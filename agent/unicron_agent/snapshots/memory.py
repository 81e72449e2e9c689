"""The folder in this node's memory that snapshots lie in."""

import mmap
import os
import re
from pathlib import Path

from xxhash import xxh3_128

from unicron.contracts.states import KEPT, LABEL_FOOT, LENT, SAVED, StateRef, read_label
from unicron.errors import InvalidInputError, StateTransferError, UnsoundStateError
from unicron.files import remove_if_possible

_NAME = re.compile(rf"([A-Za-z0-9_-]{{1,200}})\.[0-9]+\.({LENT}|{KEPT}|{SAVED})")
FETCHED = "fetched"
FILLER = f"full.{SAVED}"
_LABEL_BYTES = 64 * 1024


def check(ref: StateRef, path: Path) -> None:
    """Compare the file of a snapshot with its checksum.

    Raises:
        UnsoundStateError: they differ.
    """
    checksum = b""
    with path.open("rb") as file:
        if 0 < ref.size <= path.stat().st_size:
            with mmap.mmap(file.fileno(), ref.size, access=mmap.ACCESS_READ) as content:
                checksum = xxh3_128(content).digest()
    if checksum != ref.checksum:
        raise unsound(ref)


def unsound(ref: StateRef) -> UnsoundStateError:
    """Return the error that a snapshot is not what its checksum says."""
    name, node = ref.location.name, ref.location.node
    return UnsoundStateError(f"state {name!r} of {node}: wrong checksum; this is not what was exported")


class SnapshotMemory:
    """The snapshots in the memory of this node.

    Args:
        folder: where it is.
        limit: bytes that saved states may take there; 0: half of its file system.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        system = os.statvfs(folder)
        self.folder, self.limit = folder, limit or system.f_blocks * system.f_frsize // 2

    def path(self, name: str) -> Path:
        """Return the file of a state ("WORKER.EPOCH.state", "WORKER.EPOCH.kept", or "WORKER.TURN.saved").

        Raises:
            StateTransferError: it is no such name, or there is no such state.
        """
        path = self.folder / self.checked(name)
        if not path.is_file():
            raise StateTransferError(f"state {name}: it is not there (any more)")
        return path

    @staticmethod
    def checked(name: str) -> str:
        """Return `name` if a state can have it.

        Raises:
            StateTransferError: none can.
        """
        if not _NAME.fullmatch(name):
            raise StateTransferError(f"state {name!r}: expected WORKER.NUMBER.{LENT}, .{KEPT} or .{SAVED}")
        return name

    def remove(self, name: str) -> None:
        """Remove a state, if it is there."""
        if _NAME.fullmatch(name):
            remove_if_possible(self.folder / name)

    def left_behind(self) -> list[str]:
        """Return the names of the states that workers have left behind."""
        names = (path.name for path in self.folder.glob(f"*.{KEPT}"))
        return sorted(name for name in names if _NAME.fullmatch(name))

    def saved(self) -> list[StateRef]:
        """Return the saved states that are whole."""
        found = (_labelled(path) for path in sorted(self.folder.glob(f"*.{SAVED}")) if _NAME.fullmatch(path.name))
        return [ref for ref in found if ref is not None]

    def holds(self, ref: StateRef) -> bool:
        """Return whether a copy that came from another node is here, whole."""
        path = self.folder / ref.location.name
        return path.is_file() and _labelled(path) == ref

    def fetched(self, worker: str, name: str) -> Path:
        """Return where a state is to lie that is fetched for a worker."""
        return self.folder / f"{worker}.{name}.{FETCHED}"

    def forget(self, worker: str) -> None:
        """Remove what a worker that is gone had lent to others or was fetching, whole or not."""
        for path in self.folder.glob(f"{worker}.*"):
            if path.name.endswith((f".{LENT}", f".{FETCHED}", ".part")):
                remove_if_possible(path)

    def clean(self) -> None:
        """Remove what belongs to workers that are no more, and no states."""
        states = {*self.left_behind(), *(ref.location.name for ref in self.saved())}
        for path in self.folder.iterdir():
            if path.name not in states:
                remove_if_possible(path)

    def fill(self) -> None:
        """Leave no room for saved states (chaos): a file that takes none itself counts with the size that it has."""
        with (self.folder / FILLER).open("wb") as file:
            file.truncate(self.limit)

    def free(self) -> None:
        """Give the room back."""
        (self.folder / FILLER).unlink(missing_ok=True)

    def check_room(self, name: str, size: int) -> None:
        """Raise if a saved state of `size` bytes may not lie here beside the others.

        Raises:
            StateTransferError: it may not.
        """
        others = sum(path.stat().st_size for path in self.folder.glob(f"*.{SAVED}") if path.name != name)
        if others + size > self.limit:
            raise StateTransferError(
                f"{others + size} bytes of saved states are more than the limit of {self.limit} bytes: "
                "raise UNICRON_STATE_LIMIT"
            )


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
    label = LABEL_FOOT.size + LABEL_FOOT.unpack(end[-LABEL_FOOT.size :])[0]
    return ref if ref.location.name == path.name and ref.size + label == size else None
