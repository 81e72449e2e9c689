"""Tasks as jobs of a real Slurm on this machine: what it takes away, and when, and what becomes of the training."""

import contextlib
import re
import subprocess

import pytest
import torch
from helpers.cli import UNICRON
from helpers.slurm import missing, slurm
from helpers.training import difference, plain_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.exhaustive("a job on one node is in each run; what Slurm takes from larger ones takes minutes"),
]

SCRIPT = """
import os, time
import torch
from unicron.train import Session

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
session = Session(seed=3, accumulate_dtype=torch.float64, iterations=int(os.environ["ITERATIONS"]), microbatches=6)
session.protect(model=model, optimizer=optimizer)
for iteration in session.iterations():
    for microbatch in session.microbatches():
        time.sleep(float(os.environ.get("NAP", "0")))
        x = torch.randn(16, 32)
        session.backward((model(x) - x.sum(1, keepdim=True)).square().mean())
    session.step()
    print("iteration", iteration, flush=True)
if session.rank == 0:
    torch.save({"model": model.state_dict()}, os.environ["OUT"])
"""

TASK = """
name: t
min_workers: 1
max_workers: {workers}
command: [python, train.py]
microbatches: 6
iterations: {iterations}
checkpoints: {store}
env: {{ITERATIONS: "{iterations}", OUT: {out}, NAP: "{nap}"}}
"""

QUICK = {"UNICRON_LEAVE_S": "8"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with slurm(tmp_path_factory.mktemp("slurm"), nodes=4) as running:
        yield running


class Submitted:
    """A job of ours, and its folder."""

    def __init__(self, cluster, folder, job):
        self.cluster, self.folder, self.job = cluster, folder, job
        self.root = folder / ".unicron" / "slurm" / job

    @property
    def text(self):
        """What all its jobs have written."""
        return "".join(path.read_text() for path in sorted(self.folder.glob("slurm-*.out")))

    @property
    def iterations(self):
        return [int(number) for number in re.findall(r"iteration (\d+)$", self.text, re.MULTILINE)]

    @property
    def computed(self):
        """The iterations of the worker that has written most, in order."""
        return max(self.iterations, default=-1)

    def until(self, condition, what):
        try:
            self.cluster.until(condition, what, seconds=75)
        except AssertionError:
            with contextlib.suppress(AssertionError):
                print(self.unicron("events")[-6000:])
            print(self.text[-5000:], *(path.read_text()[-600:] for path in self.root.glob("logs/*")))
            raise

    def until_iteration(self, number):
        self.until(lambda: self.computed >= number, f"iteration {number}")

    def until_ended(self):
        self.until(lambda: self.job not in self.cluster.squeue(), "the end")

    def unicron(self, *words):
        """Ask the cluster of this job."""
        url = re.findall(r"the cluster is at (\S+),", self.text)[-1]
        key = self.root / "keys" / "operator" / "operator.nk"
        done = subprocess.run(
            [*UNICRON, *words],
            env=self.cluster.env | {"UNICRON_NATS_URL": url, "UNICRON_NATS_NKEY": str(key), "COLUMNS": "200"},
            capture_output=True, text=True, check=False,
        )
        assert not done.returncode, done.stderr
        return done.stdout


@pytest.fixture
def submit(cluster, tmp_path):
    """Return what submits a task as a job."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "store").mkdir()

    def run(*options, workers=3, iterations=60, nap=0.05, **env):
        task = TASK.format(workers=workers, iterations=iterations, out=tmp_path / "out.pt", nap=nap, store=tmp_path / "store")
        (tmp_path / "task.yaml").write_text(task)
        done = subprocess.run(
            [*UNICRON, "slurm", "submit", *options, "task.yaml"],
            cwd=tmp_path, env=cluster.env | QUICK | env, capture_output=True, text=True, check=False,
        )
        assert not done.returncode, done.stderr
        return Submitted(cluster, tmp_path, done.stdout.split()[-1])

    yield run
    for job in cluster.squeue():
        cluster.try_("scancel", job)
    cluster.until(lambda: not cluster.squeue(), "the end of all jobs", 60)


def check(submitted, tmp_path, iterations):
    """The parameters are those of an undisturbed run."""
    plain = plain_run(tmp_path / "train.py", tmp_path / "plain.pt", ITERATIONS=str(iterations))
    assert difference(torch.load(submitted.folder / "out.pt", weights_only=True), plain) <= 1e-5


def test_a_lost_node_costs_no_iteration_and_a_spare_of_the_job_takes_its_place(cluster, submit, tmp_path):
    job = submit("--nodes=4", iterations=80)
    job.until_iteration(10)
    status = job.unicron("nodes")
    used = next(name for name in ("n2", "n3", "n4") if re.search(rf"{name}\b.*t-", status))
    try:
        cluster.kill(used)
        job.until(lambda: "t is back at 3 workers" in job.text, "a whole task")
        job.until_ended()
        assert cluster.job(job.job)["JobState"] == "COMPLETED", job.text
        assert cluster.job(job.job)["Restarts"] == "0"
        check(job, tmp_path, 80)
    finally:
        cluster.start(used)
        cluster.until(lambda: cluster.states()[used] == "idle", "the node")


def test_a_requeued_job_goes_on_from_the_memory_of_its_nodes(cluster, submit, tmp_path):
    job = submit("--nodes=2", "--requeue", "--nodelist=n1,n2", workers=2, iterations=60)
    job.until_iteration(15)
    cluster.run("scontrol", "requeue", job.job)
    job.until(lambda: cluster.job(job.job)["Restarts"] == "1" and job.text.count("the cluster is at") == 2, "a restart")
    job.until_ended()
    events = (job.root / "nats").exists()
    assert events
    assert cluster.job(job.job)["JobState"] == "COMPLETED", job.text
    print("TEXT", job.text)
    check(job, tmp_path, 60)


def test_an_array_whose_jobs_are_too_short_ends_as_one_run(cluster, submit, tmp_path):
    job = submit("--nodes=2", "--array=1-5%1", "--time=1", workers=2, iterations=400, nap=0.03)
    for number in (1, 2, 3, 4):
        first = f"slurm-{job.job}_{number}.out"
        job.until(lambda first=first: (job.folder / first).exists(), first)
        begun = job.computed
        if number > 1:
            job.until(lambda begun=begun: job.computed >= begun + 10, "ten more iterations")
            cluster.run("scancel", "--batch", "--signal=USR1", f"{job.job}_{number}")
        job.until(lambda first=first: "ends with status 75" in (job.folder / first).read_text(), "an orderly end")
    job.until_ended()
    print("TEXT", job.text)
    check(job, tmp_path, 400)
