"""Whether the processes of a worker do anything, as the kernel tells (proc_pid_stat(5))."""

import os
from pathlib import Path

CLOCK_HZ = os.sysconf("SC_CLK_TCK")

_STATE, _USER, _SYSTEM, _START = 0, 11, 12, 19
"""Places of fields, counted from the state."""


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


def processes_of(pid: int) -> list[int]:
    """Return a process and all that it has started and that are still there, parents first."""
    found = [pid]
    for process in found:
        found += [child for thread in _threads(process) for child in _children(process, thread)]
    return found


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
