"""Workers that make no progress: all processes sleep in the middle of a microbatch, or nothing is heard of them."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest
from helpers.waiting import PATIENT_S, block_until
from unicron_agent.effects import SendToWorker, TakeStacks
from unicron_agent.life_signs import LifeSigns, ProcessUse
from unicron_agent.stimuli import Tick
from unicron_agent.workers import stacks
from unicron_agent.workers.activity import cpu_s_if_asleep, is_stopped, use_of
from unicron_agent.workers.stacks import describe_threads, stacks_of
from unicron_agent.workers.watch import Watch
from unicron_agent.workers.workers import LocalWorker, StallLimits

from unicron.contracts.events import WorkerAsleep, WorkerStalled
from unicron.contracts.tasks import WorkerPhase
from unicron.contracts.worker import Iterated, Pong, Progress

STEP_S = 0.1


class Node:
    """A node whose workers compute microbatches of one second, until they are said to do something else."""

    def __init__(self, *names, microbatch_s=1.0, watch=None):
        self.watch = watch or Watch("n1", StallLimits())
        self.workers = {name: LocalWorker(worker=name, task="gpt", slot=0, pid=7, ready=True) for name in names}
        self.now, self.used, self.awake, self.looks, self.asked = 100.0, dict.fromkeys(names, 0.0), set(), [], []
        for done in range(4):
            self.now += microbatch_s
            self.progress(*names, done=done)

    def progress(self, *names, done, phase=WorkerPhase.COMPUTE):
        for name in names:
            self.workers[name].record_message(Progress(iteration=3, phase=phase, done=done), self.now)

    def wait(self, seconds, *, cpu=0.0, early=None):
        """Let time pass in which processes use that share of a core; return what was told, with when."""
        told, end = [], self.now + seconds
        while self.now < end:
            self.now += STEP_S
            late = [name for name, worker in self.workers.items() if worker.is_late(self.now)]
            for name in self.workers:
                self.used[name] += cpu * STEP_S
                self.workers[name].record_message(Pong(), self.now)
            tick = Tick((), {name: self.used[name] for name in late if name not in self.awake})
            out = self.watch.tick(self.workers, tick, self.now)
            told += [(self.now, fact) for fact in out if isinstance(fact, WorkerStalled)]
            asked = [each for each in out if isinstance(each, SendToWorker) and each.message.collectives]
            self.asked += [each.worker for each in asked]
            self.looks += [(self.now, effect.worker) for effect in out if isinstance(effect, TakeStacks)]
            if early is not None:
                early += [(self.now, fact) for fact in out if isinstance(fact, WorkerAsleep)]
        return told


@pytest.mark.parametrize(("microbatch_s", "limit_s"), [(1.0, 3.0), (0.05, 2.0)])
def test_one_that_sleeps_is_told_after_three_microbatches_or_two_seconds_where_those_are_short(microbatch_s, limit_s):
    node = Node("gpt-1", microbatch_s=microbatch_s)
    since = node.now
    [(at, fact)] = node.wait(15.0)
    assert at - since == pytest.approx(limit_s, abs=2 * STEP_S)
    assert (fact.worker, fact.asleep, fact.responsive, fact.limit_s) == ("gpt-1", True, True, pytest.approx(limit_s))


def test_half_way_is_looked_where_it_is_once_an_iteration_and_the_stall_tells_that():
    node = Node("gpt-1")
    worker, since = node.workers["gpt-1"], node.now
    assert node.wait(2.9) == []
    [(at, name)] = node.looks
    assert name == "gpt-1"
    assert at >= since + 1.5
    worker.stacks = ("7 MainThread: load (train.py:3)",)
    [(_, fact)] = node.wait(3.0)
    assert fact.stacks == ["7 MainThread: load (train.py:3)"]
    assert len(node.looks) == 1


def test_half_way_all_of_its_task_are_asked_in_which_collectives_they_are_and_the_stall_tells_that():
    node = Node("gpt-1", "gpt-2")
    node.workers["x-1"] = LocalWorker(worker="x-1", task="x", slot=2, pid=7)
    node.used["x-1"] = 0.0
    node.progress("gpt-1", done=4, phase=WorkerPhase.REDUCE)
    node.workers["gpt-1"].record_message(Pong(collectives=["send #1"]), node.now)  # of an earlier look
    assert node.wait(2.9) == []
    assert node.asked == ["gpt-1", "gpt-2"]
    node.workers["gpt-2"].record_message(Pong(collectives=["none; the last that was done: all_reduce #2"]), node.now)
    node.workers["gpt-1"].record_message(Pong(collectives=["all_reduce #3"]), node.now)
    [(_, fact)] = node.wait(3.0)
    assert fact.worker == "gpt-2"
    assert fact.collectives == ["gpt-1: all_reduce #3", "gpt-2: none; the last that was done: all_reduce #2"]
    facts = [fact for _, fact in node.wait(20.0)]
    assert {fact.worker: fact.collectives for fact in facts}["gpt-1"] == [], "asked anew, and nobody has answered"


def test_that_it_sleeps_is_told_before_others_that_began_a_microbatch_earlier_are_told_to_stall():
    node = Node("gpt-1")
    since, early = node.now, []
    node.wait(2.5, early=early)
    [(at, fact)] = early
    assert 1.5 < at - since < 2.0
    assert (fact.worker, fact.limit_s) == ("gpt-1", pytest.approx(3.0))


def test_it_is_told_again_as_any_other_that_makes_no_progress():
    node = Node("gpt-1")
    assert [fact.asleep for _, fact in node.wait(40.0)] == [True, False]


@pytest.mark.parametrize("how", ["uses the processor", "is awake", "waits for others"])
def test_one_that_does_something_is_given_longer(how):
    node = Node("gpt-1")
    if how == "is awake":
        node.awake.add("gpt-1")
    if how == "waits for others":
        node.progress("gpt-1", done=3, phase=WorkerPhase.REDUCE)
    [(_, fact)] = node.wait(30.0, cpu=0.3 if how == "uses the processor" else 0.0)
    assert (fact.asleep, fact.limit_s) == (False, 20.0)


def node_told(node, **how):
    return [fact.asleep for _, fact in node.wait(15.0, **how)]


def test_answering_its_agent_is_not_doing_something():
    assert node_told(Node("gpt-1"), cpu=0.01) == [True]


def test_nor_is_being_awake_for_a_moment_now_and_then():
    node, told = Node("gpt-1"), []
    for _ in range(10):
        told += node.wait(0.8)
        node.awake.add("gpt-1")
        told += node.wait(0.1)
        node.awake.clear()
    assert [fact.asleep for _, fact in told] == [True]
    assert told[0][1].waited_s < 4.0


def test_several_that_sleep_at_once_wait_for_something_they_share_and_one_beside_others_that_wait_for_it_is_told():
    assert node_told(Node("gpt-1", "gpt-2")) == []
    node = Node("gpt-1", "gpt-2")
    node.progress("gpt-2", done=4, phase=WorkerPhase.REDUCE)
    assert node_told(node) == [True]


def test_a_task_that_has_waited_for_long_once_may_wait_twice_as_long():
    node = Node("gpt-1")
    assert node.wait(2.9) == []  # storage was slow, say
    node.progress("gpt-1", done=4)
    [(_, fact)] = node.wait(15.0)
    assert fact.limit_s == pytest.approx(2 * 1.8, abs=3 * STEP_S)


def test_and_one_that_was_ended_for_it_leaves_more_time_to_the_next():
    node = Node("gpt-1")
    [(_, fact)] = node.wait(4.0)
    del node.workers["gpt-1"]
    node.wait(0.5)
    [(_, later)] = Node("gpt-2", watch=node.watch).wait(15.0)
    assert later.limit_s > 1.5 * fact.limit_s
    node.watch.keep_tasks([])
    [(_, forgotten)] = Node("gpt-3", watch=node.watch).wait(15.0)
    assert forgotten.limit_s == pytest.approx(3.0)


# --- what the kernel tells -------------------------------------------------------------------------------------------


PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}


@pytest.fixture
def start():
    started = []

    def begin(code):
        process = subprocess.Popen([sys.executable, "-c", code], **PIPES, start_new_session=True)
        started.append(process)
        assert process.stdout.readline() == b"now\n"
        return process.pid

    yield begin
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def in_a_row(pid, wanted, count=20):
    """Look again and again until so many looks, one after another, saw what is wanted; return what they saw."""
    found = []
    while len(found) < count:
        seen = cpu_s_if_asleep(pid)
        found = [*found, seen] if wanted(seen) else []
        time.sleep(0.02)
    return found


def test_a_process_that_sleeps_does(start):
    pid = start("import os; print('now', flush=True); os.read(0, 1)")
    found = in_a_row(pid, lambda seen: seen is not None)
    assert found[-1] - found[0] <= 0.01


SPIN = "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (60, 60))\nwhile True: pass"


@pytest.mark.parametrize("where", ["itself", "a thread", "a child", "a child of a thread"])
def test_one_whose_thread_or_child_computes_does_not(start, where):
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SPIN!r}])"
    code = {
        "itself": SPIN,
        "a thread": f"import threading\nthreading.Thread(target=exec, args=({SPIN!r}, {{}}), daemon=True).start()\n"
        "import os; os.read(0, 1)",
        "a child": child,
        "a child of a thread": f"import threading\nthreading.Thread(target=exec, args=({child!r}, {{}})).start()",
    }[where]
    in_a_row(start(f"print('now', flush=True)\n{code}"), lambda seen: seen is None)


def test_one_that_is_gone_sleeps_for_ever():
    process = subprocess.Popen(["true"])
    process.wait()
    assert cpu_s_if_asleep(process.pid) == 0.0


# --- workers that nobody watches, of which nothing is heard -----------------------------------------------------------


LIMIT_S = 20.0


class Unwatched:
    """A node with workers whose processes do what a test says."""

    def __init__(self, *names, spins=False):
        self.watch, self.now = Watch("n1", StallLimits()), 100.0
        fields = {"task": "t", "slot": 0, "pid": 7, "ready": True, "epoch": 0}
        self.workers = {
            name: LocalWorker(worker=name, **fields, life_signs=LifeSigns(LIMIT_S, spins, 100.0)) for name in names
        }
        self.use, self.looks, self.seen = dict.fromkeys(names, ProcessUse()), [], ("7 MainThread: read (train.py:3)",)

    def wait(self, seconds, **does):
        """Let time pass, in each second of which a worker (named by its last digit) uses what `does` says."""
        told = []
        for _ in range(round(seconds)):
            self.now += 1.0
            for name, worker in self.workers.items():
                if change := does.get(f"w{name[-1]}"):
                    self.use[name] = change(self.use[name])
                worker.record_message(Pong(), self.now)
            due = {name: self.use[name] for name, worker in self.workers.items() if worker.may_be_silent(self.now)}
            out = self.watch.tick(self.workers, Tick(used=due), self.now)
            told += [(self.now - 100.0, fact) for fact in out if isinstance(fact, WorkerStalled)]
            for effect in out:
                if isinstance(effect, TakeStacks):
                    self.looks.append(self.now - 100.0)
                    if self.seen is not None:
                        self.workers[effect.worker].record_stacks(self.seen, self.now)
        return told


def works(use):
    return use._replace(cpu_s=use.cpu_s + 0.5)


def watches(use):
    return use._replace(cpu_s=use.cpu_s + 0.02)


def writes(use):
    return use._replace(written=use.written + 1)


def test_what_shows_no_sign_of_life_is_told_again_and_again_with_where_it_is():
    node = Unwatched("t-1")
    told = node.wait(31, w1=watches)
    assert [at for at, _ in told] == [20.0, 25.0, 30.0]
    assert node.looks == [15.0, 20.0, 25.0, 30.0]
    fact = told[0][1]
    assert (fact.silent, fact.responsive, fact.asleep) == (True, True, False)
    assert (fact.waited_s, fact.limit_s) == (20.0, LIMIT_S)
    assert fact.stacks == ["7 MainThread: read (train.py:3)"]


def test_nothing_is_told_before_somebody_has_seen_where_it_is():
    node = Unwatched("t-1")
    node.seen = None
    assert node.wait(40) == []
    assert node.looks == [15.0], "nobody else is sent before that one is back"
    node.workers["t-1"].record_stacks((), node.now)
    assert len(node.wait(5)) == 1
    node.workers["t-1"].record_message(Progress(iteration=0, phase=WorkerPhase.WAITING, done=0), node.now)
    assert node.wait(40) == [], "what was seen before it was heard again tells nothing of where it is now"


@pytest.mark.parametrize("sign", [works, writes, lambda use: use._replace(awake=True)])
def test_signs_of_life(sign):
    assert Unwatched("t-1").wait(100, w1=sign) == []


def test_where_who_waits_spins_only_what_is_written_is_one():
    assert [at for at, _ in Unwatched("t-1", spins=True).wait(20, w1=works)] == [20.0]
    assert Unwatched("t-1", spins=True).wait(100, w1=writes) == []


def test_one_that_stops_working_is_told_when_its_time_is_over():
    node = Unwatched("t-1")
    assert node.wait(60, w1=works) == []
    [(at, _)] = node.wait(23)
    assert 80.0 <= at <= 85.0


def test_what_it_says_is_a_sign_of_life_and_that_it_answers_is_none():
    node = Unwatched("t-1")
    node.wait(18)
    node.workers["t-1"].record_message(Progress(iteration=0, phase=WorkerPhase.WAITING, done=0), node.now)
    assert node.wait(19) == []
    assert len(node.wait(3)) == 1


@pytest.mark.parametrize("state", ["watched", "stopping", "finished", "without a limit"])
def test_nothing_is_told_of_one_whose_loop_is_watched_that_is_through_or_has_no_limit(state):
    node = Unwatched("t-1")
    worker = node.workers["t-1"]
    if state == "watched":
        fields = {"iteration": 3, "epoch": 0, "rank": 0, "world_size": 1, "seconds": 1.0, "loss": 0.0}
        worker.record_message(Iterated(**fields), node.now)
    elif state == "without a limit":
        worker.life_signs.limit_s = 0.0
    else:
        setattr(worker, state, True)
    assert node.wait(200) == []


def test_nothing_is_told_while_another_rank_here_shows_life():
    node = Unwatched("t-1", "t-2")
    assert node.wait(50, w2=writes) == []
    assert {fact.worker for _, fact in node.wait(30)} == {"t-1", "t-2"}


# --- what the kernel tells -------------------------------------------------------------------------------------------

PARENT = """
import os, subprocess, sys
BUSY = "import time; print('x' * 9999, flush=True)\\nwhile time.process_time() < 0.2: pass"
child = subprocess.Popen([sys.executable, "-c", BUSY], stdout=2)
if sys.argv[1] == "waits":
    child.wait()
