"""Alerts of a node's watchdogs: disks that fill, memory that grows without end, and output that is missing."""

import itertools
import random
import subprocess
import sys

import pytest
from unicron_agent.core import AgentCore
from unicron_agent.settings import AgentSettings
from unicron_agent.stimuli import (
    Adopted,
    MachineMeasured,
    Memory,
    PatternMatched,
    ProcessExited,
    Sampled,
    Store,
    WorkerMessage,
    WorkerProcess,
)
from unicron_agent.watchdogs import probes
from unicron_agent.watchdogs.limits import WatchdogLimits
from unicron_agent.watchdogs.stores import FULL_LOOKS
from unicron_agent.watchdogs.trend import BELIEVED, PARTS, Trend, left_s
from unicron_agent.watchdogs.watchdogs import AGAIN_S, NUMBERS_S
from unicron_agent.workers.output import matches

from unicron.contracts import events
from unicron.contracts import worker as wire
from unicron.contracts.events import Alert, NodeJoined, PatternMissed, WorkerGrows
from unicron.contracts.hardware import Gpu, GpusSampled
from unicron.contracts.tasks import Slot, WorkerPhase
from unicron.contracts.watchdogs import AlertKind, LogPattern
from unicron.errors import InvalidInputError
from unicron.log_patterns import compiled, is_number

GIB = 2**30
WINDOW_S = 900.0


def rate_of(used, window_s=WINDOW_S, last_s=2 * WINDOW_S, step_s=5.0):
    """Return the growth that is seen in what `used` says of each moment."""
    trend, now = Trend(window_s), 0.0
    while now < last_s:
        trend.add(now, used(now))
        now += step_s
    return trend.rate()


def noisy(used, share=0.02):
    source = random.Random(7)
    return lambda now: used(now) * (1 + share * source.random())


def test_what_grows_all_the_time_is_seen_with_its_pace():
    assert rate_of(lambda now: 40e9 + 2e6 * now) == pytest.approx(2e6)
    assert rate_of(noisy(lambda now: 4e9 + 2e6 * now)) == pytest.approx(2e6, rel=0.1)


def test_what_is_given_back_after_each_checkpoint_or_evaluation_still_grows_below():
    assert rate_of(lambda now: 4e9 + 2e6 * now + 1e9 * (now % 70 < 30)) == pytest.approx(2e6, rel=0.1)


