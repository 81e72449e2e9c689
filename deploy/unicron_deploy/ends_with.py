"""Processes that end with the command that has started them, however it ends.

A command marks its environment, which all inherit that it starts, and starts a watch: a process in a session of its
own, which no terminal's signal reaches. When the command is gone, the watch ends whatever bears the mark.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from unicron.processes import ProcessRecord, wait_until_gone

MARK = "UNICRON_ENDS_WITH"
"""Variable that says with which process others end: its PID namespace, its id and its start."""

GRACE_S = 5.0
"""How long they may take to end in an orderly way, before they are killed."""


@contextlib.contextmanager
def ends_with_us() -> Iterator[None]:
    """Have whatever is started inside end with this process; only where that raises may something be left to end."""
    us = ProcessRecord.from_pid(os.getpid())
    command = [sys.executable, "-P", "-m", "unicron_deploy.ends_with", str(us.pid), str(us.ticks)]
    null = subprocess.DEVNULL
    # elsewhere, so that it keeps no file system busy
    watch = subprocess.Popen(command, stdin=null, stdout=null, stderr=null, start_new_session=True, cwd="/")
    os.environ[MARK] = f"{_namespace()}:{us.pid}:{us.ticks}"
    try:
        yield
    finally:
        del os.environ[MARK]
    watch.kill()
    watch.wait()


def left_behind() -> list[ProcessRecord]:
    """Return the processes of this user that were to end with another one, and outlived it."""
    return [process for process, owner in _marked() if not owner.alive() and process.alive()]


def watch(owner: ProcessRecord) -> None:
    """Wait until a process is gone; then end what was to end with it, in an orderly way where it soon does."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(owner.pid)
        if owner.alive():  # it has the id, and not a later one
            select.select([descriptor], [], [])
    found = _of(owner)
    for process in found:
        if _leads(process.pid):
            process.signal(signal.SIGINT)
    wait_until_gone(found, GRACE_S)
    while found := _of(owner):  # again, as they may have started others
        for process in found:
            if _leads(process.pid):
                process.kill_session()
            process.signal(signal.SIGKILL)
        wait_until_gone(found, GRACE_S)


def _of(owner: ProcessRecord) -> list[ProcessRecord]:
    return [process for process, other in _marked() if other == owner and process.alive()]


def _marked() -> Iterator[tuple[ProcessRecord, ProcessRecord]]:
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and (owner := owner_of(int(path.name))):
            yield ProcessRecord.from_pid(int(path.name)), owner


def owner_of(pid: int) -> ProcessRecord | None:
    """Return with which process another one is to end, None where it may stay."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # another user's, or gone
        return None
    value = next((each.partition(b"=")[2] for each in variables if each.startswith(MARK.encode() + b"=")), b"")
    with contextlib.suppress(ValueError):
        namespace, pid, ticks = map(int, value.split(b":"))
        if namespace == _namespace():
            return ProcessRecord(pid=pid, ticks=ticks)
    return None


def _namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


def _leads(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        return os.getsid(pid) == pid
    return False


if __name__ == "__main__":
    watch(ProcessRecord(pid=int(sys.argv[1]), ticks=int(sys.argv[2])))
