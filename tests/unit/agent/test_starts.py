"""Starts of workers' processes: each ends with one report, whenever it is called off."""

import asyncio
import signal

import pytest
from helpers.accounts import start
from unicron_agent.stimuli import ProcessExited, ProcessStarted
from unicron_agent.workers.starts import Starts

KILLED = ProcessExited("gpt-1", signal=signal.SIGKILL)


@pytest.mark.parametrize(("steps", "outcome"), [(0, KILLED), (1, KILLED), (9, ProcessStarted("gpt-1", 7))])
async def test_a_start_that_is_called_off_after_some_steps_ends_with_one_report(steps, outcome):
    async def wait_for_the_standby(command):
        for _ in range(4):
            await asyncio.sleep(0)
        return ProcessStarted(command.worker, 7)

    reports = []
    starts = Starts(wait_for_the_standby, reports.append)
    starts.begin(start("gpt-1", "n1", 0))
    for _ in range(steps):
        await asyncio.sleep(0)
    starts.call_off("gpt-1")
    for _ in range(9):
        await asyncio.sleep(0)
    assert reports == [outcome]


async def test_a_slot_is_free_for_the_next_start_of_the_same_name():
    async def fail(command):
        return ProcessExited(command.worker, 127)

    reports = []
    starts = Starts(fail, reports.append)
    for _ in range(2):
        starts.begin(start("gpt-1", "n1", 0))
        for _ in range(3):
            await asyncio.sleep(0)
    assert reports == [ProcessExited("gpt-1", 127)] * 2
