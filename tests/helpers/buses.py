"""Shared steps of the tests of both buses."""

import asyncio
import contextlib

from helpers.waiting import insist, until
from unicron import codec, subjects

ALL = ["unicron.v1.evt.>", "unicron.v1.cmd.>"]

PROBE = "probe.of.the.tests"


async def take(entries, count):
    """Return the next `count` items, or fewer where they end."""
    taken = []
    async with contextlib.aclosing(entries):
        async for entry in entries:
            taken.append(entry)
            if len(taken) == count:
                break
    return taken


async def heard(bus, filters):
    """Return what is heard on these subjects from now on: by then the server knows that we listen."""
    items = bus.receive_telemetry([*filters, PROBE])
    first = asyncio.ensure_future(anext(items))

    async def probed():
        await bus.publish_telemetry(PROBE, b"")
        await bus.flush()
        return first.done()

    await until(probed)
    return (item async for item in items if item.subject != PROBE)


async def say(bus, fact):
    """Put a fact into the journal, under its own id."""
    await insist(lambda: bus.append(subjects.for_message(fact), codec.encode(fact), fact.id))


async def write(bus, count, prefix="m", subject="unicron.v1.evt.n1.T.k"):
    for number in range(count):
        data = f"{prefix}{number}"
        await insist(lambda data=data: bus.append(subject, data.encode(), data))
