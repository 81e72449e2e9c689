"""The shell around a core, in tests: what goes in, what comes out, and buses on which things go wrong."""

import asyncio
import contextlib
import time

import msgspec

from helpers import tally
from helpers.buses import say
from helpers.waiting import elapse, insist, until
from helpers.worlds import LEASE_TTL_S
from unicron import codec, subjects
from unicron.clock import SystemClock
from unicron.contracts import answers
from unicron.contracts.events import (
    Alert,
    AttemptFailed,
    DeadLetter,
    FailureDetected,
    OrderTaken,
    TaskSubmitted,
    WorkerExited,
)
from unicron.errors import BusUnavailableError
from unicron.service.commit import Commit
from unicron.service.service import Service

OUTCOMES = subjects.events(FailureDetected, AttemptFailed, TaskSubmitted, DeadLetter, OrderTaken, Alert)

FAILED = subjects.events(AttemptFailed)

SETTLE_S = 1.0
"""Virtual seconds in which more would come than there should."""


async def feed(bus, message, number):
    """Put a fact of its node into the journal."""
    await say(bus, msgspec.structs.replace(message, id=f"fact-{number}", at=time.time() + number, source=message.node))


def exited(worker="w", **fields):
    return WorkerExited(node="n1", slot=0, task="gpt", worker=worker, **fields)


def current_outcomes(world, filters=OUTCOMES):
    """Return the outcomes in the journal of a world in memory."""
    return [
        codec.decode_message(entry.data) for entry in world.memory.journal if subjects.matches(filters, entry.subject)
    ]


async def outcomes(world, count, filters=OUTCOMES):
    """Return the outcomes once there are so many, with whatever more comes for a while in virtual time."""
    await until(lambda: len(current_outcomes(world, filters)) >= count)
    await elapse(SETTLE_S)
    return current_outcomes(world, filters)


async def newest(bus):
    """Return the newest commit, an empty one where there is none yet."""
    stored = await bus.bucket("state").get(tally.NAME)
    return codec.decode(stored.value, Commit) if stored else Commit()


async def ask(bus, query):
    data = await insist(lambda: bus.ask(subjects.for_query(tally.NAME, query), codec.encode(query), 5.0))
    return codec.decode(data, answers.Reply)


def service(bus, clock=None, **changes):
    return Service(tally.wiring(**changes), bus, clock or SystemClock(), LEASE_TTL_S)


async def serving(world, **changes):
    """Return a service in a world in memory, by the world's clock."""
    return service(await world.connect(), world.clock, **changes)


@contextlib.asynccontextmanager
async def running(*services):
    tasks = [asyncio.create_task(each.run()) for each in services]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome


def attempts(found):
    return [message.attempt for message in found if isinstance(message, FailureDetected)]


async def let_go(bus, name=tally.NAME):
    """Free the lease of a holder that has died, as it would be after a while."""
    await insist(lambda: bus.bucket("lease").delete(name))


class CutError(Exception):
    """The process is gone."""


class CutBus:
    """A bus whose user dies at a given point: points lie before and after each write of state or journal."""

    def __init__(self, bus, point):
        self._bus = bus
        self._left = point
        self.dead = False

    def __getattr__(self, name):
        self.check()
        return getattr(self._bus, name)

    async def append(self, *args):
        return await self.write(self._bus.append, *args)

    def bucket(self, name):
        return CutBucket(self._bus.bucket(name), self, counted=name == "state")

    async def write(self, call, *args):
        self._pass_point()
        outcome = await call(*args)
        self._pass_point()
        return outcome

    def _pass_point(self):
        self._left -= 1
        self.dead = self.dead or self._left < 0
        self.check()

    def check(self):
        if self.dead:
            raise CutError


class StuckBus:
    """A bus whose commits get no answer while `stuck`."""

    def __init__(self, bus):
        self._bus = bus
        self.stuck = False

    def __getattr__(self, name):
        return getattr(self._bus, name)

    def bucket(self, name):
        return StuckBucket(self._bus.bucket(name), self) if name == "state" else self._bus.bucket(name)


class StuckBucket:
    def __init__(self, bucket, bus):
        self._bucket = bucket
        self._bus = bus

    def __getattr__(self, name):
        return getattr(self._bucket, name)

    async def update(self, *args):
        if self._bus.stuck:
            raise BusUnavailableError("no answer")
        return await self._bucket.update(*args)


class CutBucket:
    def __init__(self, bucket, bus, *, counted):
        self._bucket = bucket
        self._bus = bus
        self._counted = counted

    def __getattr__(self, name):
        self._bus.check()
        return getattr(self._bucket, name)

    async def update(self, *args):
        self._bus.check()
        if self._counted:
            return await self._bus.write(self._bucket.update, *args)
        return await self._bucket.update(*args)
