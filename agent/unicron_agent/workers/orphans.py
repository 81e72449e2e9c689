"""What workers that are gone have started and left behind; the agent becomes its parent, as their subreaper."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Collection

from unicron_agent.workers.activity import children_of, group_of, start_time

LOOKS_S = (0.0, 0.2, 1.0)
"""When it is looked for after a worker's end: a child of a child comes to us when that has ended."""


def clear_up(known: Collection[int]) -> None:
    """End the orphans among our children, and collect the status of those that have ended.

    An orphan is in the process group of a worker, or of its program, that is no more. Who has made a group of its own,
    as a daemon does, is let be.

    Args:
        known: children that are somebody else's to end and collect.
    """
    for pid in children_of(os.getpid()):
        group = group_of(pid)
        if pid in known or group == os.getpgrp() or (start_time(pid) is not None and start_time(group) is not None):
            continue
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            asyncio.get_running_loop().add_reader(descriptor, _collect, descriptor)


def _collect(descriptor: int) -> None:
    asyncio.get_running_loop().remove_reader(descriptor)
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PIDFD, descriptor, os.WEXITED)
    os.close(descriptor)
