"""Waits for the signal, or the end of the Slurm job, before which a node hands over what it has."""

import asyncio
import os
import signal

JOB_END = "SLURM_JOB_END_TIME"
"""Unix seconds."""


async def wait_for_departure(now: float, leave_s: float) -> None:
    """Return when this node is to begin to hand over what it has.

    Args:
        now: Unix seconds.
        leave_s: how long before the end of its job it begins to.
    """
    loop, due = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        loop.add_signal_handler(number, due.set)
    end = os.environ.get(JOB_END, "")
    if end.isdecimal() and int(end) > now:
        loop.call_later(max(0.0, int(end) - leave_s - now), due.set)
    await due.wait()
