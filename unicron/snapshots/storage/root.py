"""The storage itself: a directory, or an object store that fsspec knows (`s3://bucket/folder`).

Each task has a folder of its own in it, with a marker, so that nobody else's files are ever touched.
"""

import errno
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import msgspec
from fsspec.implementations.local import LocalFileSystem

from unicron.contracts.storage import Saving
from unicron.contracts.tasks import ParallelLayout
from unicron.errors import CheckpointError
from unicron.snapshots.storage.manifest import MANIFEST, check_task

MARKER = ".unicron-checkpoints.json"
UNFINISHED = ".part"
"""How the name of a folder ends in which a checkpoint is being written, where folders can be renamed."""

FILES = 4
"""Files of a part and of the folder around them, for which a directory must have inodes."""

_ROOM = "make room there, or keep fewer checkpoints"
_CURES = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EROFS: "mount it so that it can be written",
}


class StoredEntry(NamedTuple):
    """An entry of a folder.

    Attributes:
        folder: whether it is one.
        size: in bytes.
        modified: in Unix seconds; 0 where the storage does not say.
    """

    folder: bool
    size: int
    modified: float


class Storage:
    """A directory or an object store.

    Args:
        root: path or URL, under which each task has a folder.

    Raises:
        CheckpointError: it is not there, or what it takes to reach it is not installed.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        try:
            self._fs, path = fsspec.core.url_to_fs(root)
        except ImportError as error:
            raise CheckpointError(f"{root} can't be reached: {error} (for s3:// that is: pip install s3fs)") from error
        except ValueError as error:
            raise CheckpointError(f"{root} is no directory and no URL of a known kind: {error}") from error
        self._path = str(path).rstrip("/")
        self.is_directory = isinstance(self._fs, LocalFileSystem)
        if self.is_directory and not Path(self._path).is_dir():
            raise CheckpointError(f"{root} is no directory: make it, or mount what is to be there, on every node")

    def address(self, *names: str) -> str:
        """Return what others may call a file or folder: a path, or a URL."""
        return "/".join((self._path if self.is_directory else self.root.rstrip("/"), *names))

    def entries(self, *names: str) -> dict[str, StoredEntry]:
        """Return what lies in a folder, by name; nothing where there is none."""
        with self._translated_errors("list", *names):
            try:
                if self.is_directory:
                    return _scanned(self._at(*names))
                self._fs.invalidate_cache()  # it remembers what it has listed
                found = self._fs.ls(self._at(*names), detail=True)
            except FileNotFoundError as error:
                if error.__cause__ is not None:  # an object store said that there is no such bucket
                    raise
                return {}
        listed = {each["name"].rstrip("/").rpartition("/")[2]: _entry(each) for each in found}
        listed.pop(names[-1] if names else "", None)  # some stores list the folder itself
        return listed

    def read(self, *names: str) -> bytes:
        """Return the content of a file."""
        with self._translated_errors("read", *names):
            content: bytes = self._fs.cat_file(self._at(*names))
        return content

    def stretch(self, begin: int, end: int, *names: str) -> bytes:
        """Return a file from the byte `begin` to before the byte `end`."""
        with self._translated_errors("read", *names):
            content: bytes = self._fs.cat_file(self._at(*names), start=begin, end=end)
        return content

    @contextmanager
    def reading(self, *names: str) -> Iterator[Any]:
        """Open a file to be read from its first byte to its last."""
        with self._translated_errors("read", *names), self._fs.open(self._at(*names), "rb") as stream:
            yield stream

    @contextmanager
    def writing(self, *names: str) -> Iterator[Any]:
        """Make a file; one that is not written to its end is not left behind, unless this process dies."""
        path = self._at(*names)
        with self._translated_errors("write", *names):
            if self.is_directory:
                Path(path).parent.mkdir(exist_ok=True)
            stream = self._fs.open(path, "wb")
            try:
                yield stream
                self._finish(stream)
            except BaseException:
                self._discard(stream, path)
                raise

    def write(self, content: bytes, *names: str) -> None:
        """Make a file of this content."""
        with self.writing(*names) as stream:
            stream.write(content)

    def rename(self, task: str, before: str, after: str) -> None:
        """Give a folder of a directory another name, at once and for good.

        Raises:
            FileExistsError: something has that name.
        """
        if os.path.lexists(self._at(task, after)):
            raise FileExistsError(self.address(task, after))
        with self._translated_errors("rename", task, before):
            Path(self._at(task, before)).rename(self._at(task, after))
            _fsync_directory(self._at(task))

    def remove(self, task: str, folder: str) -> None:
        """Remove a folder of a task; should this be cut off, what is left is no checkpoint."""
        with self._translated_errors("remove", task, folder):
            if self.is_directory:
                doomed = Path(self._at(task, folder))
                if not folder.endswith(UNFINISHED):
                    doomed = doomed.rename(f"{doomed}.{secrets.token_hex(4)}{UNFINISHED}")
                shutil.rmtree(doomed)
                return
            # the manifest comes last in what is written and first in what is removed
            for name in sorted(self.entries(task, folder), key=lambda name: name != MANIFEST):
                self._fs.rm_file(self._at(task, folder, name))

    def check_room(self, size: int) -> None:
        """Look at the free space and inodes of a directory before a part of `size` bytes is written.

        Raises:
            CheckpointError: there are too few.
        """
        if not self.is_directory:
            return
        with self._translated_errors("look at"):
            found = os.statvfs(self._path)
        free = found.f_bavail * found.f_frsize
        if free < size:
            raise CheckpointError(
                f"{self.root} has {free / 1e6:.1f} MB free of {size / 1e6:.1f} MB that are needed: {_ROOM}"
            )
        if found.f_files and found.f_favail < FILES:  # some file systems make inodes as they go and count none
            raise CheckpointError(f"{self.root} has {found.f_favail} inodes free of {FILES} that are needed")

    def _at(self, *names: str) -> str:
        return "/".join((self._path, *names))

    @contextmanager
    def _translated_errors(self, what: str, *names: str) -> Iterator[None]:
        """Name the file, or the folder, and the cause when something goes wrong."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:  # each kind of storage has errors of its own
            raise CheckpointError(f"can't {what} {self.address(*names)}: {_why(error)}") from error

    def _finish(self, stream: Any) -> None:
        stream.flush()
        if self.is_directory:
            os.fsync(stream.fileno())
            stream.close()
            _fsync_directory(str(Path(stream.name).parent))
        else:
            stream.close()

    def _discard(self, stream: Any, path: str) -> None:
        """Leave nothing of a file behind, if possible: the error that led here counts."""
        if self.is_directory:
            with suppress(OSError):
                Path(path).unlink()
            with suppress(OSError):  # it may try once more to write what it has
                stream.close()
            return
        with suppress(Exception):
            stream.discard()
            stream.closed = True  # closing would make an object of what came so far
        with suppress(Exception):
            self._fs.rm_file(path)


