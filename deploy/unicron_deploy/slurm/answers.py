"""What Slurm answers of a user's jobs and of nodes, asked once for all jobs that look into one folder."""

import fcntl
import os
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from unicron.errors import UnicronError
from unicron.slurm import shown, tools
from unicron.slurm.pace import Pace
from unicron.slurm.shown import JobShown, NodeShown

LOOK_S = 10.0
"""How often Slurm is asked where it is quick: when jobs end, and which nodes are drained."""

FRESH = 0.8
"""Share of the pause between two looks for which an answer is used by others."""

ASKED_S = 60.0
"""An answer as old as that is used while somebody else asks."""


class _Answer(msgspec.Struct, frozen=True):
    at: float
    jobs: str
    nodes: str


class Look(NamedTuple):
    """What Slurm shows: the user's jobs that have not ended, and all nodes, by name."""

    jobs: dict[str, JobShown]
    nodes: dict[str, NodeShown]


class Answers:
    """Asks Slurm, unless another job has done so just now.

    Args:
        folder: that the jobs see which ask together.
        cluster: Slurm's name of it.
    """

    def __init__(self, folder: Path, cluster: str) -> None:
        self._path = folder / f"queue-{cluster}.answer"  # .json is of machines, in the folder of a pool
        self._pace = Pace(LOOK_S)

    @property
    def pause_s(self) -> float:
        """Seconds until the next look."""
        return self._pace.pause_s

    def look(self) -> Look:
        """Return what Slurm shows, or has shown a moment ago. Blocks; raises as `tools.run` does."""
        found = self._read()
        if found is None or not self._is_younger(found, FRESH * self.pause_s):
            found = self._asked(found)
        return Look({job.job: job for job in shown.jobs(found.jobs)}, shown.nodes(found.nodes))

    def _is_younger(self, answer: _Answer, limit_s: float) -> bool:
        return abs(time.time() - answer.at) < limit_s  # another node's clock may be ahead of ours

    def _asked(self, before: _Answer | None) -> _Answer:
        lock = os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return before if before and self._is_younger(before, ASKED_S) else self._ask()
        else:
            answer = self._ask()
            scratch = self._path.with_suffix(".new")
            scratch.write_bytes(msgspec.json.encode(answer))
            scratch.replace(self._path)
            return answer
        finally:
            os.close(lock)

    def _ask(self) -> _Answer:
        begun, at = time.monotonic(), time.time()
        try:
            jobs = tools.ask("squeue", "--all", "--noheader", "--user", str(os.getuid()), "-o", shown.JOBS)
            nodes = tools.ask("sinfo", "--all", "--noheader", "-N", "-o", shown.NODES)
        except UnicronError:
            self._pace.failed()
            raise
        self._pace.answered(time.monotonic() - begun)
        return _Answer(at, jobs, nodes)

    def _read(self) -> _Answer | None:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=_Answer)
        except (OSError, msgspec.MsgspecError):
            return None
