"""Workers that nobody watches, of which nothing is heard."""

import os
import signal
import subprocess
import sys

import pytest
from helpers.waiting import block_until
from unicron_agent.activity import is_stopped, use_of
from unicron_agent.silence import Silence, Use
from unicron_agent.stimuli import TakeStacks, Tick
from unicron_agent.watch import Watch
from unicron_agent.workers import StallLimits, Worker

from unicron.contracts.events import WorkerStalled
from unicron.contracts.tasks import WorkerPhase
from unicron.contracts.worker import Iterated, Pong, Progress

LIMIT_S = 20.0


class Node:
    """A node with workers whose processes do what a test says."""

    def __init__(self, *names, spins=False):
        self.watch, self.now = Watch("n1", StallLimits()), 100.0
        fields = {"task": "t", "slot": 0, "pid": 7, "ready": True, "epoch": 0}
        self.workers = {name: Worker(worker=name, **fields, silence=Silence(LIMIT_S, spins, 100.0)) for name in names}
        self.use, self.looks, self.seen = dict.fromkeys(names, Use()), [], ("7 MainThread: read (train.py:3)",)

    def wait(self, seconds, **does):
        """Let time pass, in each second of which a worker (named by its last digit) uses what `does` says."""
        told = []
        for _ in range(round(seconds)):
            self.now += 1.0
            for name, worker in self.workers.items():
                if change := does.get(f"w{name[-1]}"):
                    self.use[name] = change(self.use[name])
                worker.note(Pong(), self.now)
            due = {name: self.use[name] for name, worker in self.workers.items() if worker.may_be_silent(self.now)}
            out = self.watch.tick(self.workers, Tick(used=due), self.now)
            told += [(self.now - 100.0, fact) for fact in out if isinstance(fact, WorkerStalled)]
            for effect in out:
                if isinstance(effect, TakeStacks):
                    self.looks.append(self.now - 100.0)
                    if self.seen is not None:
                        self.workers[effect.worker].saw(self.seen, self.now)
        return told


def works(use):
    return use._replace(cpu_s=use.cpu_s + 0.5)


def watches(use):
    return use._replace(cpu_s=use.cpu_s + 0.02)


def writes(use):
    return use._replace(written=use.written + 1)


def test_what_shows_no_sign_of_life_is_told_again_and_again_with_where_it_is():
    node = Node("t-1")
    told = node.wait(31, w1=watches)
    assert [at for at, _ in told] == [20.0, 25.0, 30.0]
    assert node.looks == [15.0, 20.0, 25.0, 30.0]
    fact = told[0][1]
    assert (fact.silent, fact.responsive, fact.asleep) == (True, True, False)
    assert (fact.waited_s, fact.limit_s) == (20.0, LIMIT_S)
    assert fact.stacks == ["7 MainThread: read (train.py:3)"]


def test_nothing_is_told_before_somebody_has_seen_where_it_is():
    node = Node("t-1")
    node.seen = None
    assert node.wait(40) == []
    assert node.looks == [15.0], "nobody else is sent before that one is back"
    node.workers["t-1"].saw((), node.now)
    assert len(node.wait(5)) == 1
    node.workers["t-1"].note(Progress(iteration=0, phase=WorkerPhase.WAITING, done=0), node.now)
    assert node.wait(40) == [], "what was seen before it was heard again tells nothing of where it is now"


@pytest.mark.parametrize("sign", [works, writes, lambda use: use._replace(awake=True)])
def test_signs_of_life(sign):
    assert Node("t-1").wait(100, w1=sign) == []


def test_where_who_waits_spins_only_what_is_written_is_one():
    assert [at for at, _ in Node("t-1", spins=True).wait(20, w1=works)] == [20.0]
    assert Node("t-1", spins=True).wait(100, w1=writes) == []


def test_one_that_stops_working_is_told_when_its_time_is_over():
    node = Node("t-1")
    assert node.wait(60, w1=works) == []
    [(at, _)] = node.wait(23)
    assert 80.0 <= at <= 85.0


def test_what_it_says_is_a_sign_of_life_and_that_it_answers_is_none():
    node = Node("t-1")
    node.wait(18)
    node.workers["t-1"].note(Progress(iteration=0, phase=WorkerPhase.WAITING, done=0), node.now)
    assert node.wait(19) == []
    assert len(node.wait(3)) == 1


@pytest.mark.parametrize("state", ["watched", "stopping", "finished", "without a limit"])
def test_nothing_is_told_of_one_whose_loop_is_watched_that_is_through_or_has_no_limit(state):
    node = Node("t-1")
    worker = node.workers["t-1"]
    if state == "watched":
        fields = {"iteration": 3, "epoch": 0, "rank": 0, "world_size": 1, "seconds": 1.0, "loss": 0.0}
        worker.note(Iterated(**fields), node.now)
    elif state == "without a limit":
        worker.silence.limit_s = 0.0
    else:
        setattr(worker, state, True)
    assert node.wait(200) == []


def test_nothing_is_told_while_another_rank_here_shows_life():
    node = Node("t-1", "t-2")
    assert node.wait(50, w2=writes) == []
    assert {fact.worker for _, fact in node.wait(30)} == {"t-1", "t-2"}


# --- what the kernel tells -------------------------------------------------------------------------------------------

PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "print('x' * 9999, flush=True); sum(range(10**7))"], stdout=2)
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
    assert use_of(process.pid) == Use()
