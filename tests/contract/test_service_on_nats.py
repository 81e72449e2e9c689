"""The shell around a core on a real server: what only processes, servers that end and real connections show."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import tally
from helpers.shell import OUTCOMES, ask, attempts, exited, feed, let_go, running, service
from helpers.waiting import insist, until

from unicron import codec, subjects
from unicron.clock import SystemClock
from unicron.contracts import queries
from unicron.contracts.events import Alert, FailureDetected
from unicron.service.service import Service

pytestmark = pytest.mark.real


async def first(bus, count, filters=OUTCOMES):
    """Return the first outcomes of all."""
    entries = bus.follow(filters, 0)
    found = [codec.decode_message((await anext(entries)).data) for _ in range(count)]
    await entries.aclose()
    return found


async def assert_once_and_in_order(bus, facts):
    """All that came in had one outcome, and what comes in now has the next."""
    await first(bus, facts)
    await feed(bus, exited(), facts)
    found = await first(bus, facts + 1, subjects.events(FailureDetected))
    assert attempts(found) == list(range(1, facts + 2))
    assert [message.correlation for message in found] == [f"fact-{number}" for number in range(facts + 1)]
    assert len({message.id for message in found}) == facts + 1


@pytest.mark.slow
async def test_outcomes_come_once_and_in_order_while_processes_and_server_are_killed(private_world, private_server):
    bus = await private_world.connect()

    def start():
        return subprocess.Popen([sys.executable, Path(tally.__file__), "--nats-url", private_server.url])

    process = start()
    try:
        for number in range(160):
            await feed(bus, exited(), number)
            if number in {50, 110}:
                process.kill()
                process.wait()
                await let_go(bus)
                process = start()
            if number in {80, 130}:
                private_server.kill()
                private_server.start()
        await assert_once_and_in_order(bus, 160)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait) == 0
        assert await insist(lambda: bus.bucket("lease").get(tally.NAME)) is None, "it gives its lease back"
    finally:
        process.kill()
        process.wait()


async def test_an_outage_that_costs_the_lease_ends_with_the_service_at_work_again(private_world, private_server):
    bus = await private_world.connect()
    own = Service(tally.wiring(), await private_world.connect(), SystemClock(), 1.0)
    async with running(own):
        await feed(bus, exited(), 0)
        await first(bus, 1)
        private_server.kill()
        await until(lambda: not own.token)
        private_server.start()
        await let_go(bus)
        await assert_once_and_in_order(bus, 1)
        assert (await ask(bus, queries.GetStatus())).text == "2 0"


async def test_the_core_is_told_that_the_connection_was_interrupted(private_world, private_server):
    bus = await private_world.connect()
    async with running(service(await private_world.connect())):
        await ask(bus, queries.GetStatus())
        private_server.kill()
        private_server.start()
        [alert] = await first(bus, 1, subjects.events(Alert))
    assert alert.text == "BusReconnected"


async def test_a_cancelled_service_leaves_no_task_behind(world):
    before = asyncio.all_tasks()
    bus = await world.connect()
    async with running(service(bus)):
        await ask(await world.connect(), queries.GetStatus())
    await world.close()
    await until(lambda: asyncio.all_tasks() <= before)


# --- as a process ----------------------------------------------------------------------------------------------------


def test_a_service_without_a_server_says_address_and_cure_and_no_traceback():
    url = "nats://127.0.0.1:1"
    environ = {**os.environ, "UNICRON_NATS_URL": url, "UNICRON_CONNECT_TIMEOUT_S": "0.2"}
    command = [sys.executable, Path(tally.__file__)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"tally: no NATS server answers at {url} within 0.2 s")
    assert "UNICRON_NATS_URL" in line