def begin(root: str, task: str, iteration: int, layout: ParallelLayout) -> Saving:
    """Begin to write a checkpoint; every place of `layout` writes its part, wherever it is, and then one commits.

    Raises:
        CheckpointError: the task's folder is somebody else's, or can't be made.
    """
    check_task(task)
    claim(Storage(root), task)
    return Saving(root=root, task=task, iteration=iteration, layout=layout, attempt=secrets.token_hex(4))


def claim(storage: Storage, task: str) -> None:
    """Make the folder of a task, unless it is there.

    Raises:
        CheckpointError: it is somebody else's.
    """
    found = storage.entries(task)
    if MARKER not in found:
        if found:
            raise _foreign(storage, task, sorted(found))
        storage.write(msgspec.json.encode({"task": task, "made_by": "unicron"}), task, MARKER)


def check_owned(storage: Storage, task: str) -> None:
    """Refuse a folder that was not made by `claim`.

    Raises:
        CheckpointError: it is somebody else's, or not there.
    """
    check_task(task)
    found = storage.entries(task)
    if not found:
        raise CheckpointError(f"{storage.address(task)} is not there: {storage.root} has nothing of {task}")
    if MARKER not in found:
        raise _foreign(storage, task, sorted(found))


def _foreign(storage: Storage, task: str, names: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        f"{storage.address(task)} has {', '.join(names[:3])} in it and was not made by Unicron: nothing is written, "
        "read or removed there; give the checkpoints a root of their own"
    )


def _scanned(folder: str) -> dict[str, StoredEntry]:
    """Return what lies in a directory, without links, and without what others remove meanwhile."""
    found: dict[str, StoredEntry] = {}
    with os.scandir(folder) as entries:
        for each in entries:
            with suppress(FileNotFoundError):
                status = each.stat(follow_symlinks=False)
                if not each.is_symlink():
                    found[each.name] = StoredEntry(each.is_dir(follow_symlinks=False), status.st_size, status.st_mtime)
    return found


def _entry(listed: dict[str, Any]) -> StoredEntry:
    """Return the entry of an object as its store lists it; stores name the time differently."""
    when = next((listed[name] for name in ("LastModified", "modified", "created") if listed.get(name)), None)
    return StoredEntry(listed["type"] == "directory", int(listed.get("size") or 0), when.timestamp() if when else 0.0)


def _fsync_directory(folder: str) -> None:
    """Have the names in a directory outlive a crash of the machine."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _why(error: Exception) -> str:
    """Return what happened, and the cure where there is one."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    cure = _CURES.get(getattr(error, "errno", None) or 0, "")
    if isinstance(error, PermissionError):
        cure = "allow it to this user, or to these keys"
    return f"{type(error).__name__}: {text}" + (f"; {cure}" if cure else "")
