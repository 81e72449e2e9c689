"""The kernel's log, followed from its end on, in a thread of its own.

A device (/dev/kmsg) gives a record at a read: "PRIORITY,SEQUENCE,MICROSECONDS,FLAGS;TEXT", and lines of context behind
it (https://www.kernel.org/doc/Documentation/ABI/testing/dev-kmsg). A file is what a log daemon writes: its last line
may not be whole yet, and it may be moved away and begun anew, or cut off.
"""

import errno
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from unicron.errors import InvalidInputError
from unicron.rules import Rules
from unicron_agent.file_changes import FileChanges
from unicron_agent.lines import Lines
from unicron_agent.stimuli import Logged

log = logging.getLogger(__name__)

LOOK_S, REST_S = 0.2, 5.0
"""How often to look without any notification: while the log does not exist, and while it does."""

SLACK_S, DRIFT = 1.0, 5e-4
"""By which the kernel's clock may differ from ours: seconds, and seconds for each since the machine was started. Nobody
sets the kernel's, and time servers have ours run up to 500 ppm faster or slower."""

CHUNK = 1 << 20
"""Bytes that are read at once."""

RECORD = 8192
"""Bytes of the largest record of the device."""

_AT = re.compile(r"\[ *(\d+\.\d{3,9})\]")
"""When a line was made, in monotonic seconds; a log daemon may repeat lines that are old, or of an earlier boot."""

_PID = re.compile(r"\bpid[= ](\d+)|Kill(?:ed)? process (\d+)")
_PCI = re.compile(
    r"(?:Xid \((?:PCI:)?|PCI:|[Dd]evice[= ]\[?|nvidia |amdgpu )((?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2})\b"
)


class KernelLog:
    """Reports the lines that the rules classify as faults.

    Args:
        path: of the device or the file; one that is not there yet is waited for.
        rules: classify lines.
        slots: of GPUs, by their PCI address, as `pci` gives it.
        report: called in the thread with each fault.
    """

    def __init__(self, path: str, rules: Rules, slots: dict[str, int], report: Callable[[Logged], None]) -> None:
        self._path, self._rules, self._slots, self._report = path, rules, slots, report
        self._began = time.monotonic()
        self._ended, self._wakes = threading.Event(), os.eventfd(0)
        self._lines = Lines()
        self._file: int | None = None
        self._changes: FileChanges | None = None
        self._moved = False
        self._thread = threading.Thread(target=self._follow, name="unicron-kernel-log", daemon=True)

    def start(self) -> None:
        """Follow it from here on."""
        self._file = self._open(at_end=True)
        self._thread.start()

    def stop(self) -> None:
        """Follow it no more."""
        self._ended.set()
        os.eventfd_write(self._wakes, 1)
        if self._thread.is_alive():
            self._thread.join()
        os.close(self._wakes)

    def _open(self, *, at_end: bool) -> int | None:
        try:
            found = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            if at_end:
                os.lseek(found, 0, os.SEEK_END)
        except OSError as error:
            if error.errno != errno.ENOENT:
                log.error(  # noqa: TRY400 it says enough
                    "the kernel's log %s is not watched: %s; let this user read it, or give another --kernel-log",
                    self._path,
                    error,
                )
                self._ended.set()
            elif self._changes is None:
                self._wait_for_file()
            return None
        if self._changes is not None:
            self._changes.close()
        self._changes = FileChanges(found, self._wakes)
        return found

    def _wait_for_file(self) -> None:
        with suppress(OSError):  # without a folder it is looked for once in a while
            folder = os.open(Path(self._path).parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._changes = FileChanges(folder, self._wakes)
            os.close(folder)

    def _close(self) -> None:
        if self._changes is not None:
            self._changes.close()
        if self._file is not None:
            os.close(self._file)
        self._changes = self._file = None

    def _follow(self) -> None:
        while not self._ended.is_set():
            if self._changes is None:
                self._ended.wait(LOOK_S)
            else:
                self._changes.wait(LOOK_S if self._moved else REST_S)
            try:
                while lines := self._read():
                    self._report_faults(lines)
            except OSError as error:
                if error.errno not in {errno.EAGAIN, errno.EPIPE}:  # nothing there; or overwritten before it was read
                    log.exception("the kernel's log %s is not watched any more", self._path)
                    return
        self._close()

    def _read(self) -> str:
        """Return whole lines, none where there are no new ones."""
        if self._file is None:
            self._file = self._open(at_end=False)
            if self._file is None:
                return ""
        if stat.S_ISCHR(os.fstat(self._file).st_mode):
            return os.read(self._file, RECORD).decode(errors="replace").partition(";")[2]
        read = os.read(self._file, CHUNK)
        if not read:
            return self._read() if self._begins_anew(self._file) else ""
        return self._lines.add(read) or self._read()

    def _begins_anew(self, file: int) -> bool:
        """Return whether to go on with a new file, as ours was moved away, or from its beginning, as it was cut off."""
        ours = os.fstat(file)
        try:
            there = os.stat(self._path)  # noqa: PTH116 there is no path object
        except FileNotFoundError:
            self._moved = True
            return False
        self._moved = False
        if (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino):
            self._close()
        elif there.st_size < os.lseek(file, 0, os.SEEK_CUR):
            os.lseek(file, 0, os.SEEK_SET)
        else:
            return False
        self._lines = Lines()
        return True

    def _is_news(self, at: float) -> bool:
        """Return whether a line may have been made since this follows the log."""
        now = time.monotonic()
        slack = SLACK_S + DRIFT * now
        return self._began - slack <= at <= now + slack

    def _report_faults(self, lines: str) -> None:
        for line, ruling in self._rules.match_hardware_lines(lines):
            if (at := _AT.search(line)) and not self._is_news(float(at[1])):
                continue
            pid, address = _PID.search(line), _PCI.search(line)
            slot = self._slots.get(pci(address[1]), -1) if address else -1
            if slot < 0 and address and self._slots and ("NVRM: Xid" in line or "amdgpu " in line):
                continue  # of a GPU that is no slot's, as that of a screen
            self._report(
                Logged(
                    text=line.strip(),
                    status=ruling.verdict.status,
                    slot=slot,
                    pid=int(pid[1] or pid[2]) if pid else 0,
                )
            )


def append(path: str, line: str, now: float) -> None:
    """Add a line to a log, as the kernel would (chaos).

    Args:
        path: of the device or the file that an agent follows; empty where it follows none.
        line: without what a log puts before it.
        now: monotonic seconds.

    Raises:
        InvalidInputError: there is no log, or none that we may write; nothing was written.
    """
    cure = "start its agent with UNICRON_KERNEL_LOG=FILE, of a file that it may write"
    if not path:
        raise InvalidInputError(f"this node follows no kernel's log: {cure}")
    try:
        log_file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            lead = "" if stat.S_ISCHR(os.fstat(log_file).st_mode) else f"[{now:12.6f}] "  # a device has its own
            os.write(log_file, f"{lead}{line}\n".encode())
        finally:
            os.close(log_file)
    except OSError as error:
        raise InvalidInputError(f"the kernel's log {path} can't be written: {error.strerror}; {cure}") from error


def pci(address: str) -> str:
    """Return domain, bus and device of a PCI address as all write it the same; NVML's domain has eight digits."""
    *domain, bus, device = address.partition(".")[0].lower().split(":")
    return f"{int(domain[0], 16) if domain else 0:04x}:{bus}:{device}"
