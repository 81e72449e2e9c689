"""What the workers of this node write, followed from where it ends when they come."""

import contextlib
import os
from pathlib import Path

from unicron.rules import Rules
from unicron_agent.lines import Lines
from unicron_agent.stimuli import Logged

MOST = 256 * 1024
"""Bytes that are looked at at once; of a worker that writes more in between, those are the last."""


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

    def forget(self, worker: str) -> None:
        """Follow no more what a worker writes: it is gone."""
        self._files.pop(worker, None)