print("now", flush=True)
os.read(0, 1)
"""


@pytest.mark.parametrize("waits", ["waits", "leaves"])
def test_what_a_process_and_its_children_have_used_and_that_one_is_stopped(waits):
    command = [sys.executable, "-c", PARENT, waits]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, **pipes)
    try:
        assert process.stdout.readline() == b"now\n"
        used = lambda holds: block_until(lambda: holds(use := use_of(process.pid)) and use)  # noqa: E731
        use = used(lambda use: not use.awake and use.written >= 10_000)
        assert use.cpu_s >= 0.1
        assert not use.stopped
        assert not is_stopped(process.pid)
        assert use_of(process.pid).written == use.written
        os.kill(process.pid, signal.SIGSTOP)
        assert not used(lambda use: use.stopped).awake
        assert is_stopped(process.pid)
    finally:
        process.kill()
        process.communicate()
    assert use_of(process.pid) == ProcessUse()


# --- where the threads of real processes are, seen from outside -------------------------------------------------------


SCRIPT = """
import os, sys, threading
def child():
    os.write(1, b"c"); os.read(0, 1)
def other():
    os.write(1, b"o"); os.read(0, 1)
def innermost():
    os.write(1, b"i"); os.read(0, 1)
def outer():
    innermost()
if not os.fork():
    child()
