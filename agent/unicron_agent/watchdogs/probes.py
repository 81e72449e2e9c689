"""Samples for the watchdogs: file systems, memory of the machine and of its container, memory of workers.

See statvfs(3), proc(5), and https://docs.kernel.org/admin-guide/cgroup-v2.html.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from unicron.contracts.watchdogs import AlertKind
from unicron_agent.stimuli import MachineMeasured, Memory, Store
from unicron_agent.workers.activity import processes_of

MOST_FREE = 50 << 30
"""Bytes that are enough on any file system, however large it is."""

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP, MEMORY = Path("/proc/self/cgroup"), Path("/proc/meminfo")


def measure(folders: Iterable[str | Path], least_free: float, pids: Mapping[str, int]) -> MachineMeasured:
    """Return what is there now; it may take as long as a file system that hangs.

    Args:
        folders: whose file systems are looked at; those that do not exist yet count as their parents.
        least_free: share of a file system below which it is nearly full.
        pids: processes of workers, by name.
    """
    return MachineMeasured(
        tuple(file_systems(folders, least_free)), memory(), {name: held(pids[name]) for name in pids}
    )


def file_systems(folders: Iterable[str | Path], least_free: float) -> list[Store]:
    """Return the bytes and inodes of the file systems that folders are in, each of these once."""
    found: dict[int, list[Store]] = {}
    for folder in folders:
        path = _existing(Path(folder).absolute())
        try:
            counts, device = os.statvfs(path), path.stat().st_dev
        except OSError:
            continue
        total = counts.f_blocks * counts.f_frsize
        share = min(least_free, MOST_FREE / total) if total else 0.0
        room = Store(
            AlertKind.DISK, f"the file system of {path}", total - counts.f_bavail * counts.f_frsize, total, share
        )
        used = counts.f_files - counts.f_favail
        files = Store(AlertKind.DISK, f"the table of files of {path}", used, counts.f_files, least_free, "inodes")
        found.setdefault(device, [room, files])
    return [store for stores in found.values() for store in stores]


def _existing(path: Path) -> Path:
    return next((each for each in (path, *path.parents) if each.exists()), path)


def memory() -> Memory | None:
    """Return the memory of this machine, or of a control group that we are in and that has less left; None: unknown."""
    counts = _numbers(MEMORY, 1024)
    if "MemAvailable" not in counts or "MemTotal" not in counts:
        return None
    found = [Memory(counts["MemAvailable"], counts["MemTotal"])]
    own = next((line[3:] for line in _lines(OWN_CGROUP) if line.startswith("0::/")), "/").strip("/")
    folder = CGROUPS / own
    for each in (folder, *folder.parents):
        if CGROUPS not in {each, *each.parents}:
            break
        most, now = _lines(each / "memory.max"), _lines(each / "memory.current")
        if most and now and most[0].isdecimal() and now[0].isdecimal():
            counts = _numbers(each / "memory.stat")
            cached = counts.get("inactive_file", 0) + counts.get(
                "active_file", 0
            )  # is given back before anybody is killed
            found.append(Memory(max(0, int(most[0]) - int(now[0]) + cached), int(most[0])))
    return min(found, key=lambda each: each.left)


def held(pid: int) -> int:
    """Return the bytes that a process and all that it has started hold, and that no file could give back."""
    total = 0
    for process in processes_of(pid):
        counts = _numbers(Path(f"/proc/{process}/status"), 1024)
        total += counts.get("RssAnon", 0) + counts.get("RssShmem", 0)
    return total


def _numbers(path: Path, unit: int = 1) -> dict[str, int]:
    """Return the rows `name: number unit` of a file of the kernel's, or `name number`."""
    rows = (line.replace(":", " ").split() for line in _lines(path))
    return {row[0]: int(row[1]) * unit for row in rows if len(row) > 1 and row[1].isdecimal()}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return []
