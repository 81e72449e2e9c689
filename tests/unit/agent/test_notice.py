"""Notices that an agent's node is to go."""

import asyncio
import os
import signal

import pytest
from unicron_agent.departure import JOB_END, wait_for_departure

NOW = 1_000.0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
async def test_by_a_signal(number):
    told = asyncio.create_task(wait_for_departure(NOW, 20.0))
    await asyncio.sleep(0)
    os.kill(os.getpid(), number)
    await told


@pytest.mark.parametrize(
    ("end", "waits_s"), [("1020", [0.0]), ("1005", [0.0]), ("1021", [1.0]), ("999", []), ("", []), ("soon", [])]
)
async def test_so_long_before_the_end_of_its_job(monkeypatch, end, waits_s):
    monkeypatch.setenv(JOB_END, end)
    calls, loop = [], asyncio.get_running_loop()
    monkeypatch.setattr(loop, "call_later", lambda *call: calls.append(call))
    told = asyncio.create_task(wait_for_departure(NOW, 20.0))
    await asyncio.sleep(0)
    assert [after_s for after_s, _ in calls] == waits_s
    assert not told.done()
    for _, call in calls:
        call()
        await told
    told.cancel()
