"""How an agent learns that its node is to go: by a signal, or from Slurm, which tells when its job ends."""

import asyncio
import os
import signal

JOB_END = "SLURM_JOB_END_TIME"
"""Unix seconds."""


async def notice(now: float, leave_s: float) -> None:
    """Return when this node is to hand over what it has.

    Args:
        now: Unix seconds.
        leave_s: how long before the end of its job it begins to.
    """
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        loop.add_signal_handler(number, told.set)
    end = os.environ.get(JOB_END, "")
    if end.isdecimal() and int(end) > now:
        loop.call_later(max(0.0, int(end) - leave_s - now), told.set)
    await told.wait()
