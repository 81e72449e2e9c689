"""`unicron slurm run` on a Slurm of one node: what it submits, what is refused, and that nobody else sees its keys."""

import stat
import subprocess

import pytest
from helpers.cli import UNICRON, invoke
from helpers.slurm import missing, slurm

from unicron.errors import UnicronError

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]

PROGRAM = """
import os, sys
import torch.distributed as dist

dist.init_process_group("gloo")
print("rank", dist.get_rank(), "of", dist.get_world_size(), "got", sys.argv[1:], flush=True)
dist.destroy_process_group()
sys.exit(os.environ.get("FAILS"))
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with slurm(tmp_path_factory.mktemp("slurm"), nodes=1, more="EnforcePartLimits=ALL") as running:
        yield running


@pytest.fixture
def here(cluster, tmp_path, monkeypatch):
    """Return the folder of a user's shell, which is this process."""
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(PROGRAM)
    return tmp_path


def call(cluster, folder, *words, **env):
    return subprocess.run(
        [*UNICRON, "slurm", *words],
        cwd=folder,
        env=cluster.env | env,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_program_of_torchruns_users_is_run_as_a_job(cluster, tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    submitted = call(cluster, tmp_path, "run", "-N1", "--ntasks-per-node=2", "--", "train.py", "--lr", "0.1", "-h")
    assert submitted.returncode == 0, submitted.stderr
    job = submitted.stdout.split()[-1]
    cluster.until(lambda: job not in cluster.squeue(), "the end of the job")
    text = (tmp_path / f"slurm-{job}.out").read_text()
    assert cluster.job(job)["ExitCode"] == "0:0", text
    for rank in (0, 1):
        assert f"rank {rank} of 2 got ['--lr', '0.1', '-h']" in text
    root = tmp_path / ".unicron" / "slurm" / job
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    seeds = [path.read_text().strip() for path in root.glob("keys/*/*.nk")]
    assert len(seeds) > 6
    shown = text + cluster.run("scontrol", "show", "job", job) + "".join(map(logged, root.glob("logs/*")))
    assert not [seed for seed in seeds if seed in shown]
    same = ["train.py", "--lr", "0.1", "-h"]
    again = call(cluster, tmp_path, "run", "--nproc-per-node=2", "--", *same, **within(job))
    assert again.returncode == 0
    assert "has ended before" in again.stderr
    other = call(cluster, tmp_path, "run", "--dir", str(root), "--", "train.py", **within(job))
    assert other.returncode
    assert f"of job {job} of cluster tests" in other.stderr


def test_what_another_cluster_left_under_this_number_is_not_this_job(cluster, tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    first = call(cluster, tmp_path, "run", "-N1", "--", "train.py", SLURM_CLUSTER_NAME="tests").stdout.split()[-1]
    number = str(int(first) + 1)
    cluster.until(lambda: first not in cluster.squeue(), "the end of the first")
    record = tmp_path / ".unicron" / "slurm" / first / "work.json"
    record.write_text(record.read_text().replace('"tests"', '"alpha"'))
    record.parent.rename(record.parent.with_name(number))  # which has ended with success there
    job = call(cluster, tmp_path, "run", "-N1", "--", "train.py").stdout.split()[-1]
    assert job == number
    cluster.until(lambda: job not in cluster.squeue(), "the end of the job")
    text = (tmp_path / f"slurm-{job}.out").read_text()
    assert "rank 0 of 1 got []" in text
    assert f"slurm/{job} is of job {first} of cluster alpha" in text


def logged(path):
    return path.read_text(errors="replace")


def within(job):
    """Return the environment of a job, without one."""
    return {"SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": "n1", "SLURM_CLUSTER_NAME": "tests"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["run", "--nodes=1"], "write it behind `--`"),
        (["run", "--wrap=ls", "--", "train.py"], "is given after `--`"),
        (["run", "--array=1-3", "--", "train.py"], "--array=1-3%1"),
        (["run", "-p", "nowhere", "--", "train.py"], "name one that `sinfo` lists"),
        (["run", "--nosuch", "--", "train.py"], "`sbatch --help` lists"),
        (["run", "--nodes=7", "--", "train.py"], "ask for"),
        (["submit"], "no task file"),
        (["submit", "nosuch.yaml"], "nosuch.yaml: can't be read"),
        (["submit", "lost.yaml"], "no such folder; make it where all nodes see it"),
    ],
)
def test_what_can_not_be_submitted_is_refused_with_the_cure(cluster, here, words, told):
    (here / "lost.yaml").write_text("name: t\ncommand: [python, train.py]\ncheckpoints: /nowhere/at/all\n")
    with pytest.raises(UnicronError) as refused:
        invoke("slurm", *words)
    assert told in str(refused.value)
    assert cluster.squeue() == []


def test_without_slurm_it_says_so(here, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UnicronError, match=r"no scontrol on the PATH: .* login node"):
        invoke("slurm", "run", "--", "train.py")
