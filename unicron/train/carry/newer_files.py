"""A new rank finds files as the others found them: what their loops have made since is not there for its script.

A script that looks for a checkpoint as it begins would else go on from one that its own job has written meanwhile, and
not be where the lost rank was.
"""

import builtins
import contextlib
import ctypes
import errno
import hashlib
import io
import math
import os
import stat
import struct
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any, Self

from unicron.train.carry.callers import caller, is_resolving

_HERE, _NO_FOLLOW, _BORN = -100, 0x100, 0x800  # of Linux: see statx(2)
_libc = ctypes.CDLL(None)
_stat, _lstat = os.stat, os.lstat
_NOT_FOLLOWED = frozenset({"lstat", "readlink"})
_KERNELS = ("/proc/", "/sys/", "/dev/")
DIGESTED = 1 << 20
"""Bytes: of a file of at most so many that was written again it is known whether it has the same contents."""

_FOR_CODE = ("unicron", "importlib", "linecache", "pkgutil", "zipimport")
"""Beginnings of the names of modules that look for no script's files: among others for packages beside the script."""


def born_at(path: Any, *, follows: bool = True) -> float | None:
    """Return when a file was made, in seconds of the epoch; None where its file system does not know."""
    found = ctypes.create_string_buffer(256)
    flags = 0 if follows else _NO_FOLLOW
    if _libc.statx(_HERE, os.fsencode(path), flags, _BORN, found):
        return None
    [known] = struct.unpack_from("=I", found.raw)
    seconds, nanoseconds = struct.unpack_from("=qI", found.raw, 80)
    return float(seconds) + nanoseconds / 1e9 if known & _BORN else None


class NewerFiles:
    """The files that were made in a span of time: while it is begun, they are not there for whoever asks by Python.

    What this package itself asks for is there, and so are all files for processes that this one has forked.

    Args:
        since: when it begins, in seconds of the epoch.
        until: when it ends.
        own: folder in which all is there.
        remade_count: so is what was written after it, as by another rank that begins anew, too.
    """

    def __init__(self, since: float, until: float = math.inf, own: str = "", *, remade_count: bool = False) -> None:
        self._since, self._until, self._own, self._pid = since, until, own, os.getpid()
        self._remade_count = remade_count
        self._usual: list[tuple[Any, str, Any]] = []
        self._made = set[str]()

    def begin(self) -> None:
        """Hide them."""
        for module, name in (
            *((os, name) for name in ("stat", "lstat", "access", "open", "readlink")),
            (io, "open"),
            (builtins, "open"),
        ):
            self._exchange(module, name, partial(self._look_first, getattr(module, name), name))
        self._exchange(os, "mkdir", partial(self._make_folder, os.mkdir))
        self._exchange(os, "listdir", partial(self._list, os.listdir))
        self._exchange(os, "scandir", partial(self._scan, os.scandir))

    def end(self) -> None:
        """Have them be there again."""
        for module, name, usual in reversed(self._usual):
            setattr(module, name, usual)
        self._usual = []

    def _exchange(self, module: Any, name: str, instead: Callable[..., Any]) -> None:
        self._usual.append((module, name, getattr(module, name)))
        setattr(module, name, instead)

    def _is_hidden(self, path: Any, *, follows: bool = True) -> bool:
        if not isinstance(path, str | bytes | os.PathLike) or not self._has_changed(path, follows=follows):
            return False
        return os.getpid() == self._pid and not _is_for_code() and self.holds(path, follows=follows)

    def holds(self, path: Any, *, follows: bool = True) -> bool:
        """Return whether a file was made in the span, and not by this process as well."""
        there = _absolute(path)
        if there in self._made or (self._own and there.startswith(self._own)):
            return False
        born = born_at(path, follows=follows)
        if born is None or not self._since < born < self._until:
            return False
        return not self._remade_count or (_stat if follows else _lstat)(path).st_mtime < self._until

    def first_in(self, folder: str) -> str:
        """Return the first file in a folder that was made in the span; empty where there is none."""
        if not self._has_changed(folder):
            return ""
        return next((each for name in os.listdir(folder) if self.holds(each := os.path.join(folder, name))), "")  # noqa: PTH118, PTH208

    def _has_changed(self, path: Any, *, follows: bool = True) -> bool:
        """Return whether a file, or what is in a folder, may be another one; of most it is seen soon that it is not."""
        try:
            return (_stat if follows else _lstat)(path).st_ctime > self._since
        except (OSError, ValueError):
            return False

    def _look_first(self, usual: Callable[..., Any], name: str, path: Any, *arguments: Any, **named: Any) -> Any:
        follows = name not in _NOT_FOLLOWED and named.get("follow_symlinks", True)
        if named.get("dir_fd") is None and self._is_hidden(path, follows=follows):
            if name == "access":
                return False
            if not _makes(name, arguments, named):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
            self._note_made(path)
        return usual(path, *arguments, **named)

    def _make_folder(self, usual: Callable[..., Any], path: Any, *arguments: Any, **named: Any) -> None:
        if named.get("dir_fd") is None and self._is_hidden(path) and stat.S_ISDIR(_stat(path).st_mode):
            self._note_made(path)
        else:
            usual(path, *arguments, **named)

    def _note_made(self, path: Any) -> None:
        """Note that this process has made what is hidden; other ranks that begin anew see it by the time of that."""
        self._made.add(_absolute(path))
        if self._remade_count:
            with contextlib.suppress(OSError):  # it belongs to somebody else
                os.utime(path)

    def _list(self, usual: Callable[..., list[Any]], path: Any = None) -> list[Any]:
        found, path = usual(path), "." if path is None else path
        if isinstance(path, int) or not self._has_changed(path):
            return found
        return [each for each in found if not self._is_hidden(os.path.join(path, each))]  # noqa: PTH118 maybe bytes

    def _scan(self, usual: Callable[..., Any], path: Any = None) -> Any:
        found = usual(path)
        if isinstance(path, int) or not self._has_changed("." if path is None else path):
            return found
        return _Entries(found, self._is_hidden)


