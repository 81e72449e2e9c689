"""The ranks of a program: what they write, as it comes; which of them were replaced, and whether they have ended."""

import os
from collections.abc import Iterator
from pathlib import Path

from unicron.contracts.base import Message
from unicron.contracts.events import FailureDetected, TaskRecovered, TaskStateChanged, WorkerExited, WorkerFinished
from unicron.contracts.tasks import TaskState
from unicron.observe.words.ranks import RankNames
from unicron_cli.output import say

CHUNK = 1 << 20
"""Bytes of a worker's output that are read at once."""


class Ranks:
    """Shows the output of ranks.

    Args:
        root: folder that `pattern` is looked for in.
        pattern: of their files.
        named: whether each line begins with the rank, TASK:RANK; the process, until it has one.
        again: whether what an earlier run wrote is shown as well.

    Attributes:
        names: to be told of the journal's messages.
    """

    def __init__(self, root: Path, pattern: str, *, named: bool = True, again: bool = False) -> None:
        self._root, self._pattern, self._named = root, pattern, named
        self.names = RankNames()
        self._read = {} if again else {path: path.stat().st_size for path in self._files()}

    def _files(self) -> Iterator[Path]:
        return self._root.glob(self._pattern)

    def write(self) -> None:
        """Write what the ranks have written since the last look, whole lines at a time."""
        for path in sorted(self._files()):
            with path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self._read.get(path, 0):
                    self._read[path] = 0  # it was too large, and is begun anew
                file.seek(self._read.get(path, 0))
                data = file.read(CHUNK)
            whole = data[: data.rfind(b"\n") + 1] or (data if len(data) == CHUNK else b"")
            self._read[path] = self._read.get(path, 0) + len(whole)
            for line in whole.decode(errors="replace").removesuffix("\n").split("\n") if whole else ():
                left = line.rstrip("\r").rpartition("\r")[2]  # of a progress bar what a terminal shows in the end
                say(f"{self.names.rank(path.stem)}: {left}" if self._named else left)


class Ending:
    """Whether a task has ended with all that its script does behind its loop, by the messages of the journal."""

    def __init__(self, task: str) -> None:
        self._task, self._task_ended = task, False
        self._behind_loop: dict[str, str] = {}

    @property
    def over(self) -> bool:
        """Whether the task has ended, and each process that was through its loop has ended or was lost."""
        return self._task_ended and not self._behind_loop

    def observe(self, message: Message) -> None:
        """Take a message of the journal into account; messages come in its order."""
        match message:
            case WorkerFinished(task=self._task, worker=worker, node=node):
                self._behind_loop[worker] = node
            case WorkerExited(task=self._task, worker=worker):
                self._behind_loop.pop(worker, None)
            case TaskStateChanged(task=self._task, state=state):
                self._task_ended = state.ended
            case FailureDetected(worker="", node=node):
                self._behind_loop = {name: there for name, there in self._behind_loop.items() if there != node}


class Replacements:
    """What became of a task's ranks when some were lost, by the messages of the journal.

    Args:
        task: its name.
        runs_again: whoever lives runs the program from its beginning, too.
    """

    def __init__(self, task: str, *, runs_again: bool = False) -> None:
        self._task, self._runs_again, self._replaced, self._began_again = task, runs_again, 0, 0
        self._before: frozenset[str] | None = None
        self._now, self._has_failed = frozenset[str](), False

    def observe(self, message: Message) -> str:
        """Take a message of the journal into account; return who went on since when, where all are back."""
        match message:
            case FailureDetected():
                self._has_failed = True
                self._before = self._now if self._before is None else self._before
            case TaskStateChanged(task=self._task, members=members, state=state):
                if state == TaskState.RECOVERING and self._before is None:  # also of what no failure was reported
                    self._before = self._now
                self._now = frozenset(member.worker for member in members) or self._now
            case TaskRecovered(task=self._task) if self._before is not None:
                went_on = 0 if self._runs_again else len(self._before & self._now)
                new = len(self._now - self._before)
                self._replaced += new if went_on else 0
                self._began_again += not went_on
                since = "the failure was detected" if self._has_failed else "they stopped"
                self._before, self._has_failed = None, False
                who = f"{new} new, {went_on} went on" if went_on else "all ranks began again"
                return f"{message.seconds:.2f} s after {since}: {who}"
        return ""

    def outcome(self, drilled: str) -> str:
        """Return what this run has shown of in-place healing.

        Args:
            drilled: what its last drill has; empty where there was none.
        """
        told = list[str]()
        if self._replaced:
            ranks = f"{self._replaced} lost ranks were" if self._replaced > 1 else "1 lost rank was"
            told.append(f"{ranks} replaced while others went on")
        if self._began_again:
            told.append("all ranks began again" + f" {self._began_again} times" * (self._began_again > 1))
        came = " and ".join(told)
        if self._replaced and not drilled:
            return f"{came}; no drill was made"
        shown = drilled or "unproven, the script ended before its drill"
        return f"{shown}; in this run {came}" if came else shown
