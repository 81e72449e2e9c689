"""When an agent is told that its node is to go."""

import asyncio
import os
import signal

import pytest
from unicron_agent.notice import JOB_END, notice

NOW = 1_000.0


async def told(within_s=0.2, leave_s=20.0):
    try:
        await asyncio.wait_for(notice(NOW, leave_s), within_s)
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
async def test_by_a_signal(number):
    asyncio.get_running_loop().call_later(0.02, os.kill, os.getpid(), number)
    assert await told(within_s=5.0)


@pytest.mark.parametrize(
    ("end", "expected"),
    [("1020", True), ("1005", True), ("1021", False), ("999", False), ("", False), ("soon", False)],
)
async def test_so_long_before_the_end_of_its_job(monkeypatch, end, expected):
    monkeypatch.setenv(JOB_END, end)
    assert await told() is expected