class FilesAsked(NewerFiles):
    """The files that a script asks for while nobody knows yet which of them are newer: it finds all of them."""

    def __init__(self) -> None:
        super().__init__(-math.inf)
        self._asked, self._listed = dict[tuple[str, bool], None](), dict[str, None]()
        self._resolved = dict[tuple[str, bool], None]()

    def hide(self, newer: NewerFiles) -> str:
        """Have newer files not be there from now on, unless one was found already: then it would be found gone.

        Returns:
            why this process can't take another's place; empty where it has found none.
        """
        self.end()
        asked = chain(
            (path for path, follows in self._asked if newer.holds(path, follows=follows)),
            (path for path, _ in self._resolved if newer.holds(path, follows=False) and _is_link(path)),
        )
        found = next(asked, "") or next(filter(None, map(newer.first_in, self._listed)), "")
        if not found:
            newer.begin()
            return ""
        return (
            f"the script has looked for {found} before init_process_group(), and its own loop has made that: a new "
            "process would go on from there, and not where the others are: look for it behind that call"
        )

    def _is_hidden(self, path: Any, *, follows: bool = True) -> bool:
        if isinstance(path, str | bytes | os.PathLike):
            asked = _absolute(path), follows
            known = self._resolved if is_resolving() else self._asked
            if asked not in known and self._counts(asked[0]):
                known[asked] = None
        return False

    def _list(self, usual: Callable[..., Any], path: Any = None) -> Any:
        if not isinstance(path, int) and self._counts(folder := _absolute("." if path is None else path)):
            self._listed[folder] = None
        return usual(path)

    _scan = _list

    def _counts(self, path: str) -> bool:
        return not path.startswith(_KERNELS) and not _is_for_code()


def _makes(name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Return whether a call opens a file for writing, which is made where it is not there."""
    if name != "open":
        return False
    how = arguments[0] if arguments else named.get("mode", named.get("flags", "r"))
    return bool(how & os.O_CREAT) if isinstance(how, int) else bool({*how} & {*"wax"})


def _absolute(path: Any) -> str:
    return os.path.abspath(os.fsdecode(path))  # noqa: PTH100 without a look at it


def _is_link(path: str) -> bool:
    return stat.S_ISLNK(_lstat(path).st_mode)


def _is_for_code() -> bool:
    return str(caller(__name__).get("__name__", "")).startswith(_FOR_CODE)


class _Entries:
    """What `os.scandir` returns, without what is hidden."""

    def __init__(self, entries: Any, is_hidden: Callable[[Any], bool]) -> None:
        self._entries, self._is_hidden, self._for_code = entries, is_hidden, _is_for_code()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """Return the next entry."""
        found = next(self._entries)
        while not self._for_code and self._is_hidden(found.path):
            found = next(self._entries)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it."""
        self._entries.close()


class FilesRead:
    """The files that a script reads before its loops, as they were then."""

    def __init__(self) -> None:
        self._found, self._notes = dict[str, tuple[tuple[int, int, int], bytes]](), False
        self._usual = io.open

    def begin(self) -> None:
        """Note what is opened for reading from now on."""
        self._usual, self._notes = io.open, True
        builtins.open = io.open = self._open

    def end(self) -> None:
        """Note no more."""
        self._notes = False
        if io.open == self._open:
            builtins.open = io.open = self._usual

    def _open(self, file: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        opened = self._usual(file, mode, *arguments, **named)
        if self._notes and isinstance(file, str | bytes | os.PathLike) and {*mode} & {*"r+"} and not _is_for_code():
            path = os.path.realpath(os.fsdecode(file))
            aside = (*_KERNELS, os.path.realpath(tempfile.gettempdir()) + os.sep)
            if path not in self._found and not path.startswith(aside):
                self._found[path] = _look(found := os.fstat(opened.fileno())), _digest(opened.fileno(), found)
        return opened

    def changed_reason(self) -> str:
        """Return why a new process would read something else; empty where it would not."""
        for path, (look, digest) in self._found.items():
            if not _is_as_it_was(path, look, digest):
                return (
                    f"the script has read {path} before its loop, and that has been written or removed since: a new "
                    "process would not find what was in it"
                )
        return ""


def _is_as_it_was(path: str, look: tuple[int, int, int], digest: bytes) -> bool:
    """Return whether a file is the same, or was written again with what was in it, as caches of libraries are."""
    try:
        found = _stat(path)
        if _look(found) == look:
            return True
        if not digest or not stat.S_ISREG(found.st_mode):  # opening a pipe would wait for who writes to it
            return False
        with io.FileIO(path) as file:
            return _digest(file.fileno(), found) == digest
    except OSError:
        return False


def _digest(descriptor: int, found: os.stat_result) -> bytes:
    """Return a digest of a file's contents; empty where it is no file, or a large one."""
    if not stat.S_ISREG(found.st_mode) or found.st_size > DIGESTED:
        return b""
    return hashlib.sha256(os.pread(descriptor, DIGESTED, 0)).digest()


def _look(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_mtime_ns, found.st_size, found.st_ino
