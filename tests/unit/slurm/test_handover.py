"""What Slurm is told of a job that ends: a hand-over that somebody takes up is no failure, one that nobody does is."""

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unicron_deploy.slurm import queue
from unicron_deploy.slurm.allocation import Allocation
from unicron_deploy.slurm.comment import Comment, state_of
from unicron_deploy.slurm.handover import Ending
from unicron_deploy.slurm.outcome import FINISHED, GIVEN_UP, UNFINISHED, Outcome, outcome
from unicron_deploy.slurm.ownership import Claim

from unicron.contracts.answers import TaskView
from unicron.contracts.tasks import Member, TaskSpec, TaskState
from unicron.slurm import tools
from unicron.slurm.pace import LONGEST_S, SHARE, Pace

AT = "2026-01-31T12:00:00"
OWN = f"7|7|{AT}|RUNNING|(null)|/home/me|gpt"
MEMBER = f"7|5|{AT}|RUNNING|(null)|/home/me|gpt"


class Slurm:
    """Its commands: what they are asked for, and what they answer."""

    def __init__(self, monkeypatch, *lines):
        self.done, self.lines, self.refuses = [], lines, ""
        monkeypatch.setattr(tools, "ask", lambda *_: "\n".join(self.lines))
        monkeypatch.setattr(tools, "run", self._run)

    def _run(self, words):
        if self.refuses in words[:2] and self.refuses:
            raise tools.SlurmError("scontrol: no")
        self.done.append(words[1:])


@pytest.fixture
def end(tmp_path):
    """Return what ends a job, and what it has said."""
    said = []

    def tell(status=UNFINISHED, *, until_done=False, before=None, family="7", **more):
        allocation = Allocation("c", "7", family, ["n1"], 1, 1, tmp_path, 0)
        comment = Comment("7", said.append)
        comment.see("")
        claim = Claim(tmp_path, before, "", os.open(os.devnull, os.O_RDONLY))
        ended = Outcome(family=family, status=status, reason="the job ends in 35 s", **more)
        return Ending(allocation, claim, "gpt", until_done, comment, said.append).tell(ended), said

    return tell


@pytest.mark.parametrize(
    ("own", "other", "heir"),
    [
        (MEMBER, f"5|5|{AT}|PENDING|(null)|/home/me|gpt", "5"),
        (MEMBER, f"9|9|{AT}|PENDING|afterany:5_*(unfulfilled)|/home/me|gpt", "9"),
        (OWN, f"9|9|{AT}|PENDING|afterany:7(unfulfilled)|/home/me|gpt", "9"),
        (OWN, f"9|9|{AT}|PENDING|afterok:7(unfulfilled)|/home/me|gpt", "9"),
        (OWN, f"9|9|{AT}|PENDING|singleton(unfulfilled)|/home/me|gpt", "9"),
        (OWN, f"9|9|{AT}|PENDING|afterok:7(unfulfilled)|/home/me|eval", ""),
        (OWN, f"9|9|{AT}|PENDING|afterany:7(unfulfilled)|/home/me/other|gpt", ""),
        (OWN, f"9|9|{AT}|PENDING|afterany:77(unfulfilled)|/home/me|gpt", ""),
        (OWN, f"9|9|{AT}|PENDING|afternotok:7(unfulfilled)|/home/me|gpt", ""),
        (OWN, f"9|9|{AT}|PENDING|(null)|/home/me|gpt", ""),
        (OWN, f"9|9|{AT}|RUNNING|singleton(unfulfilled)|/home/me|gpt", ""),
        (MEMBER, f"6|5|{AT}|COMPLETED|(null)|/home/me|gpt", ""),
    ],
)
def test_a_hand_over_fails_only_where_nobody_goes_on(monkeypatch, end, tmp_path, own, other, heir):
    slurm = Slurm(monkeypatch, own, other)
    status, said = end(family=own.split("|")[1])
    assert status == (FINISHED if heir else UNFINISHED)
    assert outcome(tmp_path).heir == heir
    assert outcome(tmp_path).unfinished
    told = f"job {heir} goes on with it" if heir else "submit it again (with --until-done a job requeues"
    assert said[-1].startswith(f"unicron: job 7 ends with status {status}: the job ends in 35 s; gpt is not done")
    assert told in said[-1]
    assert slurm.done[-1][-1].startswith("Comment=unicron gpt: not done")


