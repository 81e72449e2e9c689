"""Small tools for asyncio that the shells share."""

import asyncio
import contextlib
import logging
import math
import signal
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from unicron.errors import BusUnavailableError

log = logging.getLogger(__name__)
T = TypeVar("T")

RETRY_S = 0.1
"""Pause before a call is repeated that the bus did not answer."""

DRAIN_S = 3.0
"""How long a step in progress may take to finish when its task is cancelled."""


def next_beat(period_s: float, after: float) -> float:
    """Return the next time that is a multiple of a period, on the clock of the event loop.

    That is the clock of the machine: processes with the same period wake up at the same moment.
    Waking up costs a process more than what it then does, and it costs the server, which hears from all, as much.
    """
    return (math.floor(after / period_s + 0.01) + 1) * period_s  # of timers that fire a little early, none fires twice


async def sleep_until_beat(period_s: float) -> None:
    """Sleep until the next multiple of a period; see `next_beat`."""
    now = asyncio.get_running_loop().time()
    await asyncio.sleep(next_beat(period_s, now) - now)


async def retry_until_available(call: Callable[[], Awaitable[T]], what: str) -> T:
    """Repeat `call` until the bus answers."""
    level = logging.WARNING
    while True:
        try:
            return await call()
        except BusUnavailableError as error:
            log.log(level, "%s, again and again until the bus answers: %s", what, error)
            level = logging.DEBUG
            await asyncio.sleep(RETRY_S)


async def shielded(job: Coroutine[Any, Any, None]) -> None:
    """Await `job`; when cancelled meanwhile, let it finish first, within `DRAIN_S`."""
    task = asyncio.ensure_future(job)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task}, timeout=DRAIN_S)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise


async def gather_or_cancel(*jobs: Coroutine[Any, Any, None]) -> None:
    """Run `jobs` side by side until all have ended or one has failed; then end the others, and fail as it did."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome


def run_until_signal(job: Coroutine[Any, Any, None]) -> None:
    """Run `job` until it ends, or until SIGTERM or SIGINT cancels it (it drains in its own `finally`)."""

    async def main() -> None:
        task = asyncio.ensure_future(job)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(main())
