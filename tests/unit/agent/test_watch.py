"""Workers whose processes all sleep in the middle of a microbatch."""

import os
import signal
import subprocess
import sys
import time

import pytest
from unicron_agent.activity import asleep
from unicron_agent.stimuli import SendToWorker, TakeStacks, Tick
from unicron_agent.watch import Watch
from unicron_agent.workers import StallLimits, Worker

from unicron.contracts.events import WorkerAsleep, WorkerStalled
from unicron.contracts.tasks import WorkerPhase
from unicron.contracts.worker import Pong, Progress

STEP_S = 0.1


class Node:
    """A node whose workers compute microbatches of one second, until they are said to do something else."""

    def __init__(self, *names, microbatch_s=1.0, watch=None):
        self.watch = watch or Watch("n1", StallLimits())
        self.workers = {name: Worker(worker=name, task="gpt", slot=0, pid=7, ready=True) for name in names}
        self.now, self.used, self.awake, self.looks, self.asked = 100.0, dict.fromkeys(names, 0.0), set(), [], []
        for done in range(4):
            self.now += microbatch_s
            self.progress(*names, done=done)

    def progress(self, *names, done, phase=WorkerPhase.COMPUTE):
        for name in names:
            self.workers[name].note(Progress(iteration=3, phase=phase, done=done), self.now)

    def wait(self, seconds, *, cpu=0.0, early=None):
        """Let time pass in which processes use that share of a core; return what was told, with when."""
        told, end = [], self.now + seconds
        while self.now < end:
            self.now += STEP_S
            late = [name for name, worker in self.workers.items() if worker.is_late(self.now)]
            for name in self.workers:
                self.used[name] += cpu * STEP_S
                self.workers[name].note(Pong(), self.now)
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
    node.workers["x-1"] = Worker(worker="x-1", task="x", slot=2, pid=7)
    node.used["x-1"] = 0.0
    node.progress("gpt-1", done=4, phase=WorkerPhase.REDUCE)
    node.workers["gpt-1"].note(Pong(collectives=["send #1"]), node.now)  # of an earlier look
    assert node.wait(2.9) == []
    assert node.asked == ["gpt-1", "gpt-2"]
    node.workers["gpt-2"].note(Pong(collectives=["none; the last that was done: all_reduce #2"]), node.now)
    node.workers["gpt-1"].note(Pong(collectives=["all_reduce #3"]), node.now)
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
    node.watch.keep([])
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
        seen = asleep(pid)
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
    assert asleep(process.pid) == 0.0
