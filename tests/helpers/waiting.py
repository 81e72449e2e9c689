"""Waiting in tests: for a condition, and as long as it takes, since a busy machine may take its time.

Only the run as a whole has a limit (`timeout` in pyproject.toml); a test that waits for what never comes ends there.
What is to happen after a while happens in virtual time.
"""

import asyncio
import contextlib
import functools
import inspect
import itertools
import time

from helpers.worlds import LocalWorld
from unicron.clock import VirtualClock
from unicron.errors import BusUnavailableError

POLL_S = 0.02
PATIENT_S = 300.0
"""For calls that want to know how long they may take: as long as the run lets a test."""


LOOKS = 100_000
"""How often is looked in virtual time, which never waits for anything else: what has not come by then never does."""


def is_virtual():
    """Return whether the running loop lives in virtual time."""
    return type(asyncio.get_running_loop()).__module__ == VirtualClock.__module__


async def until(condition):
    """Return what `condition` returns, or what that awaits, once it is true; the bus may be away meanwhile."""
    for _ in range(LOOKS) if is_virtual() else itertools.repeat(None):
        with contextlib.suppress(BusUnavailableError):
            found = condition()
            if inspect.isawaitable(found):
                found = await found
            if found:
                return found
        await asyncio.sleep(POLL_S)
    raise AssertionError("it never comes")


def block_until(condition):
    """Do as `until` does, where no event loop runs."""
    while not (found := condition()):
        time.sleep(POLL_S)
    return found


async def insist(call):
    """Repeat `call` until the bus answers; return that."""
    while True:
        with contextlib.suppress(BusUnavailableError):
            return await call()
        await asyncio.sleep(POLL_S)


async def elapse(seconds):
    """Let virtual time pass."""
    assert is_virtual(), "this would take real time"
    await asyncio.sleep(seconds)


def in_virtual_time(test):
    """Run an asynchronous test in virtual time; a `world` or `bus` that it takes lives there, in memory."""
    taken = inspect.signature(test).parameters

    @functools.wraps(test)
    def run(*arguments, **fixtures):
        clock = VirtualClock(time.time())
        world = LocalWorld(clock)
        fixtures |= {name: made for name, made in (("world", world), ("bus", world.memory.connect())) if name in taken}
        clock.run(test(*arguments, **fixtures))

    rest = [parameter for name, parameter in taken.items() if name not in {"world", "bus"}]
    run.__signature__ = inspect.Signature(rest)  # what pytest is to give
    return run
