"""Follows the logs of this node's workers, reads their last lines, and keeps them small."""

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
"""Bytes of a log that are read at a look: the last ones, if a worker wrote more since the look before."""


TAIL_BYTES = 64 * 1024
"""Bytes from the end of a log in which its last lines are looked for."""

LOG_BYTES = 64 << 20
"""Size at which a log is rotated; the rotated part before it is removed then. So a log takes at most twice this, and
what is written between two looks: a script that writes without end must not fill the disk."""


def rotate(path: str) -> None:
    """Copy the last `LOG_BYTES` of a log to a file beside it, and truncate it; its writer goes on at its new end.

    What is written meanwhile is lost, and so is everything if the disk is full.
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
    """Return at most `most` last lines of a file, from its last `TAIL_BYTES`; bytes that are no UTF-8 are replaced.

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
    """Return the last lines of a worker's log, including its rotated part.

    Args:
        folder: of the logs.
        worker: its name, unchecked.
        most: number of lines.

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


class _FollowedLog:
    """A log that is followed; the next look begins at `position`."""

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
        return self.lines.add(read)


class Outputs:
    """Finds the lines of workers' logs that the rules classify as faults.

    Args:
        rules: classify lines.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._files: dict[str, _FollowedLog] = {}

    def follow(self, worker: str, path: str) -> None:
        """Follow a worker's log from its present end; what is there may be from an earlier worker of that name."""
        size = 0
        with contextlib.suppress(OSError):
            size = Path(path).stat().st_size
        self._files[worker] = _FollowedLog(path, size)

    def new_lines(self) -> list[Logged]:
        """Return the faults in what all workers have written since the last look."""
        return [logged for worker in self._files for logged in self.new_lines_of(worker)]

    def new_lines_of(self, worker: str) -> list[Logged]:
        """Return the faults in what a worker has written since the last look."""
        file = self._files.get(worker)
        if file is None:
            return []
        try:
            lines = file.new_lines()
        except OSError:  # somebody tidies up
            return []
        return [
            Logged(text=line.strip(), status=ruling.verdict.status, author=worker)
            for line, ruling in self._rules.match_output_lines(lines)
        ]

    def oversized(self) -> list[str]:
        """Return the logs that exceeded `LOG_BYTES` at the last look."""
        return [file.path for file in self._files.values() if file.position > LOG_BYTES]

    def forget(self, worker: str) -> None:
        """Stop following the log of a worker that has ended."""
        self._files.pop(worker, None)
