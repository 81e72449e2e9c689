"""The statistics on the real faust app: what a core has believed goes in, facts come out in the journal."""

import asyncio
import contextlib

import msgspec
import pytest
from helpers.waiting import until
from helpers.worlds import LocalWorld
from unicron_detector import statistics
from unicron_detector.statistics import KEY, Statistics
from unicron_detector.window import Known, Windows

from unicron import codec, subjects
from unicron.clock import SystemClock
from unicron.contracts.events import IterationFinished
from unicron.contracts.slowdowns import Computed, ComputeTimed, SlowdownDetected, SlowdownEnded


@pytest.fixture
async def bus():
    return await LocalWorld().connect()


class Active:
    """As much of a service as the statistics see."""

    def __init__(self, token=1):
        self.token = token
        self.overhear = None


def finished(iteration, seconds, task="gpt"):
    place = {"source": "n1", "node": "n1", "slot": 0, "task": task, "worker": f"{task}-1"}
    told = {"epoch": 0, "iteration": iteration, "world_size": 2, "seconds": seconds, "loss": 1.0}
    return IterationFinished(id=f"{task}-{iteration}", **place, **told)


def timed(iteration, *seconds, task="gpt"):
    workers = [Computed(worker=f"{task}-{n}", rank=n, place=0, seconds=each) for n, each in enumerate(seconds)]
    return ComputeTimed(node="n1", source="n1", task=task, epoch=0, iteration=iteration, workers=workers)


def get_slow(tell):
    for i in range(60):
        tell(finished(i, 1.0 if i < 40 else 1.5))


async def first(bus, kind):
    return codec.decode_message((await anext(bus.follow(subjects.events(kind), 0))).data)


async def written(bus, holds):
    """Return what is written down as soon as it holds, with its revision."""

    async def found():
        stored = await bus.bucket("state").get(KEY)
        if stored and holds(known := msgspec.msgpack.decode(stored.value, type=Known)):
            return known, stored.revision
        return None

    return await until(found)


@contextlib.asynccontextmanager
async def watching(bus, service):
    """Run statistics; what they are given goes to `service.overhear`."""
    job = asyncio.create_task(Statistics(bus, SystemClock(), service).run())
    await until(lambda: service.overhear)
    try:
        yield service.overhear
    finally:
        job.cancel()
        await asyncio.wait({job})
        assert job.cancelled()


async def test_slow_iterations_are_told_in_the_journal_with_who_is_slow(bus):
    async with watching(bus, Active()) as tell:
        for i in range(60):
            tell(timed(i, 0.1, 0.1 if i < 40 else 0.15))
            tell(finished(i, 1.0 if i < 40 else 1.5))
        slow = await first(bus, SlowdownDetected)
        assert (slow.task, slow.world_size, slow.source) == ("gpt", 2, "detector")
        assert slow.usual_s == pytest.approx(1.0)
        assert [each.worker for each in slow.workers] == ["gpt-1"]
        assert slow.correlation.startswith("gpt-4")  # the iteration that tipped the balance
        for i in range(60, 90):
            tell(finished(i, 1.0))
        assert (await first(bus, SlowdownEnded)).reason == "back in its band"


async def test_what_was_told_is_written_down_at_once_and_survives_the_instance(bus, monkeypatch):
    monkeypatch.setattr(statistics, "SAVE_S", 1000.0)
    async with watching(bus, Active(token=1)) as tell:
        get_slow(tell)
        await first(bus, SlowdownDetected)
        await written(bus, lambda known: "gpt" in known.tasks and known.tasks["gpt"][2].slow)  # and that it was told
    async with watching(bus, Active(token=2)) as tell:
        for i in range(60, 80):
            tell(finished(i, 1.5))  # told already
        for i in range(80, 100):
            tell(finished(i, 1.0))
        ended = await first(bus, SlowdownEnded)
    assert ended.usual_s == pytest.approx(1.0)
    assert await bus.tail() == 2


async def test_what_was_written_down_and_cannot_be_read_is_begun_anew(bus, caplog):
    await bus.bucket("state").update(KEY, msgspec.msgpack.encode({"tasks": {"gpt": {2: {"mean_s": -1.0}}}}), 0)
    async with watching(bus, Active()) as tell:
        get_slow(tell)
        await first(bus, SlowdownDetected)
    assert "can't be used, and begin anew: Expected `float` >= 0.0" in caplog.text


async def test_an_instance_that_was_replaced_writes_over_nothing(bus, monkeypatch):
    monkeypatch.setattr(statistics, "SAVE_S", 0.05)
    async with watching(bus, Active(token=1)) as tell:
        tell(finished(1, 1.0))
        own, revision = await written(bus, lambda known: "gpt" in known.tasks)
        other = Known(tasks={"bert": own.tasks["gpt"]})
        await bus.bucket("state").update(KEY, msgspec.msgpack.encode(other), revision)
        telling = asyncio.create_task(tell_on(tell, 2))
        # it goes on from what the other has written: that was not written over, then or before
        newest, _ = await written(bus, lambda known: "gpt" in known.tasks)
        assert newest.tasks["bert"] == other.tasks["bert"]
        telling.cancel()


async def tell_on(tell, iteration):
    while True:
        tell(finished(iteration, 1.0))
        iteration += 1
        await asyncio.sleep(0.02)


async def test_an_error_in_the_app_is_survived(bus, monkeypatch):
    monkeypatch.setattr(statistics, "RESTART_S", 0.05)
    real, broken = Windows.finished, []

    def poisoned(self, message):
        if message.task == "poison":
            broken.append(message)
            raise RuntimeError("a fault in the statistics")
        return real(self, message)

    monkeypatch.setattr(Windows, "finished", poisoned)
    async with watching(bus, Active()) as tell:
        tell(finished(0, 1.0, task="poison"))
        await until(lambda: broken)
        iteration, found = 0, asyncio.create_task(first(bus, SlowdownDetected))
        while not found.done():  # what waited in the app is lost while it starts again
            tell(finished(iteration, 1.0 if iteration < 100 else 2.0 if iteration < 200 else 4.0))
            iteration += 1
            await asyncio.sleep(0.01)
        assert found.result().task == "gpt"


async def test_it_leaves_nothing_behind(bus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(statistics, "SAVE_S", 0.05)
    async with watching(bus, Active()) as tell:
        tell(finished(0, 1.0))
        await written(bus, lambda known: "gpt" in known.tasks)
    assert list(tmp_path.iterdir()) == []
