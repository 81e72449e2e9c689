"""Waits until a file is written to, or until it exists."""

import contextlib
import ctypes
import os
import select
import stat
import time

WRITTEN = 0x2 | 0x4 | 0x800 | 0x80 | 0x100
"""IN_MODIFY; IN_ATTRIB and IN_MOVE_SELF, as it is removed or moved away; of what is in a folder also IN_MOVED_TO and
IN_CREATE."""

MOMENT_S = 0.005
"""How long changes of a file are gathered, where many come."""

LOOK_S = 0.02
"""How often to look where the kernel allows no further inotify instance (fs.inotify.max_user_instances)."""

EVENTS = 65536
"""Bytes of events that are read at once."""


class FileChanges:
    """Waits until something is written to an open file: polls a device, and uses inotify(7) for anything else.

    Args:
        file: its descriptor; that of a folder waits for files in there.
        ended: descriptor that can be read from when there is nothing to wait for any more.
    """

    def __init__(self, file: int, ended: int) -> None:
        self._inotify, self._poll, self._notified = -1, select.poll(), True
        self._poll.register(ended, select.POLLIN)
        if not stat.S_ISCHR(os.fstat(file).st_mode):
            libc, watched = ctypes.CDLL(None), f"/proc/self/fd/{file}"
            self._inotify = file = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            self._notified = libc.inotify_add_watch(self._inotify, watched.encode(), WRITTEN) >= 0
        if self._notified:
            self._poll.register(file, select.POLLIN)

    def wait(self, seconds: float) -> None:
        """Wait until something was written since the last call, or the file was moved away, or for so long."""
        if not self._notified:
            time.sleep(min(seconds, LOOK_S))
        elif self._poll.poll(1e3 * seconds) and self._inotify >= 0:
            time.sleep(MOMENT_S)
            with contextlib.suppress(BlockingIOError):
                os.read(self._inotify, EVENTS)

    def close(self) -> None:
        """Wait no more."""
        if self._inotify >= 0:
            os.close(self._inotify)
