"""Kills processes that ended workers have left behind; the agent, their subreaper, has become their parent."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Collection

from unicron_agent.workers.activity import children_of, group_of, start_time

LOOKS_S = (0.0, 0.2, 1.0)
"""Delays after a worker's end at which to look for orphans: a grandchild becomes ours when its parent has ended."""


def kill_orphans(known: Collection[int]) -> None:
    """Kill the orphans among our children, and collect the status of those that have ended.

    An orphan is in the process group of an ended worker or its program. Processes that made a group of their own, as
    daemons do, are left alone.

    Args:
        known: children to leave alone: the standby and living workers.
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
