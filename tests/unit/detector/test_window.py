"""Slow iterations of a task, and slow workers: the pure window, without faust, and the same on faust's own app."""

import asyncio
import contextlib

import msgspec
import pytest
from helpers.waiting import until
from helpers.worlds import LocalWorld
from unicron_detector import pace, statistics, window
from unicron_detector.pace import NAMED
from unicron_detector.statistics import KEY, Statistics
from unicron_detector.window import RECENT, SERIES, WINDOW, StoredSeries, Windows

from unicron import codec, subjects
from unicron.clock import SystemClock
from unicron.contracts.events import IterationFinished
from unicron.contracts.slowdowns import Computed, ComputeTimed, SlowdownDetected, SlowdownEnded


class Run:
    """A task that finishes iterations, on as many workers, two on a node."""

    def __init__(self, task="gpt", world_size=4, windows=None, places=1):
        self.task, self.world_size, self.places = task, world_size, places
        self.windows = windows or Windows()
        self.iteration = self.epoch = 0
        self.pressure = [0.0] * ((world_size + 1) // 2)
        self.names = [f"{task}-{rank}" for rank in range(world_size)]

    def go(self, seconds, times=1, computing=None):
        """Finish iterations, in which each worker's microbatches take so long; return what was said about them."""
        said = []
        for _ in range(times):
            for node in range(0, self.world_size, 2) if computing else ():
                self.windows.add_timings(self.timed(node, computing))
            at = {"node": "n0", "slot": 0, "task": self.task, "worker": self.names[0], "world_size": self.world_size}
            done = {"epoch": self.epoch, "iteration": self.iteration, "seconds": seconds, "loss": 1.0}
            self.iteration += 1
            said += self.windows.add_iteration(IterationFinished(**at, **done))
        return said

    def timed(self, first, computing):
        ranks = range(first, min(first + 2, self.world_size))
        told = [(self.names[rank], rank, rank % self.places, computing[rank]) for rank in ranks]
        workers = [Computed(worker=name, rank=rank, place=at, seconds=took) for name, rank, at, took in told]
        when = {"epoch": self.epoch, "iteration": self.iteration}
        when["pressure"] = self.pressure[first // 2]
        return ComputeTimed(node=f"n{first // 2}", task=self.task, workers=workers, **when)


@pytest.fixture
def run():
    run = Run()
    assert run.go(1.0, WINDOW) == []
    return run


def kinds(said):
    return [type(each) for each in said]


@pytest.mark.parametrize(
    ("seconds", "times"),
    [
        pytest.param(1.0, 500, id="steady"),
        pytest.param(1.08, 500, id="within the band"),
        pytest.param(0.2, 200, id="faster"),
        pytest.param(0.0, 200, id="of no time"),
        pytest.param(30.0, 1, id="one with a failure in it"),
    ],
)
def test_these_iterations_are_not_slow(run, seconds, times):
    assert run.go(seconds, times) == []
    assert run.go(min(seconds, 1.0) or 1.0, 200) == []


def test_slow_iterations_are_told_once_and_within_ten(run):
    [slow] = run.go(1.5, RECENT)
    assert (slow.task, slow.world_size, slow.workers, slow.computing) == ("gpt", 4, [], 0.0)
    assert slow.usual_s == pytest.approx(1.0)
    assert slow.recent_s > window.BAND * slow.usual_s
    assert run.go(1.5, 50) == []


def test_the_end_of_it_is_told_too(run):
    run.go(1.5, 40)
    [ended] = run.go(1.0, 2 * RECENT)
    assert isinstance(ended, SlowdownEnded)
    assert (ended.reason, ended.usual_s) == ("back in its band", pytest.approx(1.0))


def test_what_is_neither_slow_nor_as_before_changes_nothing(run):
    run.go(1.5, 20)
    assert run.go(1.07, 50) == []
    assert kinds(run.go(1.0, 20)) == [SlowdownEnded]


def test_what_stays_slow_becomes_the_usual(run):
    detected, ended = run.go(1.3, 400)
    assert (type(detected), type(ended)) == (SlowdownDetected, SlowdownEnded)
    assert ended.reason == "100 iterations were like that: it is the usual now"
    assert ended.usual_s == pytest.approx(1.3)
    assert kinds(run.go(1.7, 20)) == [SlowdownDetected]


def test_each_excursion_is_told(run):
    for _ in range(2):
        assert kinds(run.go(1.5, 10)) == [SlowdownDetected]
        assert kinds(run.go(1.0, 200)) == [SlowdownEnded]


def test_a_slowdown_ends_where_the_task_goes_on_with_other_workers(run):
    run.go(1.5, 10)
    other = Run(world_size=3, windows=run.windows)
    other.iteration = run.iteration
    [ended] = other.go(1.4, 10)
    assert (ended.world_size, ended.reason) == (4, "it goes on with 3 workers, not 4")


def test_one_iteration_with_a_failure_in_it_does_not_hide_a_trend(run):
    run.go(30.0)
    run.go(1.0, 20)
    assert len(run.go(1.3, 10)) == 1


def test_where_iteration_times_vary_by_themselves_the_band_is_wider():
    noisy, steady = Run(), Run(task="bert")
    times = [1.0, 1.4, 0.7, 1.2, 0.9, 0.6, 1.5, 0.8, 1.1, 0.8]  # a standard deviation of 0.29
    for step in range(200):
        assert noisy.go(times[step % 10]) == steady.go(1.0) == []
    assert [noisy.go(1.2 * times[step % 10]) for step in range(50)] == [[]] * 50
    assert len(steady.go(1.2, 10)) == 1
    assert len(noisy.go(2.0, 10)) == 1


def test_nothing_is_said_before_there_is_a_past():
    run = Run()
    assert run.go(1.0, RECENT - 1) == []
    assert run.go(5.0, RECENT) == []


def test_world_sizes_are_apart(run):
    other = Run(world_size=2, windows=run.windows)
    other.iteration = run.iteration
    assert other.go(2.0, 100) == []
    assert run.go(1.0, 100) == []
    assert len(other.go(3.0, 20)) == 1


@pytest.mark.parametrize("task", ["bert", "gpt"])
def test_tasks_are_apart_and_one_under_a_name_used_before_starts_afresh(run, task):
    assert Run(task=task, windows=run.windows).go(9.0, 200) == []


def test_what_is_known_survives_a_restart(run):
    run.go(1.5, 20)
    stored = msgspec.msgpack.encode(run.windows.known)
    run.windows = Windows(msgspec.msgpack.decode(stored, type=StoredSeries))
    assert run.go(1.5, 20) == []
    [ended] = run.go(1.0, 20)
    assert ended.usual_s == pytest.approx(1.0)


def test_series_are_bounded():
    windows = Windows()
    for number in range(SERIES + 50):
        Run(task=f"t{number}", windows=windows).go(1.0, 2)
    assert sum(map(len, windows.known.tasks.values())) == SERIES
    assert len(msgspec.msgpack.encode(windows.known)) < 500_000, "one value of a bucket holds it"


# --- who is slow -----------------------------------------------------------------------------------------------------


def test_the_slow_worker_is_named_with_its_rank(run):
    run.go(1.0, 40, computing=[0.1, 0.1, 0.1, 0.1])
    [slow] = run.go(1.5, RECENT, computing=[0.1, 0.1, 0.15, 0.1])
    [worker] = slow.workers
    assert (worker.worker, worker.node, worker.rank) == ("gpt-2", "n1", 2)
    assert 1.3 < worker.factor < 1.55
    assert slow.computing == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("before", "after", "named", "computing"),
    [
        pytest.param([0.1, 0.2, 0.1, 0.1], [0.15, 0.2, 0.1, 0.1], [0], 1.0, id="not who is always slower"),
        pytest.param([0.1] * 4, [0.15] * 4, [], 1.5, id="nobody where all compute slowly"),
        pytest.param([0.1] * 4, [0.1, 0.09, 0.125, 0.112], [], 1.06, id="not who is within what the others vary by"),
    ],
)
def test_only_who_has_changed_alone_is_named(run, before, after, named, computing):
    run.go(1.0, 40, computing=before)
    [slow] = run.go(1.5, RECENT, computing=after)
    assert [each.rank for each in slow.workers] == named
    assert slow.computing == pytest.approx(computing, abs=0.2)


USUAL, SLOW = [0.1] * 4, [0.15] * 4
FIRST_NODE, ONE = [0.15, 0.15, 0.1, 0.1], [0.15, 0.1, 0.1, 0.1]


@pytest.mark.parametrize(
    ("before", "after", "computing", "busy"),
    [
        pytest.param([0, 0], [0.6, 0.6], SLOW, ["n0", "n1"], id="a busy machine"),
        pytest.param([0.7, 0.7], [0.7, 0.7], SLOW, ["n0", "n1"], id="one that always is"),
        pytest.param([0, 0], [0.6, 0.6], USUAL, ["n0", "n1"], id="too busy for what they wait for"),
        pytest.param([0, 0], [0.3, 0], FIRST_NODE, ["n0"], id="one of two"),
        pytest.param([0, 0], [0.6, 0.6], [0.12, 0.1, 0.1, 0.1], ["n0"], id="where one has bad luck"),
        pytest.param([0, 0], [0, 0], SLOW, [], id="none"),
        pytest.param([0.2, 0.2], [0.25, 0.25], SLOW, [], id="as busy as ever"),
        pytest.param([0, 0], [0, 0.6], FIRST_NODE, [], id="another one"),
        pytest.param([0, 0], [0.6, 0.6], ONE, [], id="a slow device on it"),
        pytest.param([0, 0], [0.6, 0.6], FIRST_NODE, [], id="two of them"),
    ],
)
def test_a_busy_machine_is_told_once_and_a_slow_device_each_time(run, before, after, computing, busy):
    run.pressure = before
    run.go(1.0, 40, computing=USUAL)
    told = []
    for _ in range(3):
        run.pressure = after
        told += run.go(1.5, 30, computing=computing)
        run.pressure = before
        told += run.go(1.0, 60, computing=USUAL)
    assert [each.busy for each in told if isinstance(each, SlowdownDetected)] == [busy] * (1 if busy else 3)
    assert kinds(told) == [SlowdownDetected, SlowdownEnded] * (1 if busy else 3)
    assert all(("host busy" in each.text) == bool(busy) for each in told[::2])


def test_a_device_that_gets_slow_while_its_machine_is_busy_is_told(run):
    run.go(1.0, 40, computing=USUAL)
    run.pressure = [0.6, 0.6]
    for told in ([SlowdownDetected], []):
        assert kinds(run.go(1.5, 30, computing=SLOW)) == told
        [slow] = run.go(2.0, 20, computing=[0.15, 0.15, 0.15, 0.3])
        assert ([each.rank for each in slow.workers], slow.busy) == ([3], [])
        assert kinds(run.go(1.0, 60, computing=USUAL)) == [SlowdownEnded]


def test_a_new_worker_is_held_against_those_with_its_place(run):
    run.places = 2
    run.go(1.0, 40, computing=[0.1, 0.5, 0.1, 0.5])
    run.epoch, run.names = 1, [*run.names[:3], "gpt-9"]
    six = Run(world_size=8, windows=run.windows, places=2)
    six.iteration = run.iteration
    six.go(1.0, 40, computing=[0.1, 0.5] * 4)
    six.epoch, six.names[5] = 1, "gpt-77"
    [slow] = six.go(1.5, RECENT, computing=[0.1, 0.5, 0.1, 0.5, 0.1, 0.8, 0.1, 0.5])
    [worker] = slow.workers
    assert (worker.worker, worker.rank) == ("gpt-77", 5)
    assert worker.factor == pytest.approx(1.6)


def test_a_worker_has_a_usual_time_once_it_was_timed_ten_times():
    paces, timed = pace.Paces(), [Computed(worker="gpt-1", rank=0, place=0, seconds=0.1)]
    for _ in range(pace.PAST):
        before = paces.slow("gpt")
        paces.observe(ComputeTimed(node="n1", task="gpt", epoch=0, iteration=0, workers=timed), frozen=False)
    assert (before, paces.slow("gpt")) == ((0.0, []), (1.0, []))


def test_one_that_left_is_not_named(run):
    run.go(1.0, 40, computing=[0.1, 0.1, 0.1, 0.1])
    run.go(1.0, 5, computing=[0.1, 0.1, 0.1, 0.9])
    run.epoch, run.names = 1, ["gpt-0", "gpt-1", "gpt-2", "gpt-9"]
    [slow] = run.go(1.5, RECENT, computing=[0.1, 0.1, 0.1, 0.1])
    assert slow.workers == []


def test_workers_are_bounded(monkeypatch):
    monkeypatch.setattr(pace, "WORKERS", 100)
    windows = Windows()
    for number in range(60):
        Run(task=f"t{number}", windows=windows).go(1.0, 2, computing=[0.1] * 4)
    assert list(windows._paces._tasks) == [f"t{number}" for number in range(35, 60)]


def test_of_thousands_only_the_slowest_are_named():
    run = Run(world_size=200)
    run.go(1.0, 40, computing=[0.1] * 200)
    [slow] = run.go(1.5, RECENT, computing=[0.1] * 120 + [0.2 + 0.001 * rank for rank in range(80)])
    assert [each.rank for each in slow.workers] == list(range(199, 199 - NAMED, -1))


def test_short_iterations_are_told_of_when_agents_have_timed_them():
    run = Run()
    assert run.go(0.05, WINDOW) == []
    out, times = [], 0
    while not out:
        times, out = times + 1, run.go(0.08)
    assert isinstance(out[0], SlowdownDetected)
    assert times == 15  # 1.2 s
    [over] = run.go(0.05, RECENT)
    assert isinstance(over, SlowdownEnded)


def test_what_was_slow_for_a_moment_is_neither_told_nor_ended():
    run = Run()
    assert run.go(0.05, WINDOW) == []
    assert run.go(0.08, 8) + run.go(0.05, WINDOW) == []
    assert run.go(0.08, 8) == []
    run.world_size, run.names = 3, run.names[:3]
    assert run.go(0.05) == []  # nor where it goes on with others


# --- on the real faust app: what a core has believed goes in, facts come out in the journal ---------------------------


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
        if stored and holds(known := msgspec.msgpack.decode(stored.value, type=StoredSeries)):
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
        other = StoredSeries(tasks={"bert": own.tasks["gpt"]})
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
    real, broken = Windows.add_iteration, []

    def poisoned(self, message):
        if message.task == "poison":
            broken.append(message)
            raise RuntimeError("a fault in the statistics")
        return real(self, message)

    monkeypatch.setattr(Windows, "add_iteration", poisoned)
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