threading.Thread(target=other, name="helper", daemon=True).start()
outer()
"""


@pytest.fixture
def process(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    started = subprocess.Popen([sys.executable, script], **pipes, start_new_session=True)
    assert sorted(started.stdout.read(3)) == sorted(b"cio")
    block_until(lambda: cpu_s_if_asleep(started.pid) is not None)  # all three are about to
    yield started
    os.killpg(started.pid, signal.SIGKILL)
    started.communicate()


@pytest.mark.parametrize("stopped", [False, True])
async def test_threads_of_a_process_and_its_children_are_seen_also_where_it_is_stopped(process, stopped, monkeypatch):
    monkeypatch.setattr(stacks, "TAKES_S", PATIENT_S)  # a look may wait for its turn on a core
    if stopped:
        process.send_signal(signal.SIGSTOP)
    first, *others = await stacks_of(process.pid)
    assert first.startswith(f"{process.pid} MainThread: innermost (train.py:8) < outer (train.py:10) < <module>")
    assert any("helper: other (train.py:6)" in line for line in others)
    assert any("child (train.py:4)" in line and not line.startswith(f"{process.pid} ") for line in others)


async def test_of_a_process_that_is_gone_nothing_is_seen():
    gone = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await gone.wait()
    assert await stacks_of(gone.pid) == ()


FRAME = b'{"name": "f", "filename": null, "line": 1}'
NAMELESS = b'[{"pid": 1, "os_thread_id": 1, "thread_name": null, "frames": [' + FRAME + b"]}]"


@pytest.mark.parametrize("noise", [b"", b"Error: failed", b"{}", b"[1]", b'[{"pid": 1}]', NAMELESS])
def test_what_is_no_stack_is_none(noise):
    assert describe_threads(noise) == []
