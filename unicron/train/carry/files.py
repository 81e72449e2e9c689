"""Files and folders of a script that a new rank finds as the other ranks have them: it makes none of them anew.

A new rank runs what the script does before its loops once more. What it opens for writing meanwhile it writes to a
file that nobody sees; the script's own it has at the place where the lost rank was, once it takes that one's place.
"""

import builtins
import contextlib
import io
import math
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from unicron.train.carry.callers import caller
from unicron.train.carry.kinds import Kind, NotCarriedError, Parts
from unicron.train.carry.newer_files import FilesAsked, FilesRead, NewerFiles
from unicron.train.carry.own_folders import OwnFolders
from unicron.train.carry.variables import NAME
from unicron.train.worker.telling import tell

_open = io.open
_taken_over = WeakKeyDictionary[Any, str]()
"""Files of lost ranks that files of this one have become, by path: their names may be other ones."""

State = tuple[str, str, int, bool]
"""Of an open file: path, mode, position in it, and whether it is closed."""


class Files:
    """The files that this process opens before it knows whether others are in their loops, and then on its way to them.

    Args:
        first: this process is one of the first of its task; so nobody is in a loop.
        anew: Unix seconds at which the script began first, and its loops, where it may begin so once more: before its
            loops it finds nothing that was made since, and was not made anew. Else nothing.
        always: it does; else where `begin_anew` is called.

    Attributes:
        diverts_writes: what is opened for writing now is written to a hidden file.
        read: what the script has read before its loops.
        own_folders: that it has made for this process alone.
        begins_otherwise: why this process does not begin as the first ones did; empty where it does.
        begins_anew: it begins once more as it did at first, and has not come to its loops.
    """

    def __init__(self, *, first: bool, anew: Sequence[float] = (), always: bool = False) -> None:
        self.diverts_writes, self._joins_late = not first, False
        self._opened: list[tuple[Any, int | None]] = []
        self._reported, self._made = set[str](), set[str]()
        self.read, self._newer, self._began_at = FilesRead(), NewerFiles(math.inf), time.time()
        self._asked, self.begins_otherwise, self.own_folders = FilesAsked(), "", OwnFolders()
        self._anew, self.begins_anew = tuple(anew), bool(anew) and always
        if self.begins_anew:
            self._newer = NewerFiles(anew[0], self._began_at, remade_count=True)

    def begin(self) -> None:
        """Note from now on what the script finds."""
        self.read.begin()
        self.own_folders.begin()
        if self.begins_anew:
            self._newer.begin()
        elif self.diverts_writes:
            self._asked.begin()

    def begin_anew(self) -> None:
        """Have the script begin as it did at first, where it may and has found nothing yet that was made since."""
        if self._anew and not self.begins_anew:
            self._newer = NewerFiles(self._anew[0], self._began_at, remade_count=True)
            self.begins_anew = not self._asked.hide(self._newer)

    def begin_loops(self) -> float:
        """Return the moment, in Unix seconds, since which a new rank does not find what was made: loops begin."""
        return self._anew[-1] if self.begins_anew else time.time()

    def end(self) -> None:
        """Have the script find all there is, as it is in its loops."""
        self.read.end()
        self._newer.end()
        self.begins_anew = False

    def install(self) -> None:
        """Have scripts open files, and make and remove folders, by way of this."""
        builtins.open = io.open = self.open
        for module, name in (
            *((os, name) for name in ("remove", "unlink", "rmdir", "rename", "replace")),
            *((shutil, name) for name in ("rmtree", "move")),
        ):
            setattr(module, name, self._skipped_if_late(name, getattr(module, name)))
        os.mkdir = self._mkdir_if_late(os.mkdir)
        sys.addaudithook(self._record_made)

    def _record_made(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Record files and folders that this process is about to make, by whatever it calls: they are its own."""
        if not self.diverts_writes or event not in {"open", "os.mkdir"} or isinstance(arguments[0], int | None):
            return
        if event == "os.mkdir" or arguments[2] & os.O_CREAT:
            path = os.fsdecode(arguments[0])
            if not os.path.lexists(path):
                self._made.add(os.path.realpath(path))

    def _is_own(self, path: Any) -> bool:
        """Return whether only this process is likely to use a path: as it has made it, or as it is a temporary one."""
        if not isinstance(path, str | bytes | os.PathLike):
            return True
        real, folder = Path(os.path.realpath(os.fsdecode(path))), Path(tempfile.gettempdir()).resolve()
        if not self._made.isdisjoint(map(str, (real, *real.parents))):
            return True
        return real != folder and real.is_relative_to(folder) and real.relative_to(folder).parts[0].startswith("tmp")

    def open(self, file: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        """Open a file as Python does, or another in its place."""
        path = os.fspath(file) if isinstance(file, str | bytes | os.PathLike) else None
        how = (
            set("wax") if self._joins_late else set("wa")
        )  # a file that is to be new is none where nobody else has made it
        writes = self.diverts_writes and path is not None and set(mode) & how
        if path is None or not writes or caller(__name__).get("__name__", "").startswith("unicron"):
            return _open(file, mode, *arguments, **named)
        real = os.path.realpath(os.fsdecode(path))
        if not Path(real).is_file() or real in self._made:  # such as one with this process's number in its name
            opened = _open(file, mode, *arguments, **named)
            self._opened.append((opened, None))
            return opened
        with tempfile.TemporaryFile() as scratch:
            number = os.dup(scratch.fileno())
        opened = _open(file, mode.replace("x", "w"), *arguments, **{**named, "opener": lambda *_: os.dup(number)})
        self._opened.append((opened, number))
        return opened

    def hide_made_since(self, moment: float) -> None:
        """Have the script not find what was made between then, when the loops began, and the start of this process."""
        self._newer.end()
        self._newer = NewerFiles(moment, self._began_at)
        self.begins_otherwise = self._asked.hide(self._newer)

    def check_begin(self) -> None:
        """Check that this process has begun as the first ones did.

        Raises:
            NotCarriedError: it has not.
        """
        if self.begins_otherwise:
            raise NotCarriedError(self.begins_otherwise)

    def set_joins_late(self, *, late: bool) -> None:
        """Set whether the others are in their loops; if not, what is in hidden files is written to the script's own."""
        self._joins_late = late
        self._asked.end()
        self._newer.end()
        if not late:
            if self.begins_anew:
                self._newer.begin()
            self.diverts_writes = False
            self._finish_files(_write_out)

    def write_in_place(self) -> None:
        """Write what is still open to its own files, as this rank has come to where the others are."""
        self.diverts_writes = self._joins_late = False
        self._newer.end()
        self._finish_files(_truncate_at_position)

    def _finish_files(self, how: Callable[[Any, int | None], None]) -> None:
        for opened, number in self._opened:
            how(opened, number)
            if number is not None:
                os.close(number)
        self._opened = []

    def _skipped_if_late(self, name: str, usual: Callable[..., Any]) -> Callable[..., Any]:
        def unless_late(*arguments: Any, **named: Any) -> Any:
            path = arguments[0] if arguments else None
            if not self._joins_late or not _is_called_by_script() or self._can_do(name, arguments):
                return usual(*arguments, **named)
            shown = os.fspath(path)  # type: ignore[arg-type]
            words = f"{name}({shown!r}) is skipped: it was done before this process took the place of a lost one"
            if words not in self._reported:
                self._reported.add(words)
                tell(f"unicron: {words}")
            return None

        return unless_late

    def _can_do(self, name: str, arguments: tuple[Any, ...]) -> bool:
        """Return whether removing or renaming something can't take anything from the others."""
        paths = arguments[: 2 if name in {"rename", "replace", "move"} else 1]
        return all(not _exists(path) or self._is_own(path) for path in paths)

    def _mkdir_if_late(self, usual: Callable[..., None]) -> Callable[..., None]:
        def unless_late(path: Any, *arguments: Any, **named: Any) -> None:
            with contextlib.suppress(*([FileExistsError] if self._joins_late and _is_called_by_script() else [])):
                usual(path, *arguments, **named)

        return unless_late


def _is_called_by_script() -> bool:
    return NAME in caller(__name__)


def _exists(path: Any) -> bool:
    return isinstance(path, str | bytes | os.PathLike) and os.path.lexists(path)


def _write_out(opened: Any, number: int | None) -> None:
    """Have what was written to `number` be in the file that it was meant for."""
    if number is None:
        return
    path, mode = _path(opened), _mode(opened)
    if not opened.closed:
        opened.flush()
    with _open(path, "ab" if "a" in mode else "wb") as real:
        real.write(os.pread(number, os.fstat(number).st_size, 0))
        real.flush()
        if not opened.closed:
            os.dup2(real.fileno(), opened.fileno(), inheritable=False)


def _truncate_at_position(opened: Any, number: int | None) -> None:
    """Have a file be where its position is, and end there: what the lost rank wrote later is written once more."""
    if opened.closed:
        return
    if number is not None and os.path.samestat(os.fstat(opened.fileno()), os.fstat(number)):
        FILE.set_state(opened, FILE.state(opened))
    position = 0 if set(_mode(opened)) & set("a+") else opened.tell()
    if position:  # where it has written nothing, others may have
        os.ftruncate(opened.fileno(), position)


class _OpenFile(Kind):
    """Open files of this machine, by their position."""

    exact = False

    def parts(self, thing: Any) -> Parts:  # noqa: ARG002
        return []

    def fingerprint(self, thing: Any) -> tuple[Any, ...]:
        return thing.closed, None if thing.closed else _position(thing)

    def state(self, thing: Any) -> State:
        if thing.closed:
            return _path(thing), _mode(thing), 0, True
        position = _position(thing)
        if position is None:
            raise NotCarriedError(f"{thing.name}, which is gone over line by line")
        return _path(thing), _mode(thing), position, False

    def set_state(self, thing: Any, state: State) -> None:
        path, mode, position, closed = state
        if closed:
            thing.close()
            return
        if set(mode) & set("wax+"):
            thing.flush()
            number = os.open(path, os.O_RDWR | os.O_CREAT | (os.O_APPEND if "a" in mode else 0), 0o666)
            try:
                os.dup2(number, thing.fileno(), inheritable=False)
            finally:
                os.close(number)
            _taken_over[thing] = path
        if "a" not in mode:
            thing.seek(position)


def _position(thing: Any) -> int | None:
    try:
        return int(thing.tell())
    except OSError:  # of text that is gone over line by line
        return None


def _path(thing: Any) -> str:
    if (path := _taken_over.get(thing)) is not None:
        return path
    return str(Path(thing.name).absolute())


def _mode(thing: Any) -> str:
    return str(getattr(thing, "mode", "") or "r")


def is_file(thing: Any) -> bool:
    """Return whether an object is an open file, or was one, that has a path."""
    if not isinstance(thing, io.TextIOWrapper | io.BufferedIOBase | io.RawIOBase):
        return False
    if not isinstance(getattr(thing, "name", None), str):
        return False
    if thing.closed:
        return True
    with contextlib.suppress(OSError, ValueError):
        return thing.fileno() > 2 and stat.S_ISREG(os.fstat(thing.fileno()).st_mode)
    return False


FILE = _OpenFile()
