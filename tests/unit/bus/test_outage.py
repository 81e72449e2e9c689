"""A bus that is away for long fills no log: each process says once what is wrong, however often it tries again."""

import asyncio
import logging

import nats.errors
import pytest

from unicron import aio
from unicron.bus import nats as bus_on_nats
from unicron.bus.nats import NatsBus
from unicron.errors import BusUnavailableError

TRIES = 20


@pytest.fixture
def lines(caplog, monkeypatch):
    """Return what was logged so far, as it is by default; nobody pauses between two attempts."""
    monkeypatch.setattr(bus_on_nats, "RECONNECT_S", 0.0)
    monkeypatch.setattr(aio, "RETRY_S", 0.0)
    caplog.set_level(logging.INFO)
    return lambda: [record.getMessage() for record in caplog.records]


async def test_a_reader_says_once_that_the_journal_is_out_of_reach(lines, monkeypatch):
    bus, tried = NatsBus(), asyncio.Event()
    attempts = iter(range(TRIES))
    await bus._on_disconnected()

    async def call(request, *_):
        request.close()
        if next(attempts, None) is None:
            tried.set()
        raise BusUnavailableError("it is away")

    monkeypatch.setattr(bus, "_call", call)
    reading = asyncio.ensure_future(anext(bus.follow(["unicron.v1.evt.>"], 0)))
    await tried.wait()
    reading.cancel()
    assert lines() == [": the connection to NATS is down", ": the journal is out of reach: it is away"]


async def test_whoever_insists_says_so_once(lines):
    answers = iter([BusUnavailableError("it is away")] * TRIES)

    async def call():
        if error := next(answers, None):
            raise error
        return "there"

    assert await aio.retry_until_available(call, "asking") == "there"
    assert lines() == ["asking, again and again until the bus answers: it is away"]


async def test_what_the_server_says_again_at_each_attempt_is_said_once(lines):
    bus = NatsBus()
    for _ in range(TRIES):
        await bus._on_error(nats.errors.Error("nats: 'Authorization Violation'"))
        await bus._on_error(ConnectionRefusedError("nobody listens"))
    assert lines() == [": NATS says: nats: 'Authorization Violation'"]
