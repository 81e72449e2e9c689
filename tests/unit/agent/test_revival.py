"""The warm standby's deaths: when it is started again, what is said; no request is lost or carried out twice."""

import asyncio
import contextlib
import itertools
import math
import os
import signal
import sys

import pytest
from helpers.waiting import until
from hypothesis import given
from hypothesis import strategies as st
from unicron_agent.effects import StartStandby
from unicron_agent.stimuli import StandbyEnded, StandbyReady
from unicron_agent.workers.activity import children_of
from unicron_agent.workers.revival import HELPLESS, LIVES_S, LONGEST_S, Revival
from unicron_agent.workers.warm import WarmStandby

from unicron.contracts.events import StandbyDied, StandbyRevived
from unicron.errors import UnicronError

# --- when, in virtual time -------------------------------------------------------------------------------------------


class Story:
    """A standby that is told to start when that is due, and is ready a second later."""

    def __init__(self):
        self.revival, self.now, self.said, self.starts = Revival("n1"), 0.0, [], []
        self.feed(StandbyReady())

    def feed(self, stimulus=None):
        out = self.revival.tick(self.now) if stimulus is None else self.revival.handle(stimulus, self.now)
        self.said += [each for each in out if not isinstance(each, StartStandby)]
        self.starts += [self.now for each in out if isinstance(each, StartStandby)]

    def dies(self, after=0.0, *, ready=True):
        """Let it die so long after it could be ready, and the next one start when it is due."""
        self.wait(after)
        self.feed(StandbyEnded("was ended by SIGKILL"))
        while self.revival.due_at() < math.inf:
            self.wait(self.revival.due_at() - self.now)
        self.now += 1.0
        if ready:
            self.feed(StandbyReady())

    def wait(self, seconds):
        self.now += seconds
        self.feed()


@given(st.lists(st.tuples(st.floats(0.0, 3 * LIVES_S), st.booleans()), min_size=1, max_size=30))
def test_each_death_is_said_and_answered_by_one_start_after_a_wait_that_is_bounded(deaths):
    story = Story()
    for after, ready in deaths:
        story.dies(after, ready=ready)
    died = [each for each in story.said if isinstance(each, StandbyDied)]
    assert len(died) == len(story.starts) == len(deaths)
    assert all(0.0 <= each.wait_s <= LONGEST_S for each in died)
    assert all(each.helpless == (each.deaths >= HELPLESS) for each in died)
    lived = [False] + [ready and after >= LIVES_S for (_, ready), (after, _) in itertools.pairwise(deaths)]
    assert all((each.deaths == 1) for each, alone in zip(died, lived, strict=True) if alone)
    story.wait(LIVES_S)
    assert isinstance(story.said[-1], StandbyRevived) == deaths[-1][1], "it lives, or there is none"


def test_it_is_started_again_at_once_and_then_ever_more_rarely():
    story = Story()
    for _ in range(HELPLESS + 2):
        story.dies(ready=False)
    waits = [each.wait_s for each in story.said]
    assert waits == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, *[LONGEST_S] * 3]
    assert "make memory free there, and see `unicron logs standby --node n1`" in str(story.said[-1])


def test_a_helpless_node_says_that_it_is_well_only_once_it_is_sure():
    story = Story()
    for _ in range(HELPLESS):
        story.dies(ready=False)
    story.feed(StandbyReady())
    story.wait(LIVES_S / 2)
    assert not isinstance(story.said[-1], StandbyRevived)
    story.wait(LIVES_S / 2)
    assert isinstance(story.said[-1], StandbyRevived)


# --- how, on real processes ------------------------------------------------------------------------------------------

