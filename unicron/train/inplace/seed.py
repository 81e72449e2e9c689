"""The seed of a ghost: a fork of a worker's process from before it did anything, from which trial processes are forked.

A ghost has to begin as a replacement of the rank would: as a fork of the node's warm standby. So each rank that may be
drilled keeps such a fork, asleep, from the time before it has threads, connections or a GPU.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from unicron.contracts.tasks import ParallelLayout
from unicron.contracts.time_limits import TRIAL_S
from unicron.contracts.worker import DRILL, UNCARRIED
from unicron.snapshots.trials import Trial
from unicron.train.worker import channel

GHOST = "UNICRON_GHOST"
"""The variable with the folder of a trial, in a process that takes a rank's place on trial; unset in all others."""

OUTPUT, VERDICT = "output", "verdict"
"""Files of a trial's folder."""

TOO_LONG = "its trial took too long"

LOOK_S = 0.5
"""Seconds between two looks whether the outcome of a trial is awaited whose worker is gone."""

NICE, NICEST = 10, 19
"""Niceness: of the first trial, as a rank that is lost before its outcome costs all that was done, and of later ones.

Where all processors are busy, the first has a tenth of one; later ones have what nobody else asks for.
"""

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15


class Seed:
    """The worker's end of its seed.

    Args:
        connection: to the seed.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._answers = connection, connection.makefile("rb")

    def run(self, folder: Path, *, is_first: bool = False) -> dict[str, Any]:
        """Have ghosts run a trial; return what has come of it, as `read_verdict` does.

        Args:
            folder: of the trial.
            is_first: nobody knows yet what comes of it.
        """
        try:
            self._connection.sendall(json.dumps([str(folder), is_first]).encode() + b"\n")
            answer = self._answers.readline()
        except (OSError, ValueError):
            answer = b""
        return dict(json.loads(answer)) if answer else {"unproven": TOO_LONG}

    def cut(self) -> None:
        """End the seed, and with it a trial that is under way."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)


def plant_if_due(run: Callable[[], int]) -> Seed | None:
    """Leave a seed behind if this process is the rank that is drilled: the last one, if there are others.

    Args:
        run: runs the script in a ghost, and returns its exit code.
    """
    layout = msgspec.json.decode(os.environ["UNICRON_LAYOUT"], type=ParallelLayout)
    last = int(os.environ["UNICRON_PLACE"]) == layout.replica_workers - 1 > 0
    return plant(run) if last and os.environ.get(DRILL) and not os.environ.get(UNCARRIED) else None


def plant(run: Callable[[], int]) -> Seed:
    """Leave a seed behind; it ends with this process.

    Args:
        run: runs the script in a ghost, and returns its exit code.
    """
    ours, theirs = socket.socketpair()
    between = os.fork()
    if between == 0:  # whose child is nobody's descendant: what the agent measures of the worker is the worker's alone
        if os.fork():
            os._exit(0)
        ours.close()
        _sleep_and_grow(theirs, run)
    theirs.close()
    os.waitpid(between, 0)
    return Seed(ours)


def _sleep_and_grow(connection: socket.socket, run: Callable[[], int]) -> NoReturn:
    """Fork a ghost for each line that comes, until the worker's process has ended."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, b"unicron trial")  # so that nobody takes it for the rank
    os.setpgrp()  # so that it is not ended with what the worker has left behind, while its outcome is awaited
    try:
        for line in connection.makefile("rb"):
            named, is_first = json.loads(line)
            folder, verdict = Path(named), dict[str, Any](again=True)
            while verdict.get("again"):  # a second one shows what differs by itself
                (folder / VERDICT).unlink(missing_ok=True)
                verdict = read_verdict(folder, _run_ghost(connection, folder, run, is_first=is_first))
            Trial(folder).finish(verdict)
            connection.sendall(json.dumps(verdict).encode() + b"\n")
    finally:
        os._exit(0)


def _run_ghost(connection: socket.socket, folder: Path, run: Callable[[], int], *, is_first: bool) -> int:
    """Run a ghost to its end; return its status as `os.waitpid` gives it, -1 where it took too long."""
    seed, ghost = os.getpid(), os.fork()
    if ghost == 0:
        connection.close()
        _be_ghost(seed, folder, run, is_first=is_first)
    descriptor = os.pidfd_open(ghost)
    try:
        in_time = _await_end(descriptor, connection, Trial(folder))
        if not in_time:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    finally:
        os.close(descriptor)
    _, status = os.waitpid(ghost, 0)
    return status if in_time else -1


def _await_end(descriptor: int, connection: socket.socket, trial: Trial) -> bool:
    """Wait for the end of a ghost; return whether it came in time, and before nobody waits for it any more.

    Where the worker is gone, its agent waits as long as there is a folder of the trial.
    """
    ends = time.monotonic() + TRIAL_S
    watched = [descriptor, connection.fileno()]
    while (left := ends - time.monotonic()) > 0:
        ready, _, _ = select.select(watched, [], [], left if len(watched) > 1 else min(left, LOOK_S))
        if descriptor in ready:
            return True
        if not trial.is_awaited:
            break
        watched = [descriptor]
    return False


def read_verdict(folder: Path, status: int) -> dict[str, Any]:
    """Return what has come of a trial: a `problem`, that it is `unproven` and why, or to try it `again`.

    Args:
        folder: of the trial.
        status: of the ghost's process.
    """
    try:
        return dict(json.loads((folder / VERDICT).read_text()))
    except (OSError, ValueError, TypeError):
        pass
    if status < 0:
        return {"unproven": TOO_LONG}
    if os.WIFSIGNALED(status):
        return {"unproven": f"the process on trial was ended by {signal.Signals(os.WTERMSIG(status)).name}"}
    code = os.waitstatus_to_exitcode(status)
    return {"problem": f"one on trial ended with exit code {code} before it came there{last_line(folder)}"}


def last_line(folder: Path) -> str:
    """Return the last line that a process on trial has written, as the end of a sentence; empty where there is none."""
    with contextlib.suppress(OSError):
        lines = (folder / OUTPUT).read_text(errors="replace").strip().splitlines()
        return f": {lines[-1][:300]}" if lines else ""
    return ""


def _be_ghost(seed: int, folder: Path, run: Callable[[], int], *, is_first: bool) -> NoReturn:
    code = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != seed:
            os._exit(1)
        os.nice(NICE if is_first else NICEST)
        if not is_first:
            with contextlib.suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        output = os.open(folder / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for number in (1, 2):
            os.dup2(output, number)
        os.environ[GHOST] = str(folder)
        os.environ.pop(channel.SOCKET_VARIABLE, None)
        code = run()
    finally:
        os._exit(code)
