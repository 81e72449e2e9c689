"""Files that people and other programs give: read as text of a size that can be dealt with, or refused in one line."""

import contextlib
import logging
import os
import stat
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from unicron.errors import InvalidInputError

log = logging.getLogger(__name__)

MB = 1024 * 1024
MOST_BYTES = 64 * MB
"""Of a table. More is not what it is taken for: a log, a disk image, a device that never ends."""


def read_text(path: Path, cure: str, most: int = MOST_BYTES) -> str:
    """Return the UTF-8 text of a file, without a byte order mark.

    Args:
        path: of it.
        cure: what to give instead, for the message.
        most: bytes that it may have.

    Raises:
        InvalidInputError: it can't be read, is larger, or is no text; the message names the file, why, and the cure.
    """
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
        if len(content) <= most:
            return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
        reason = f"larger than {most / MB:g} MB"
    except OSError as error:
        reason = error.strerror or str(error)
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 text: byte {error.start}"
    except ValueError as error:  # a NUL in the name
        reason = str(error)
    raise InvalidInputError(f"{path}: can't be read ({reason}); {cure}")


def read_toml(path: Path, cure: str) -> dict[str, Any]:
    """Return what a TOML file of people holds, at most a megabyte of it.

    Raises:
        InvalidInputError: as for `read_text`, or it is no TOML; the message names the line.
    """
    try:
        return tomllib.loads(read_text(path, cure, MB))
    except (ValueError, RecursionError) as error:  # names line and column
        raise InvalidInputError(f"{path}: {error}; mend that line") from error


def convert(where: str, plain: Any, kind: Any) -> Any:
    """Return an entry of such a file as its type.

    Args:
        where: the name of its table.
        plain: what it holds.
        kind: its type, with the ranges of its fields.

    Raises:
        InvalidInputError: the type can't hold it; the message names the table, the field and what is allowed.
    """
    try:
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        field = path.rstrip("`").lstrip(".")
        raise InvalidInputError(f"[{where}]{f' {field}' if field else ''}: {what}; mend that entry") from error


def read_secret(path: Path, cure: str = "see `unicron credentials`") -> bytes:
    """Return the content of a key's file.

    Args:
        path: of it.
        cure: where to get one, for the message.

    Raises:
        InvalidInputError: it can't be read, or others than its owner may.
    """
    try:
        with path.open("rb") as file:
            mode, content = os.fstat(file.fileno()).st_mode, file.read(MB).strip()
    except OSError as error:
        raise InvalidInputError(f"{path}: no key can be read there: {error.strerror}; {cure}") from error
    if stat.S_IMODE(mode) & 0o077:
        raise InvalidInputError(
            f"{path}: others than its owner may read or write this key; chmod 600 it, then rotate it"
        )
    return content


def write_secret(path: Path, secret: bytes) -> None:
    """Make a file that is its owner's alone from the first moment, whole or not at all."""
    scratch = path.with_suffix(".new")
    scratch.unlink(missing_ok=True)
    with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secret)
    scratch.replace(path)


def temporary_folder() -> Path:
    """Return a folder for temporary files that is this user's alone.

    Raises:
        InvalidInputError: somebody else has a folder of that name, or none can be made.
    """
    folder = Path(os.environ.get("TMPDIR") or "/tmp") / f"unicron-{os.getuid()}"  # noqa: S108 looked at below
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
    except OSError as error:
        raise InvalidInputError(f"{folder}: {error.strerror}; set TMPDIR to a folder of yours") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise InvalidInputError(f"{folder}: not yours alone; remove it, or set TMPDIR to a folder of yours")
    return folder


def remove_if_possible(path: Path) -> None:
    """Remove a file that nobody needs; one that the file system keeps is logged, and goes on taking room."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s can't be removed (%s) and goes on taking room", path, error.strerror or error)
