"""The statistics on the real faust app: iterations go in by telemetry, a fact comes out in the journal."""

import asyncio

import pytest
from unicron_detector import statistics
from unicron_detector.statistics import Statistics
from unicron_detector.window import Windows

from unicron import codec, subjects
from unicron.clock import SystemClock
from unicron.contracts.events import IterationFinished, IterationsSlow

WAIT_S = 20.0


def finished(iteration, seconds, task="gpt"):
    return IterationFinished(
        id=f"{task}-{iteration}",
        source="n1",
        node="n1",
        slot=0,
        task=task,
        worker="w",
        epoch=0,
        iteration=iteration,
        world_size=2,
        seconds=seconds,
        loss=1.0,
    )


async def tell(bus, *messages):
    for message in messages:
        await bus.tell(subjects.of(message), codec.encode(message))
    await bus.flush()


async def first_slow(bus):
    return codec.decode_message((await anext(bus.follow(subjects.events(IterationsSlow), 0))).data)


@pytest.fixture
async def watched(bus):
    """A bus with running statistics that hear what is told on it."""
    windows = Windows()
    watching = Statistics(bus, SystemClock())
    watching._windows = windows
    job = asyncio.create_task(watching.run())
    probe = 0
    async with asyncio.timeout(WAIT_S):
        while not windows._series:  # until it has subscribed
            await tell(bus, finished(0, 1.0, task=f"probe{probe}"))
            probe += 1
            await asyncio.sleep(0.02)
    yield bus
    job.cancel()
    await asyncio.wait({job}, timeout=WAIT_S)
    assert job.cancelled()


async def test_slow_iterations_are_told_in_the_journal(watched):
    await tell(watched, *(finished(i, 1.0) for i in range(40)), *(finished(i, 1.5) for i in range(40, 60)))
    async with asyncio.timeout(WAIT_S):
        slow = await first_slow(watched)
    assert (slow.task, slow.world_size, slow.source) == ("gpt", 2, "detector")
    assert slow.mean_s == pytest.approx(1.0)
    assert slow.correlation.startswith("gpt-4")  # the iteration that tipped the balance


async def test_two_instances_tell_it_once(watched):
    other = Statistics(watched, SystemClock())
    job = asyncio.create_task(other.run())
    try:
        async with asyncio.timeout(WAIT_S):
            probe = 0
            while not other._windows._series:
                await tell(watched, finished(0, 1.0, task=f"second{probe}"))
                probe += 1
                await asyncio.sleep(0.02)
        await tell(watched, *(finished(i, 1.0) for i in range(40)), *(finished(i, 1.5) for i in range(40, 60)))
        async with asyncio.timeout(WAIT_S):
            while not any(series.out for series in other._windows._series.values()):
                await asyncio.sleep(0.02)
            await first_slow(watched)
        await asyncio.sleep(0.2)
        assert await watched.tail() == 1
    finally:
        job.cancel()
        await asyncio.wait({job})


async def test_what_is_no_iteration_does_no_harm(watched):
    subject = subjects.of(finished(1, 1.0))
    await watched.tell(subject, b"\xc1 no msgpack")
    await watched.tell(subject, codec.encode(finished(1, 1.0, task="another")))
    await tell(watched, *(finished(i, 1.0) for i in range(40)), *(finished(i, 1.5) for i in range(40, 60)))
    async with asyncio.timeout(WAIT_S):
        assert (await first_slow(watched)).task == "gpt"


async def test_an_error_in_the_app_is_survived(watched, monkeypatch):
    monkeypatch.setattr(statistics, "RESTART_S", 0.05)
    real, broken = Windows.observe, []

    def observe(self, message):
        if message.task == "poison":
            broken.append(message)
            raise RuntimeError("a fault in the statistics")
        return real(self, message)

    monkeypatch.setattr(Windows, "observe", observe)
    await tell(watched, finished(0, 1.0, task="poison"))
    async with asyncio.timeout(WAIT_S):
        while not broken:
            await asyncio.sleep(0.02)
    iteration = 0
    async with asyncio.timeout(WAIT_S):
        found = asyncio.create_task(first_slow(watched))
        while not found.done():  # telemetry may be lost while the app starts again
            seconds = 1.0 if iteration < 100 else 2.0 if iteration < 200 else 4.0
            await tell(watched, finished(iteration, seconds))
            iteration += 1
            await asyncio.sleep(0.01)
    assert found.result().task == "gpt"


async def test_it_leaves_nothing_behind(watched, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = asyncio.create_task(Statistics(watched, SystemClock()).run())
    await asyncio.sleep(0.3)
    job.cancel()
    await asyncio.wait({job})
    assert list(tmp_path.iterdir()) == []
