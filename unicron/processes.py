"""Processes that may outlive their parent: found again by id and start time, ended as whole sessions."""

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from unicron.errors import InvalidInputError

POLL_S = 0.02

LOOK_S = 1.0
"""As idle counts no more at a look: this process stood still for the rest, as the machine did, say."""


class ProcessRecord(msgspec.Struct, kw_only=True, frozen=True):
    """A process that leads a session of its own.

    Attributes:
        pid: process id, and the id of its session and process group.
        ticks: its start, in clock ticks since the machine's boot; distinguishes it from a later process with its id.
    """

    pid: int
    ticks: int

    @classmethod
    def from_pid(cls, pid: int) -> "ProcessRecord":
        """Return the record of the process that has `pid` now; of one that is gone already, one that never lives."""
        stat = _stat(pid)
        return cls(pid=pid, ticks=stat.ticks if stat else -1)

    def alive(self) -> bool:
        """Return whether it runs: a zombie does not."""
        stat = _stat(self.pid)
        return stat is not None and stat.ticks == self.ticks and stat.state not in "ZX"

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process alone, if it lives."""
        if self.alive():
            _send(self.pid, number)

    def session(self) -> list[int]:
        """Return the ids of all living processes of its session, itself included."""
        if self.pid <= 0:
            return []  # 0 is the session of whatever was started outside of this container
        leader = _stat(self.pid)
        if leader is not None and leader.ticks != self.ticks:
            return []  # the id is another process's now, so nothing of the session is left
        return [pid for pid, stat in _running() if stat.session == self.pid]

    def kill_session(self) -> None:
        """End every process of its session with SIGKILL, also those that outlived their leader."""
        while members := self.session():
            for pid in members:
                _send(pid, signal.SIGKILL)
            time.sleep(POLL_S)


def wait_until_gone(processes: list[ProcessRecord], timeout_s: float) -> list[ProcessRecord]:
    """Wait until all have ended; return those that live on after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    living = processes
    while (living := [process for process in living if process.alive()]) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return living


class Patience:
    """Bears a start for as long as something comes of it: what computes, or waits for a turn or a disk, is no idler.

    So a slow machine takes as long as it needs, and what hangs is given up after so many idle seconds.

    Args:
        idle_s: seconds in which none of the processes works, all together.
        clock: seconds that pass.
    """

    def __init__(self, idle_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._left, self._clock, self._looked = idle_s, clock, clock()

    def is_over(self, processes: Iterable[ProcessRecord]) -> bool:
        """Return whether it is, now that these are waited for; ask several times a second."""
        now = self._clock()
        passed, self._looked = min(now - self._looked, LOOK_S), now
        sessions = {each.pid for each in processes if each.alive()}
        if not any(stat.session in sessions and _works(pid) for pid, stat in _running()):
            self._left -= passed
        return self._left < 0


def _works(pid: int) -> bool:
    """Return whether a thread of a process runs, waits for a core, or for a disk."""
    try:
        threads = [path.name for path in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return False
    return any(stat.state in "RD" for thread in threads if (stat := _stat(f"{pid}/task/{thread}")))


def _running() -> Iterator[tuple[int, "_Stat"]]:
    """Yield all processes that live, by id."""
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and (stat := _stat(path.name)) and stat.state not in "ZX":
            yield int(path.name), stat


class _Stat(msgspec.Struct, frozen=True):
    state: str
    session: int
    ticks: int


def _stat(pid: int | str) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold blanks and brackets
    return _Stat(state=fields[0], session=int(fields[3]), ticks=int(fields[19]))


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
    except PermissionError as error:
        raise InvalidInputError(f"process {pid} is another user's: who started it, or root, may end it") from error