def test_a_job_is_requeued_until_its_task_is_done(monkeypatch, end, tmp_path):
    slurm = Slurm(monkeypatch, OWN)
    status, said = end(until_done=True, iteration=5)
    assert status == 0
    assert slurm.done[-1] == ["requeue", "7"]
    assert said[-1].endswith("this job is requeued and goes on with it")
    assert outcome(tmp_path).heir == "7"


@pytest.mark.parametrize(
    ("before", "more", "requeued"),
    [
        (None, {}, False),
        (None, {"blind": True}, True),
        (Outcome(family="7", status=UNFINISHED, iteration=5), {"iteration": 5}, False),
        (Outcome(family="7", status=UNFINISHED, iteration=5), {"iteration": 6}, True),
    ],
)
def test_a_job_that_comes_no_further_is_not_requeued_for_ever(monkeypatch, end, before, more, requeued):
    slurm = Slurm(monkeypatch, OWN)
    status, said = end(until_done=True, before=before, **more)
    assert (["requeue", "7"] in slurm.done) == requeued
    assert status == (FINISHED if requeued else UNFINISHED)
    assert any("came no further" in line for line in said) != requeued


def test_a_job_that_lacks_nodes_is_requeued_unless_another_one_waits_to_go_on(monkeypatch, end):
    slurm = Slurm(monkeypatch, OWN)
    status, said = end(lacks_nodes=True, iteration=5)
    assert (status, slurm.done[-1]) == (FINISHED, ["requeue", "7"])
    slurm = Slurm(monkeypatch, MEMBER, f"5|5|{AT}|PENDING|(null)|/home/me|gpt")
    status, said = end(lacks_nodes=True, iteration=5)
    assert (status, ["requeue", "7"] in slurm.done) == (FINISHED, False)
    assert said[-1].endswith("job 5 goes on with it")


@pytest.mark.parametrize(
    ("restarts", "status", "told"),
    [(1, FINISHED, "Slurm has requeued this job, which goes on with it"), (0, UNFINISHED, "submit it again")],
)
def test_a_job_that_a_person_has_requeued_is_not_to_be_submitted_again(monkeypatch, end, restarts, status, told):
    slurm = Slurm(monkeypatch, OWN.replace("RUNNING", "COMPLETING"))
    monkeypatch.setattr(
        tools, "ask", lambda tool, *_: f"JobId=7 Restarts={restarts} X=1" if tool == "scontrol" else slurm.lines[0]
    )
    got, said = end(iteration=5)
    assert got == status
    assert said[-1].endswith(told)


def test_a_job_that_was_cancelled_or_may_not_be_requeued_is_not(monkeypatch, end, tmp_path):
    slurm = Slurm(monkeypatch, OWN.replace("RUNNING", "COMPLETING"))
    assert end(until_done=True, iteration=5)[0] == UNFINISHED
    assert ["requeue", "7"] not in slurm.done
    slurm = Slurm(monkeypatch, OWN)
    slurm.refuses = "requeue"
    status, said = end(until_done=True, iteration=5)
    assert status == UNFINISHED
    assert "unicron: it can't be requeued: scontrol: no" in said
    assert said[-1].startswith("unicron: job 7 ends with status 75")
    assert outcome(tmp_path).heir == ""


@pytest.mark.parametrize(
    ("mode", "configured", "overwrites"), [("a", 0, False), ("", 1, False), ("t", 1, True), ("", 0, True)]
)
def test_whether_slurm_overwrites_what_a_job_wrote_before_it_was_requeued(monkeypatch, mode, configured, overwrites):
    Slurm(monkeypatch, "JobDefaults             = (null)", f"JobFileAppend           = {configured}", "JobRequeue = 1")
    environ = {"SLURM_OPEN_MODE": mode} if mode else {}
    assert queue.overwrites(environ | {"SLURMD_NODENAME": "n1"}) == overwrites
    assert not queue.overwrites(environ)  # a shell of salloc, whose output is a user's