STUB = """
import os, signal, sys
from pathlib import Path
from unicron_agent.workers import standby

def once(request, where):
    mark = Path(request["cwd"], where)
    if request["dies"] == where and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)

def fork(request, answers, usual=standby._fork):
    once(request, "before")
    now.append(request)
    usual(request, answers)

def waited(pid, options, usual=os.waitpid):
    once(now[-1], "meanwhile")
    found = usual(pid, options)
    once(now[-1], "behind")
    return found

def run(request):
    os.setpgid(0, 0)
    with open(request["log"], "a") as log:
        log.write(f"{os.getpid()}\\n")
    signal.pause()

def refused():
    raise BlockingIOError(11, "no process more")

now = []
standby._warm_up = lambda: print("an import says something")
standby._modules_needed = lambda request: ()
standby._fork, standby._run_request, os.waitpid = fork, run, waited
"""


class StubbedStandby(WarmStandby):
    """One without torch, that dies where its request says, once."""

    stub = STUB

    async def _spawn(self, log):
        pipe = asyncio.subprocess.PIPE
        command = [sys.executable, "-c", f"{self.stub}\nstandby.main()"]
        return await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=log)


@contextlib.asynccontextmanager
async def living(folder, kind=StubbedStandby):
    """Have a standby that is started again as soon as it ends, and what it reports."""
    standby, reports, jobs = kind(folder / "standby.log"), [], []

    def report(stimulus):
        reports.append(stimulus)
        if isinstance(stimulus, StandbyEnded):
            jobs.append(asyncio.ensure_future(standby.start(report)))

    await standby.start(report)
    try:
        yield standby, reports
    finally:
        await standby.stop()
        for pid in children_of(os.getpid()):
            if os.getpgid(pid) == pid:  # what it has forked
                os.kill(pid, signal.SIGKILL)
                ended(pid)


def ended(pid):
    """Wait for a child; return the signal that has ended it."""
    return os.WTERMSIG(os.waitpid(pid, 0)[1])


def request(folder, dies=""):
    return {"argv": ["x"], "cwd": str(folder), "log": str(folder / "log"), "dies": dies}


async def started(folder, count):
    log = folder / "log"
    lines = await until(
        lambda: log.exists() and (log.read_text().splitlines() or [""])[count - 1 :] and log.read_text()
    )
    return list(map(int, lines.split()))


@pytest.mark.parametrize("dies", ["before", "meanwhile", "behind"])
async def test_wherever_it_dies_a_request_is_carried_out_once_and_its_process_known(dies, tmp_path):
    async with living(tmp_path) as (standby, reports):
        pid = await standby.fork(request(tmp_path, dies))
        assert await started(tmp_path, 1) == [pid]
        second = await standby.fork(request(tmp_path))
        assert await started(tmp_path, 2) == [pid, second]
        os.kill(second, signal.SIGTERM)
        assert ended(second) == signal.SIGTERM, "it is our child, and lived"
    assert reports == [StandbyReady(), StandbyEnded("was ended by SIGKILL"), StandbyReady()]


async def test_a_start_that_nobody_waits_for_any_more_leaves_no_process(tmp_path):
    async with living(tmp_path) as (standby, _):
        await standby.fork(request(tmp_path))
        before = set(children_of(os.getpid()))
        waits = asyncio.ensure_future(standby.fork(request(tmp_path)))
        await asyncio.sleep(0)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        second = await standby.fork(request(tmp_path))
        [unwanted] = set(children_of(os.getpid())) - {*before, second}
        assert ended(unwanted) == signal.SIGKILL


async def test_a_start_that_waits_for_a_standby_ends_with_the_agent(tmp_path):
    standby = StubbedStandby(tmp_path / "standby.log")
    waits = asyncio.ensure_future(standby.fork(request(tmp_path)))
    await asyncio.sleep(0)
    await standby.stop()
    with pytest.raises(UnicronError, match="the agent ends"):
        await waits


class Broken(StubbedStandby):
    """One that can't fork."""

    stub = f"{STUB}\nos.fork = refused"


async def test_where_no_process_more_is_allowed_the_standby_ends_with_that_as_its_reason(tmp_path):
    async with living(tmp_path, Broken) as (standby, reports):
        waits = asyncio.ensure_future(standby.fork(request(tmp_path)))
        await until(lambda: reports[1:])
        waits.cancel()
    assert reports[1] == StandbyEnded(
        'exited with code 1; its last line was "BlockingIOError: [Errno 11] no process more"'
    )
