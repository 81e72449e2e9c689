"""When an agent is told that its node is to go."""

import asyncio
import os
import signal

import pytest
from helpers.waiting import elapse, in_virtual_time
from unicron_agent.notice import JOB_END, notice

NOW = 1_000.0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
async def test_by_a_signal(number):
    told = asyncio.create_task(notice(NOW, 20.0))
    await asyncio.sleep(0)
    os.kill(os.getpid(), number)
    await told


@pytest.mark.parametrize(
    ("end", "expected"),
    [("1020", True), ("1005", True), ("1021", False), ("999", False), ("", False), ("soon", False)],
)
@in_virtual_time
async def test_so_long_before_the_end_of_its_job(monkeypatch, end, expected):
    monkeypatch.setenv(JOB_END, end)
    told = asyncio.create_task(notice(NOW, 20.0))
    await elapse(0.5)
    assert told.done() is expected
    told.cancel()
