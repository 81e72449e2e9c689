"""Processes that may outlive their parent: found again by id and start time, ended as whole sessions."""

import os
import signal
import time
from pathlib import Path

import msgspec

POLL_S = 0.02


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
        stats = ((int(path.name), _stat(int(path.name))) for path in Path("/proc").iterdir() if path.name.isdigit())
        return [pid for pid, stat in stats if stat and stat.session == self.pid and stat.state not in "ZX"]

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


class _Stat(msgspec.Struct, frozen=True):
    state: str
    session: int
    ticks: int


def _stat(pid: int) -> _Stat | None:
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
