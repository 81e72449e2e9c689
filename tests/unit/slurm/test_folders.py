"""The folders of jobs: what works, what has ended and how, and how the commands of their place reach them."""

import os

import pytest
from helpers.cli import invoke
from msgspec.structs import replace
from unicron_cli import here, watch
from unicron_cli.local import down
from unicron_cli.output import own_key, own_url
from unicron_deploy.slurm import folders, outcome
from unicron_deploy.slurm.folders import URL, job_folders
from unicron_deploy.slurm.outcome import FINISHED, GIVEN_UP, Outcome
from unicron_deploy.slurm.ownership import Owner, claim

from unicron.contracts.tasks import TaskSpec
from unicron.errors import BusUnavailableError, InvalidInputError
from unicron.slurm.shown import JobQueued

SPEC = TaskSpec(name="train", command=["python", "train.py"])
OWN = Owner(cluster="c", family="7", job="7", submitted=100.0, restarts=0, spec=SPEC)
AT = "nats://10.0.0.1:4444"


@pytest.fixture
def base(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(here, "clusters", dict)
    monkeypatch.setattr(here, "left_behind", list)
    for name in [name for name in os.environ if name.startswith(("UNICRON_", "SLURM_"))]:
        monkeypatch.delenv(name)
    return tmp_path / ".unicron" / "slurm"


def begin(base, job, at=AT):
    got = claim(base, replace(OWN, job=job, family=job, spec=replace(SPEC, name=f"t{job}")), set())
    (got.root / URL).write_text(at)
    os.close(got.held)
    os.utime(got.root / "work.json", (int(job), int(job)))
    return got.root


def end(root, status, reason="its program is done"):
    outcome.write(root, Outcome(family="7", status=status, reason=reason))


def test_commands_reach_the_one_job_that_works_here(base):
    assert own_url() == ""
    first = begin(base, "7")
    assert (own_url(), own_key(AT)) == (AT, str((first / "keys/operator/operator.nk").relative_to(base.parent.parent)))
    assert own_key("nats://10.0.0.2:4444") != own_key(AT), "no key is shown to another server"
    second = begin(base, "8", "nats://10.0.0.2:4444")
    assert own_url() == "", "nobody knows which of two is meant"
    end(second, FINISHED)
    assert own_url() == AT


def test_a_job_that_was_requeued_works_again(base):
    root = begin(base, "7")
    end(root, outcome.UNFINISHED)
    [ended] = job_folders(base)
    assert ended.ended is not None
    os.utime(root / "work.json", (2e9, 2e9))  # as it is claimed anew
    [working] = job_folders(base)
    assert (working.ended, working.job, working.what) == (None, "7", "python train.py")


def test_what_has_ended_without_being_done_is_told_where_one_stands(base):
    root = begin(base, "9")
    assert "job: 9 runs 'python train.py' until `scancel 9`" in invoke()
    end(root, GIVEN_UP, "KeyError: 'lr'")
    told = " ".join(invoke().split())
    assert "job: 9, 'python train.py', has ended: \"KeyError: 'lr'\"; its output is slurm-9.out" in told
    assert "/9/nodes/*/logs/t9-*.log" in told
    end(root, FINISHED)
    assert "job:" not in invoke()


def test_a_job_that_slurm_does_not_have_any_more_works_no_longer_though_it_has_not_said_how_it_ended(base, monkeypatch):
    begin(base, "7")
    begin(base, "8", "nats://10.0.0.2:4444")
    states = {"7": "RUNNING", "8": "RUNNING"}
    monkeypatch.setattr(
        folders, "own_jobs", lambda: [JobQueued(job, job, 0.0, state, "", "") for job, state in states.items()]
    )
    assert own_url() == ""
    del states["8"]
    assert own_url() == AT
    told = " ".join(invoke().split())
    assert "job: 7 runs" in told
    assert "job: 8, 'python train.py', has ended: it was killed, or cancelled, before it could say how" in told


class Silent:
    """A client whose nodes do not answer."""

    async def log(self, node, worker, lines):
        raise BusUnavailableError(f"nobody answers on {node}")


async def test_the_log_of_a_lost_node_is_read_where_it_kept_it(base):
    logs = begin(base, "7") / "nodes" / "n2" / "logs"
    logs.mkdir(parents=True)
    (logs / "t7-2.log").write_text("one\ntwo\n")
    assert await watch._log(Silent(), "n2", "t7-2", 1) == ("t7-2", "n2", ["two"])
    with pytest.raises(BusUnavailableError):
        await watch._log(Silent(), "n2", "t7-3", 1)
    with pytest.raises(InvalidInputError, match="use 1 to 64 letters"):
        await watch._log(Silent(), "../n2", "t7-2", 1)


def test_a_jobs_cluster_is_ended_by_slurm(base):
    root = begin(base, "7")
    with pytest.raises(InvalidInputError, match="is of job 7 of Slurm, which ends it: scancel 7"):
        down(root)
