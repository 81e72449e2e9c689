"""`unicron-slurm-prolog` and `unicron-slurm-epilog`: what slurmd runs on a node, as root, before and after each job.

A prolog that fails has Slurm drain the node and put the job on another one.
"""

import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from unicron.errors import InvalidInputError, UnicronError

MEMORY = Path("/dev/shm")  # noqa: S108 where agents keep states
LEAST_FREE = 0.05
"""Share of the memory's file system that has to be free for a job's states."""

KEPT_S = 3600.0
"""How long states stay that an agent left behind which was killed: a job that is requeued goes on from them."""


def check(memory: Path) -> None:
    """Check that a node can keep states in its memory.

    Raises:
        InvalidInputError: it can't; says why.
    """
    if not os.access(memory, os.W_OK):
        raise InvalidInputError(f"{memory} can't be written: mount a tmpfs there")
    usage = shutil.disk_usage(memory)
    if usage.free < LEAST_FREE * usage.total:
        raise InvalidInputError(
            f"{memory} is full ({usage.free // 2**20} of {usage.total // 2**20} MB free): see which process or user "
            "has files there"
        )


def leftovers(memory: Path, user: int, now: float) -> list[Path]:
    """Return the folders of agents of a user that have ended long ago.

    Args:
        memory: where they are.
        user: number of the user.
        now: Unix seconds.
    """
    return [
        folder
        for folder in sorted(memory.glob(f"unicron-{user}-*"))
        if folder.is_dir() and not folder.is_symlink() and now - _touched(folder) > KEPT_S and not _answers(folder)
    ]


def _touched(folder: Path) -> float:
    return max([folder.stat().st_mtime, *(path.lstat().st_mtime for path in folder.iterdir())])


def _answers(folder: Path) -> bool:
    """Return whether the agent whose folder it is lives."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(folder / "agent.sock"))
        except OSError:
            return False
        return True


def clean(memory: Path, environ: Mapping[str, str]) -> None:
    """Remove what agents of a job's user have left in memory long ago.

    Raises:
        InvalidInputError: the environment names no user.
    """
    user = environ.get("SLURM_JOB_UID", "")
    if not user.isdecimal():
        raise InvalidInputError(f"SLURM_JOB_UID {user!r}: expected a number; slurmd sets it for its Epilog")
    for folder in leftovers(memory, int(user), time.time()):
        shutil.rmtree(folder, ignore_errors=True)


def _run(action: Callable[[], None], name: str) -> int:
    try:
        action()
    except UnicronError as error:
        sys.stderr.write(f"{name}: {error}\n")
        return 1
    return 0


def prolog() -> int:
    """Check this node before a job; return the exit status."""
    return _run(lambda: check(MEMORY), "unicron-slurm-prolog")


def epilog() -> int:
    """Clean this node after a job; return the exit status: a node that can't be cleaned is used all the same."""
    _run(lambda: clean(MEMORY, os.environ), "unicron-slurm-epilog")
    return 0
