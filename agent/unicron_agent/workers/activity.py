"""Whether the processes of a worker do anything, and their machine too much, as the kernel tells (proc(5))."""

import os
import re
from pathlib import Path

from unicron_agent.silence import Use

CLOCK_HZ = os.sysconf("SC_CLK_TCK")

_STATE, _GROUP, _USER, _SYSTEM, _OF_THE_ENDED, _START = 0, 2, 11, 12, 15, 19
"""Places of fields, counted from the state."""

PRESSURE = Path("/proc/pressure/cpu")

SPAN_S = 0.5
"""Over which the pressure is measured at least: the kernel's own average of ten seconds comes too late."""

_WAITED = re.compile(r"some .*total=(\d+)")


class Pressure:
    """For which share of the time something that could run on this machine waits for a core."""

    def __init__(self) -> None:
        self._at, self._waited_s, self._share = 0.0, 0.0, 0.0

    def share(self, now: float) -> float:
        """Return it as of late, at `now` in monotonic seconds.

        A kernel that does not count that tells how many want to run, on average of a minute.
        """
        try:
            found = _WAITED.match(PRESSURE.read_text())
        except OSError:
            found = None
        if not found:
            cores, wanted = os.cpu_count() or 1, os.getloadavg()[0]
            return 1 - cores / wanted if wanted > cores else 0.0
        waited_s, span_s = int(found[1]) / 1e6, now - self._at
        if span_s >= SPAN_S:
            self._share = max(0.0, min(1.0, (waited_s - self._waited_s) / span_s)) if self._at else 0.0
            self._at, self._waited_s = now, waited_s
        return self._share


def is_stopped(pid: int) -> bool:
    """Return whether a signal or a debugger has stopped the process."""
    return _stat(f"{pid}")[_STATE] in "Tt"


def start_time(pid: int) -> int | None:
    """Return when the process started, in clock ticks since boot; None where there is none or it is a zombie."""
    fields = _stat(f"{pid}")
    return None if fields[_STATE] == "Z" else int(fields[_START])


def asleep(pid: int) -> float | None:
    """Return how many seconds of CPU a process and its children have used so far, all of which sleep now.

    None where any of them runs, would run if the machine were less busy, or waits for a disk: a slow one is no hang.
    """
    used = 0.0
    waiting = [pid]
    while waiting:
        process = waiting.pop()
        for thread in _threads(process):
            if _stat(f"{process}/task/{thread}")[_STATE] not in "SIZX":
                return None
            waiting += _children(process, thread)
        fields = _stat(f"{process}")
        if len(fields) > _SYSTEM:
            used += (int(fields[_USER]) + int(fields[_SYSTEM])) / CLOCK_HZ
    return used


def use_of(pid: int) -> Use:
    """Return what a process and all that it has started have used, those included that have ended."""
    ticks, written, states = 0, 0, ""
    for process in processes_of(pid):
        ticks += sum(map(int, _stat(f"{process}")[_USER:_OF_THE_ENDED]))
        states += "".join(_stat(f"{process}/task/{thread}")[_STATE] for thread in _threads(process))
        written += _written(process)
    return Use(ticks / CLOCK_HZ, written, any(each in "RD" for each in states), any(each in "Tt" for each in states))


def _written(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/io").read_text("utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.partition(":")[2]) for line in lines if line.startswith("wchar:")), 0)


def processes_of(pid: int) -> list[int]:
    """Return a process and all that it has started and that are still there, parents first."""
    found = [pid]
    for process in found:
        found += children_of(process)
    return found


def children_of(pid: int) -> list[int]:
    """Return the children of a process."""
    return [child for thread in _threads(pid) for child in _children(pid, thread)]


def group_of(pid: int) -> int:
    """Return the process group of a process, 0 where there is none."""
    fields = _stat(f"{pid}")
    return int(fields[_GROUP]) if len(fields) > _GROUP else 0


def _stat(path: str) -> list[str]:
    """Return what the kernel tells of a process or a thread, from its state on; where there is none, as of a zombie."""
    try:
        return Path(f"/proc/{path}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ["Z"]


def _threads(pid: int) -> list[str]:
    try:
        return [thread.name for thread in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []


def _children(pid: int, thread: str) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{thread}/children").read_text("utf-8").split()]
    except OSError:
        return []