def test_what_has_ended_is_told_without_asking(monkeypatch, end):
    slurm = Slurm(monkeypatch, "no line of a queue")
    assert end(FINISHED)[0] == FINISHED
    assert end(GIVEN_UP, until_done=True)[0] == GIVEN_UP
    assert [words[-1] for words in slurm.done] == [
        "Comment=unicron gpt: finished",
        "Comment=unicron gpt: failed: the job ends in 35 s",
    ]
    status, said = end()  # and where Slurm does not answer, nobody is known to go on
    assert status == UNFINISHED
    assert "Slurm does not say whether a job waits" in said[-2]


def test_a_comment_tells_what_a_task_does_and_is_changed_only_with_it(monkeypatch):
    slurm, said = Slurm(monkeypatch), []
    spec = TaskSpec(name="gpt", command=["x"], max_workers=4)
    comment = Comment("7", said.append)
    comment.say("before it was seen")
    comment.see("")
    waits = TaskView(spec=spec, state=TaskState.WAITING, reason="no node is up")
    members = [Member(worker=f"gpt-{n}", node="n1", slot=n) for n in range(3)]
    for view in (waits, waits, TaskView(spec=spec, state=TaskState.RUNNING, members=members, iteration=1)):
        comment.say(state_of(view))
        comment.see(f"unicron {state_of(view)}")
    comment.say(state_of(TaskView(spec=spec, state=TaskState.RUNNING, members=members, iteration=2)))
    comments = [words[-1] for words in slurm.done]
    assert comments == ["Comment=unicron gpt: waiting: no node is up", "Comment=unicron gpt: running, 3 of 4 workers"]
    comment.see("accounted to project x")
    comment.say("gpt: finished")
    assert len(slurm.done) == 2


def test_a_comment_that_may_not_be_changed_is_told_once(monkeypatch):
    slurm, said = Slurm(monkeypatch), []
    slurm.refuses = "update"
    comment = Comment("7", said.append)
    comment.see("")
    for text in ("a", "b"):
        comment.say(text)
    assert said == ["unicron: job 7 keeps its comment: scontrol: no"]


@given(st.lists(st.none() | st.floats(0, 1000), min_size=1))
def test_slurm_is_asked_for_a_small_share_of_the_time_and_less_while_it_is_away(answers):
    pace, before = Pace(10.0), 10.0
    for took in answers:
        if took is None:
            pace.failed()
            assert pace.pause_s == min(2 * before, LONGEST_S)
        else:
            pace.answered(took)
            assert pace.pause_s >= min(took / SHARE, LONGEST_S)
        before = pace.pause_s
        assert 10.0 <= before <= LONGEST_S
    pace.answered(0.0)
    assert pace.pause_s == 10.0


def test_a_signal_that_comes_again_does_not_end_a_job_that_ends(tmp_path):
    """Slurm is told how it ended, however often scancel repeats itself."""
    program = (
        "import asyncio, os, signal\n"
        "from types import SimpleNamespace\n"
        "from unicron_deploy.slurm import job\n"
        "from unicron_deploy.slurm.allocation import Allocation\n"
        "job.srun = lambda *_: ['cat']\n"  # ends with its input
        "job.LEAVE = ''\n"
        "allocation = Allocation('c', '7', '7', ['n1'], 1, 1, '.', 0)\n"
        "servers = SimpleNamespace(root='.', url='nats://127.0.0.1:9')\n"
        "class Quiet(job.Job):\n"
        "    async def _watch(self): os.kill(os.getpid(), signal.SIGUSR1)\n"
        "    async def _follow_drains(self): pass\n"
        "    def _order(self, step, order): step.stdin.close()\n"
        "async def main():\n"
        "    one = Quiet(allocation, servers, {'n1': 'n1'}, None, None, lambda _: None)\n"
        "    return await one.run(asyncio.Event().wait())\n"
        "ended = asyncio.run(main())\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "print(ended.reason)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "Slurm has sent SIGUSR1\n"), done.stderr
