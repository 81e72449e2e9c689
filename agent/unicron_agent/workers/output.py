"""What the workers of this node write, followed from where it ends when they come."""

import contextlib
import logging
import os
import stat
from pathlib import Path

from unicron import subjects
from unicron.errors import InvalidInputError
from unicron.rules import Rules
from unicron_agent.lines import Lines
from unicron_agent.stimuli import Logged

LOG = logging.getLogger(__name__)

MOST = 256 * 1024
"""Bytes that are looked at at once; of a worker that writes more in between, those are the last."""


TAIL_BYTES = 64 * 1024
"""Bytes from the end of a log in which its last lines are looked for."""

LOG_BYTES = 64 << 20
"""What a worker may write before that is put aside; the part before it is removed then. So a log takes twice as much,
and what comes between two looks: a script that writes without end must not fill the disk."""


def put_aside(path: str) -> None:
    """Move the last `LOG_BYTES` of a log to a file beside it, and empty it: who writes to it goes on, at its end.

    What comes meanwhile is lost. Where the disk is full, so is what was to be moved.
    """
    try:
        with Path(path).open("rb") as log, Path(f"{path}.1").open("wb") as aside:
            log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_BYTES))
            aside.writelines(log.read(MOST) for _ in range(LOG_BYTES // MOST))  # a fast writer is not followed for ever
    except OSError as error:
        LOG.warning("%s is emptied, and lost: %s; make room there", path, error)
    with contextlib.suppress(OSError):  # somebody tidies up
        os.truncate(path, 0)


def tail(path: str | Path, most: int) -> list[str]:
    """Return the last lines of a file: at most `most`, of its last `TAIL_BYTES`; what is no UTF-8 is replaced.

    Raises:
        OSError: it can't be read, or is a link or anything else but a file.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("it is no file")
        start = max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES)
        file.seek(start)
        lines = file.read(TAIL_BYTES).decode(errors="replace").splitlines()
    return lines[1 if start and len(lines) > 1 else 0 :][-most:]  # where it begins inside of a line, without that


def last_lines(folder: Path, worker: str, most: int) -> list[str]:
    """Return what a worker wrote last, also where its log was put aside since.

    Args:
        folder: of the logs.
        worker: its name, as somebody says it.
        most: lines.

    Raises:
        InvalidInputError: no worker can be called so, or there is no log of it.
    """
    path = folder / f"{subjects.token(worker, 'worker')}.log"
    try:
        lines, whole = tail(path, most), path.stat().st_size <= TAIL_BYTES
    except OSError as error:
        raise InvalidInputError(f"no log of worker {worker!r} here, in {folder}: {error.strerror or error}") from error
    if whole and len(lines) < most:
        with contextlib.suppress(OSError):  # as a rule nothing was put aside
            lines = tail(f"{path}.1", most - len(lines)) + lines
    return lines


class _File:
    """One that a worker writes to; the next look begins at `position`."""

    def __init__(self, path: str, position: int) -> None:
        self.path, self.position, self.lines = path, position, Lines()

    def new_lines(self) -> str:
        """Return the lines that came since the last look, or since the file was cut off.

        Raises:
            OSError: it is gone, or can't be read.
        """
        size = Path(self.path).stat().st_size
        if size == self.position:
            return ""
        if not self.position <= size <= self.position + MOST:
            self.position, self.lines = (0 if size < self.position else size - MOST), Lines()
        with Path(self.path).open("rb") as file:
            read = os.pread(file.fileno(), MOST, self.position)
        self.position += len(read)
        return self.lines.whole(read)


class Outputs:
    """Finds the lines that stand for something.

    Args:
        rules: which lines do.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._files: dict[str, _File] = {}

    def follow(self, worker: str, path: str) -> None:
        """Follow what a worker writes to a file from now on; before may stand what others of its name have written."""
        size = 0
        with contextlib.suppress(OSError):
            size = Path(path).stat().st_size
        self._files[worker] = _File(path, size)

    def look(self) -> list[Logged]:
        """Return what workers have written since the last look."""
        return [logged for worker in self._files for logged in self.look_at(worker)]

    def look_at(self, worker: str) -> list[Logged]:
        """Return what a worker has written since the last look."""
        file = self._files.get(worker)
        if file is None:
            return []
        try:
            lines = file.new_lines()
        except OSError:  # somebody tidies up
            return []
        return [
            Logged(text=line.strip(), status=ruling.verdict.status, author=worker)
            for line, ruling in self._rules.telling_of_output(lines)
        ]

    def large(self) -> list[str]:
        """Return the files that have become too large by the last look."""
        return [file.path for file in self._files.values() if file.position > LOG_BYTES]

    def forget(self, worker: str) -> None:
        """Follow no more what a worker writes: it is gone."""
        self._files.pop(worker, None)
