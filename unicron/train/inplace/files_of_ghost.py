"""Files of a ghost: what its script writes goes to copies that nobody else sees, and is read from there again."""

import builtins
import contextlib
import io
import math
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from unicron.train.carry.callers import caller
from unicron.train.carry.newer_files import FilesAsked, FilesRead, NewerFiles
from unicron.train.carry.variables import NAME
from unicron.train.inplace.recording import BEGIN, TEMPORARY
from unicron.train.inplace.sandbox import confine_connections, confine_writes

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
DEVICES = (Path("/dev/null"), Path("/dev/zero"), Path("/dev/tty"), Path("/dev/shm"))  # noqa: S108 loaders' workers share memory there

NOT_THERE = "which was there as the rank began"
"""Is noted with the error where a file is gone, so that nobody who comes later finds it."""

_open, _open_number = io.open, os.open


class GhostFiles:
    """The same interface as `unicron.train.carry.files.Files`, for a process whose writes nobody is to see.

    Args:
        trial: folder of the trial, to which the process itself writes.
        folder: in there, for copies.
        give_up: ends the trial, which can show nothing for the reason that it is given.

    Attributes:
        diverts_writes: always.
        read: nothing: nobody takes its place.
        begins_otherwise: why it does not begin as the rank did; empty where it does.
        begins_anew: never: it is to take the place of a rank that has begun.
    """

    diverts_writes, begins_anew = True, False

    def __init__(self, trial: Path, folder: Path, give_up: Callable[[str], NoReturn]) -> None:
        self._give_up, self._made, self._since = give_up, set[Path](), math.inf
        self._trial, self._folder, self._own = trial, folder, str(trial.absolute()) + os.sep
        self._roots: tuple[str, ...] = (self._own,)
        self._copies: dict[str, str] = {}
        self._count, self.read, self._newer = 0, FilesRead(), NewerFiles(math.inf)
        self._asked, self.begins_otherwise = FilesAsked(), ""

    def install(self) -> None:
        """Have scripts open, make and remove files by way of this, and the kernel refuse what does not."""
        temporary, short = self._folder / "tmp", self._trial.parent / f"{os.getpid()}{TEMPORARY}"
        temporary.mkdir(parents=True)
        short.symlink_to(temporary)  # a socket's path may have 107 bytes, and the folder's own has the worker's name
        self._roots = (self._own, f"{short}{os.sep}")
        os.environ["TMPDIR"] = tempfile.tempdir = str(short)
        builtins.open = io.open = self._open
        os.open = self._open_number
        save = torch.save

        def save_copy(obj: Any, f: Any, *arguments: Any, **named: Any) -> None:
            save(
                obj, self._copy_to_write(f, keep=False) if isinstance(f, str | os.PathLike) else f, *arguments, **named
            )

        torch.save = save_copy  # its own writer is no Python
        for module, name, instead in (
            *((os, name, self._forget) for name in ("remove", "unlink", "rmdir", "removedirs")),
            *((os, name, self._rename) for name in ("rename", "replace", "renames", "link", "symlink")),
            *((os, name, self._leave) for name in ("chmod", "chown", "utime", "truncate")),
            (os, "mkdir", self._make_folder),
            (shutil, "rmtree", self._forget),
        ):
            setattr(module, name, self._unless_own(getattr(module, name), instead))
        confine_writes([self._trial, *DEVICES])
        self._asked.begin()

    def has_copy_named_in(self, text: str) -> bool:
        """Return whether a text names a file of which there is a copy, and so nothing where C++ looks for it."""
        return any(each in text for each in self._copies)

    def hide_made_since(self, moment: float) -> None:
        """Have the script not find what was made since then, when the loops of the rank began."""
        self._newer = NewerFiles(moment, own=self._own)
        self.begins_otherwise = self._asked.hide(self._newer)

    def begin_anew(self) -> None:
        """Do nothing: it never does."""

    def end(self) -> None:
        """Do nothing: that its files are there again is for where it takes the rank's place."""

    def set_joins_late(self, *, late: bool) -> None:
        """Do nothing: no file is ever written in place."""

    def write_in_place(self) -> None:
        """Have the script connect to nobody from now on: the rank itself does. What that writes comes too early."""
        self._newer.end()
        self._since = (self._trial / BEGIN).stat().st_mtime
        os.listdir, os.scandir = self._if_unchanged(os.listdir), self._if_unchanged(os.scandir)
        confine_connections()

    def _if_unchanged(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any = ".") -> Any:
            self._check_unchanged(path)
            return usual(path)

        return call

    def _check_unchanged(self, path: Any) -> None:
        """End the trial where its script finds something else than the rank did."""
        if path is None or isinstance(path, int) or NAME not in caller(__name__):
            return
        name, cure = os.fsdecode(path), "have one rank choose the name, and broadcast it"
        there = Path(name).absolute()
        if not self._made.isdisjoint((there, *there.parents)):
            self._give_up(
                f"it looks into {name}, and the rank has made a folder of another name, by the time or by what is "
                f"there: {cure}"
            )
        with contextlib.suppress(OSError):
            if not self._is_own(path) and there.stat().st_mtime > self._since:
                self._give_up(f"it reads {name}, which was changed since its trial began: the rank found it as it was")

    def _is_own(self, path: Any) -> bool:
        if not isinstance(path, str | bytes | os.PathLike):
            return True
        real = Path(os.fsdecode(path))
        if str(real.absolute()).startswith(self._roots):
            return True
        try:
            kind = real.stat().st_mode
        except OSError:
            return False
        return not (stat.S_ISREG(kind) or stat.S_ISDIR(kind))

    def _unless_own(self, usual: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *arguments: Any, **named: Any) -> Any:
            return usual(path, *arguments, **named) if self._is_own(path) else instead(path, *arguments, **named)

        return call

    def _copy_to_write(self, path: Any, *, keep: bool) -> str:
        """Return the copy of a file; `keep` what is in it."""
        real = str(Path(os.fsdecode(path)).absolute())
        if self._is_own(path):
            return real
        if real not in self._copies:
            self._count += 1
            copy = str(self._folder / f"file-{self._count}")
            if keep and Path(real).is_file():
                shutil.copyfile(real, copy)
            self._copies[real] = copy
        return self._copies[real]

    def _copy_of(self, path: Any) -> str | None:
        return self._copies.get(str(Path(os.fsdecode(path)).absolute()))

    def _open(self, file: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        opener, is_path = named.get("opener"), isinstance(file, str | bytes | os.PathLike)
        if not is_path or opener is not None or len(arguments) > 5:
            return _open(file, mode, *arguments, **named)
        if set(mode) & set("wax+"):
            copy: str | None = self._copy_to_write(file, keep="w" not in mode)
        else:
            copy = self._copy_of(file)
        if copy is None:
            self._check_unchanged(file)
            try:
                return _open(file, mode, *arguments, **named)
            except FileNotFoundError as error:
                if self._since == math.inf:  # later the rank may have removed it, ahead of this process
                    error.add_note(NOT_THERE)
                raise
        named["opener"] = lambda _, flags: _open_number(copy, flags, 0o600)
        return _open(file, mode, *arguments, **named)

    def _open_number(self, path: Any, flags: int, *arguments: Any, **named: Any) -> int:
        if named.get("dir_fd") is not None or not isinstance(path, str | bytes | os.PathLike):
            return _open_number(path, flags, *arguments, **named)
        if flags & WRITES:
            path = self._copy_to_write(path, keep=not flags & os.O_TRUNC)
        return _open_number(self._copy_of(path) or path, flags, *arguments, **named)

    def _forget(self, path: Any, *_: Any, **__: Any) -> None:
        self._copies.pop(str(Path(os.fsdecode(path)).absolute()), None)

    def _rename(self, path: Any, to: Any, *_: Any, **__: Any) -> None:
        copy = self._copy_to_write(path, keep=True)
        self._forget(path)
        self._copies[str(Path(os.fsdecode(to)).absolute())] = copy

    def _leave(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    def _make_folder(self, path: Any, *_: Any, **__: Any) -> None:
        """Make none. One that is there the rank has made, as a rule: to who takes its place that is no error either."""
        if not (there := Path(os.fsdecode(path)).absolute()).exists():
            self._made.add(there)