@pytest.mark.parametrize(
    "used",
    [
        lambda now: 8e9,
        lambda now: min(8e9, 2e7 * now),
        lambda now: 8e9 * (now > 1000),
        lambda now: 8e9 * (now > 1000) + 4e9 * (now > 1400) + 4e9 * (now > 1790),
        lambda now: 8e9 * (1 - 2 ** (-now / 300)),
        lambda now: 4e9 + 1e9 * (now // 400 % 2),
        lambda now: 4e9 + 2e6 * (now % 600),
        lambda now: 9e9 - 2e6 * now,
        noisy(lambda now: 8e9),
        noisy(lambda now: min(8e9, 2e7 * now)),
    ],
    ids=[
        "steady",
        "loads",
        "one step",
        "steps",
        "a cache",
        "evaluates",
        "gives back",
        "shrinks",
        "noise",
        "loads, noise",
    ],
)
def test_what_loads_and_is_steady_then_or_comes_and_goes_does_not_grow_without_end(used):
    assert rate_of(used) == 0.0


def test_noise_alone_is_no_growth_however_often_it_is_looked_at():
    source, trend, found = random.Random(3), Trend(60.0), 0
    for now in range(20_000):
        trend.add(float(now), source.gauss(1e9, 1e7))
        found += bool(trend.rate())
    assert found == 0


def test_nothing_is_said_before_a_window_was_seen_whole():
    assert rate_of(lambda now: 1e6 * now, last_s=0.9 * WINDOW_S) == 0.0


def test_a_trend_is_believed_for_a_few_times_as_long_as_it_was_seen():
    assert left_s(100.0, [(60.0, 1.0)]) == 100.0
    assert left_s(BELIEVED * 60.0 + 1, [(60.0, 1.0)]) is None
    assert left_s(100.0, [(60.0, 1.0), (600.0, 0.1)]) == 100.0
    assert left_s(0.0, []) is None
    assert PARTS > 2


class Node:
    """An agent's core with workers, which is shown a machine every ten seconds."""

    def __init__(self, *names, patterns=(), limits=WatchdogLimits()):  # noqa: B008 it is frozen
        card = NodeJoined(node="n1", incarnation="", host="h", slots=[Slot(index=slot) for slot in range(4)], pid=1)
        self.core, self.now = AgentCore(card, "b", watchdogs=limits), 0.0
        found = [
            WorkerProcess(worker=name, task="gpt", slot=slot, pid=9, watch_log=list(patterns))
            for slot, name in enumerate(names)
        ]
        self.core.handle(Adopted(found), 0.0)
        for name in names:
            self.say(name, wire.Progress(iteration=1, phase=WorkerPhase.COMPUTE, done=0))

    def say(self, name, message):
        return self.feed(WorkerMessage(name, message))

    def feed(self, stimulus):
        out = self.core.handle(stimulus, self.now)
        return [each for each in out if isinstance(each, Alert | WorkerGrows | PatternMissed)]

    def iterated(self, name, iteration=5):
        fields = {"rank": 0, "world_size": 2, "seconds": 1.0, "loss": 1.0}
        return self.say(name, wire.Iterated(epoch=0, iteration=iteration, **fields))

    def watch(self, seconds, *, disk=None, left=None, used=None, total=1000 * GIB):
        """Let time pass in which `disk`, `left` and what workers use are functions of time; return what was told."""
        out, end = [], self.now + seconds
        while self.now < end:
            self.now += 10.0
            stores = (Store(AlertKind.DISK, "the file system of /r", disk(self.now), total, 0.05),) if disk else ()
            memory = Memory(left(self.now), total) if left else None
            held = {name: each(self.now) for name, each in (used or {}).items()}
            out += [(self.now, each) for each in self.feed(MachineMeasured(stores, memory, held))]
        return out


def test_a_disk_that_fills_is_told_of_a_day_ahead_by_its_trend_and_once_in_a_while():
    node = Node()
    pace = 100 * GIB / 86400
    found = node.watch(23 * 3600, disk=lambda now: int(900 * GIB + pace * now))
    at, alert = found[0]
    assert at == pytest.approx(12 * 3600, rel=0.05), "as soon as its trend was seen"
    assert (alert.kind, alert.node) == (AlertKind.DISK, "n1")
    assert (
        alert.text == "the file system of /r has 50.4 GiB left, 5.0% of it, and at this pace it is full in 12.1 hours"
    )
    times = [at for at, _ in found]
    assert all(later - earlier >= AGAIN_S for earlier, later in itertools.pairwise(times))


def test_a_disk_with_room_for_longer_than_is_asked_for_and_one_that_is_cleared_are_not_told_of():
    assert Node().watch(30 * 3600, disk=lambda now: int(100 * GIB + GIB * now / 3600)) == []
    assert Node().watch(30 * 3600, disk=lambda now: int(500 * GIB + GIB * (now % 1500) / 10)) == []


def test_a_disk_that_is_nearly_full_for_a_minute_is_told_of():
    node = Node()
    assert node.watch(10 * (FULL_LOOKS - 1), disk=lambda now: 960 * GIB) == []
    [(_, alert)] = node.watch(10, disk=lambda now: 960 * GIB)
    assert alert.text == "the file system of /r has 40.0 GiB left, 4.0% of it"
    node = Node()
    assert node.watch(600, disk=lambda now: GIB * (960 if now % 60 else 900)) == [], "not for moments"


def test_the_memory_of_a_gpu_is_told_of_by_what_the_driver_counts():
    node, full = Node(), Gpu(slot=1, memory_used=int(79.5 * GIB), memory_total=80 * GIB)
    said = [node.feed(Sampled((full, Gpu(slot=2, memory_used=7), Gpu(slot=3)))) for _ in range(FULL_LOOKS)]
    assert said[:-1] == [[]] * (FULL_LOOKS - 1)
    [alert] = said[-1]
    assert (alert.kind, alert.text.partition(" has")[0]) == (AlertKind.GPU_MEMORY, "the memory of GPU 1 of n1")
    assert node.core.handle(Sampled((full,)), 0.0) == [GpusSampled(node="n1", gpus=[full])], "once"
    quiet = Node(limits=WatchdogLimits(gpu_free=0.0))
    assert [quiet.feed(Sampled((full,))) for _ in range(9)] == [[]] * 9


def leak(rate, begun=20 * GIB):
    return lambda now: int(begun + rate * now)


def test_a_worker_that_leaks_is_told_of_and_replaced_at_the_end_of_an_iteration_before_its_machine_is_full():
    node, rate = Node("gpt-1", "gpt-2"), 10 * 2**20
    used = {"gpt-1": lambda now: 20 * GIB, "gpt-2": leak(rate)}
    found = node.watch(2400, left=lambda now: int(40 * GIB - rate * now), used=used)
    [(_, alert)] = found
    assert (alert.kind, alert.task) == (AlertKind.MEMORY, "gpt")
    assert alert.text.startswith("the memory of gpt-2 grows by 600 MiB a minute without end: it holds ")
    assert node.iterated("gpt-1") == [], "it does not grow"
    [grows] = node.iterated("gpt-2")
    assert (grows.worker, grows.task, grows.slot, grows.iteration) == ("gpt-2", "gpt", 1, 5)
    assert grows.rate == pytest.approx(rate)
    assert node.iterated("gpt-2") == [], "once is enough for a while"


def test_a_worker_that_leaks_slowly_is_told_of_and_goes_on():
    node, rate = Node("gpt-1"), 2**20
    [(_, alert)] = node.watch(13 * 3600, left=lambda now: int(60 * GIB - rate * now), used={"gpt-1": leak(rate)})
    assert alert.kind is AlertKind.MEMORY
    assert node.iterated("gpt-1") == []


@pytest.mark.parametrize(
    "used",
    [lambda now: int(min(60 * GIB, 0.1 * GIB * now)), lambda now: int(60 * GIB * (1 - 2 ** (-now / 400))), leak(0)],
    ids=["loads", "fills a cache", "is large"],
)
def test_a_worker_that_loads_much_and_is_steady_then_is_no_leak(used):
    node = Node("gpt-1")
    assert node.watch(7200, left=lambda now: 64 * GIB - used(now), used={"gpt-1": used}) == []
    assert node.iterated("gpt-1") == []


def test_before_a_worker_trains_its_memory_counts_for_nothing():
    node = Node()
    node.core.handle(Adopted([WorkerProcess(worker="gpt-1", task="gpt", slot=0, pid=9)]), 0.0)
    assert node.watch(2400, left=lambda now: int(20 * GIB - 2**23 * now), used={"gpt-1": leak(2**23)}) == []


def test_with_0_no_worker_is_replaced():
    node, rate = Node("gpt-1", limits=WatchdogLimits(replace_s=0.0)), 10 * 2**20
    assert len(node.watch(2400, left=lambda now: int(26 * GIB - rate * now), used={"gpt-1": leak(rate)})) == 1
    assert node.iterated("gpt-1") == []


def test_of_several_that_leak_the_fastest_is_replaced_and_the_others_wait_for_what_that_frees():
    node, rate = Node("gpt-1", "gpt-2"), 4 * 2**20
    used = {"gpt-1": leak(rate), "gpt-2": leak(2 * rate)}
    node.watch(2400, left=lambda now: int(40 * GIB - 3 * rate * now), used=used)
    assert node.iterated("gpt-1") == []
    assert len(node.iterated("gpt-2")) == 1
    node.feed(ProcessExited("gpt-2"))
    node.watch(100, left=lambda now: 3 * GIB, used={"gpt-1": leak(rate)})
    assert node.iterated("gpt-1") == []
    node.watch(300, left=lambda now: 3 * GIB, used={"gpt-1": leak(rate)})
    assert len(node.iterated("gpt-1")) == 1


# --- logs


LOSS = LogPattern(pattern=r"loss: (\S+)", within_s=300.0, absent_for_s=60.0)


def test_a_line_that_does_not_come_is_missed_once_and_found_again():
    node = Node("gpt-1", "gpt-2", patterns=[LOSS])
    node.feed(PatternMatched("gpt-2", 0))
    [(at, fact)] = node.watch(600)
    assert (at, fact.pattern, fact.limit_s, fact.first, fact.missing) == (70.0, LOSS.pattern, 60.0, False, True)
    [fact] = node.feed(PatternMatched("gpt-1", 0))
    assert not fact.missing
    assert node.feed(PatternMatched("gpt-1", 0)) == []
    assert len(node.watch(600)) == 1


def test_a_line_that_never_came_is_missed_after_its_first_limit():
    within = LogPattern(pattern="ready", within_s=300.0)
    [(at, fact)] = Node("gpt-1", patterns=[within]).watch(900)
    assert (at, fact.first, fact.limit_s) == (310.0, True, 300.0)
    node = Node("gpt-1", patterns=[within])
    node.feed(PatternMatched("gpt-1", 0))
    assert node.watch(900) == [], "once is enough"


def test_a_task_that_has_gone_is_missed_by_nobody():
    node = Node("gpt-1", patterns=[LOSS])
    node.feed(ProcessExited("gpt-1"))
    assert node.watch(900) == []


def test_a_number_that_is_none_is_told_of_once_in_a_while():
    node = Node("gpt-1", patterns=[LOSS])
    [alert] = node.feed(PatternMatched("gpt-1", 0, "loss: nan"))
    assert (alert.kind, alert.text) == (AlertKind.LOG, "gpt-1 wrote what is no finite number: loss: nan")
    node.now += NUMBERS_S / 2
    assert node.feed(PatternMatched("gpt-1", 0, "loss: nan")) == []
    node.now += NUMBERS_S
    assert len(node.feed(PatternMatched("gpt-1", 0, "loss: nan"))) == 1
    assert node.feed(PatternMatched("gpt-9", 0, "loss: nan")) == [], "it is gone"


def test_lines_are_matched_once_a_look_and_the_first_bad_number_is_shown():
    patterns = [compiled(LOSS.pattern), compiled("evaluated")]
    text = "loss: 3.5\nloss: NaN \nloss: inf\n"
    assert matches("gpt-1", patterns, text) == [PatternMatched("gpt-1", 0, "loss: NaN")]
    assert matches("gpt-1", patterns, "loss: 1,234.5\nevaluated\n") == [
        PatternMatched("gpt-1", 0),
        PatternMatched("gpt-1", 1),
    ]
    assert matches("gpt-1", patterns, "x" * 2000 + "evaluated\n") == [], "the first 1,000 characters of a line"


@pytest.mark.parametrize("text", ["(a|a)*(a*)*b", "(?:.*){200}b"])
def test_a_pattern_that_would_take_for_ever_takes_none(text):
    pattern = compiled(text) if text.startswith("(?") else compiled(text.replace("(", "(?:"))
    assert pattern.search("a" * 1000) is None


def test_numbers():
    assert [is_number(text) for text in ("3", "-3.2e-4", "1,000", "nan", "-inf", "", "x")] == [True] * 3 + [False] * 4


# --- probes


def test_a_file_system_is_measured_once_and_by_its_parent_where_a_folder_is_still_to_come(tmp_path):
    stores = probes.file_systems([tmp_path, tmp_path / "later" / "still"], 0.05)
    assert [(each.unit, each.kind) for each in stores] == [("bytes", AlertKind.DISK), ("inodes", AlertKind.DISK)]
    assert 0 < stores[0].used < stores[0].total
    assert stores[0].least_free * stores[0].total <= probes.MOST_FREE


def test_the_container_counts_where_it_has_less_left_than_the_machine(tmp_path, monkeypatch):
    (tmp_path / "meminfo").write_text("MemTotal:  1048576 kB\nMemAvailable: 524288 kB\n")
    (tmp_path / "cgroup").write_text("0::/job/step\n")
    (tmp_path / "cg" / "job" / "step").mkdir(parents=True)
    for name, most, now in (("job", "max", "7"), ("job/step", str(2**28), str(2**27))):
        (tmp_path / "cg" / name / "memory.max").write_text(most)
        (tmp_path / "cg" / name / "memory.current").write_text(now)
        (tmp_path / "cg" / name / "memory.stat").write_text("anon 7\ninactive_file 4096\nactive_file 4096\n")
    for name, path in (("MEMORY", "meminfo"), ("OWN_CGROUP", "cgroup"), ("CGROUPS", "cg")):
        monkeypatch.setattr(probes, name, tmp_path / path)
    assert probes.memory() == Memory(2**28 - 2**27 + 8192, 2**28)
    (tmp_path / "cg" / "job" / "step" / "memory.max").write_text("max")
    assert probes.memory() == Memory(2**29, 2**30)
    (tmp_path / "meminfo").write_text("")
    assert probes.memory() is None


@pytest.mark.real
def test_what_a_process_holds_counts_with_what_it_has_started():
    command = f"{sys.executable} -c 'x = bytearray(64 << 20); print(1, flush=True); input()'; true"
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(["bash", "-c", command], **streams) as process:
        process.stdout.readline()
        assert probes.held(process.pid) > 64 << 20
    assert probes.held(process.pid) == 0


# --- settings


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"disk_free": "1"}, "UNICRON_DISK_FREE 1: give a share"),
        ({"gpu_free": "nan"}, "UNICRON_GPU_FREE nan"),
        ({"replace_s": "99999"}, "UNICRON_REPLACE_S 99999 is longer than UNICRON_MEMORY_AHEAD_S"),
        ({"ahead_s": "0"}, "UNICRON_AHEAD_S 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(given, says):
    with pytest.raises(InvalidInputError, match=says):
        AgentSettings.parse({"node": "n1", **given})
    assert AgentSettings.parse({"replace_s": "0"}).watchdogs == WatchdogLimits(replace_s=0.0)


def test_the_facts_are_sentences():
    grown = WorkerGrows(
        node="n1", slot=0, task="gpt", worker="gpt-1", epoch=0, iteration=5, used=GIB, left=2 * GIB, rate=2**20
    )
    assert str(grown) == "gpt-1 on n1:0 holds 1.0 GiB and grows by 60 MiB a minute; 2.0 GiB are left there"
    missed = events.PatternMissed(node="n1", task="gpt", pattern="loss", limit_s=60.0)
    assert str(missed) == "nothing that gpt on n1 wrote matches 'loss', for 60 s"
