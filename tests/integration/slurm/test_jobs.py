"""Tasks as jobs of a real Slurm on this machine: what it takes away, and when, and what becomes of the training."""

import contextlib
import os
import re
import shlex
import signal
import subprocess

import pytest
import torch
from helpers.cli import UNICRON
from helpers.slurm import USERS_SIGNAL, missing, slurm
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
        nap = os.environ.get("NAP", "0")
        time.sleep(float(open(nap).read() if os.path.exists(nap) else nap))
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

PREEMPTED = f"""\
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
{USERS_SIGNAL}
PartitionName=low Nodes=n[1-4] PriorityTier=1 GraceTime=60
PartitionName=high Nodes=n[1-4] PriorityTier=9
"""

QUICK = {"UNICRON_LEAVE_S": "8"}


@pytest.fixture(scope="module")
def mails(tmp_path_factory):
    """Return the file with the subjects of all mails of Slurm."""
    return tmp_path_factory.mktemp("mail") / "sent"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, mails):
    program = mails.with_name("mail.sh")
    program.write_text(f'#!/bin/sh\necho "$2" >> {mails}\n')
    program.chmod(0o755)
    more = f"{PREEMPTED}MailProg={program}\n"
    with slurm(tmp_path_factory.mktemp("slurm"), nodes=4, more=more) as running:
        yield running


def iterations_in(text):
    """Return all iterations that workers have written, in order; each writes each that it computes."""
    return [int(number) for number in re.findall(r"iteration (\d+)$", text, re.MULTILINE)]


class Submitted:
    """A job of ours, and its folder."""

    def __init__(self, cluster, folder, job, root):
        self.cluster, self.folder, self.job = cluster, folder, job
        self.root = root or folder / ".unicron" / "slurm" / job

    @property
    def text(self):
        """What all its jobs have written, in the order of their numbers."""
        written = sorted(self.folder.glob("slurm-*.out"), key=lambda path: (len(path.name), path.name))
        return "".join(path.read_text() for path in written)

    @property
    def words(self):
        """The same without its line breaks."""
        return " ".join(self.text.split())

    @property
    def iterations(self):
        return iterations_in(self.text)

    @property
    def computed(self):
        """The last iteration."""
        return max(self.iterations, default=-1)

    def until(self, condition, what):
        try:
            self.cluster.until(condition, what)
        except BaseException as error:  # the run's limit for a test is over
            with contextlib.suppress(AssertionError):
                error.add_note(self.unicron("events")[-4000:])
            error.add_note(f"{self.cluster.job(self.job)}\n{self.text[-3000:]}")
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
            capture_output=True,
            text=True,
            check=False,
        )
        assert not done.returncode, done.stderr
        return done.stdout


@pytest.fixture
def submit(cluster, tmp_path):
    """Return what submits a task as a job."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "store").mkdir()

    def run(*options, workers=3, iterations=60, nap=0.05, **env):
        task = TASK.format(
            workers=workers, iterations=iterations, out=tmp_path / "out.pt", nap=nap, store=tmp_path / "store"
        )
        (tmp_path / "task.yaml").write_text(task)
        done = subprocess.run(
            [*UNICRON, "slurm", "submit", *options, "task.yaml"],
            cwd=tmp_path,
            env=cluster.env | QUICK | env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert not done.returncode, done.stderr
        root = options[1] if options[0] == "--dir" else None
        return Submitted(cluster, tmp_path, done.stdout.split()[-1], root)

    yield run
    for job in cluster.squeue():
        cluster.try_("scancel", job)
    cluster.until(lambda: not cluster.squeue(), "the end of all jobs")


def check(submitted, tmp_path, iterations):
    """The parameters are those of an undisturbed run."""
    plain = plain_run(tmp_path / "train.py", tmp_path / "plain.pt", ITERATIONS=str(iterations))
    assert difference(torch.load(submitted.folder / "out.pt", weights_only=True), plain) <= 1e-5


def test_a_lost_node_costs_no_iteration_and_a_spare_of_the_job_takes_its_place(cluster, submit, tmp_path):
    job = submit("--nodes=4", iterations=80)
    job.until_iteration(10)
    used = next(name for name in ("n2", "n3", "n4") if computes(job, name))
    try:
        cluster.kill(used)
        job.until(lambda: "t is back at 3 workers" in job.words, "a whole task")
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
    for pid in cluster.processes_of("n1", "n2"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # all of the job, as where its first node is lost: nothing is handed over
    cluster.try_("scontrol", "requeue", job.job)
    job.until(lambda: job.text.count("the cluster is at") == 2, "a restart")
    before, after = job.text.rsplit("the cluster is at", 1)
    job.until_ended()
    assert cluster.job(job.job)["JobState"] == "COMPLETED", job.text
    before, after = job.text.rsplit("the cluster is at", 1)
    assert min(iterations_in(after)) >= max(iterations_in(before))  # at most the one that nobody had written yet
    check(job, tmp_path, 60)


def test_a_job_whose_first_node_is_lost_goes_on_elsewhere_from_the_memory_of_the_others(cluster, submit, tmp_path):
    job = submit("--nodes=2", "--requeue", workers=2, iterations=80)
    job.until_iteration(15)
    assert cluster.job(job.job)["BatchHost"] == "n1"
    try:
        cluster.kill("n1")
        job.until(lambda: cluster.job(job.job)["Restarts"] == "1", "a requeue")
        job.until(lambda: job.text.count("the cluster is at") == 2, "a restart")
        job.until_ended()
        assert cluster.job(job.job)["JobState"] == "COMPLETED", job.text
        before, after = job.text.rsplit("the cluster is at", 1)
        assert min(iterations_in(after)) >= max(iterations_in(before)), job.text
        check(job, tmp_path, 80)
    finally:
        cluster.start("n1")
        cluster.until(lambda: cluster.states()["n1"] == "idle", "the node")


def test_an_array_whose_jobs_are_too_short_ends_as_one_run_and_none_of_them_has_failed(
    cluster, submit, mails, tmp_path
):
    pace = tmp_path / "pace"
    pace.write_text("0.3")  # with which the first can't be through at its limit
    mailed = ("--mail-type=ALL,ARRAY_TASKS", "--mail-user=me")
    job = submit("--nodes=2", "--array=1-5%1", "--time=1", *mailed, workers=2, iterations=300, nap=pace)
    for number in (1, 2, 3, 4):
        out = job.folder / f"slurm-{job.job}_{number}.out"
        job.until(out.exists, out.name)
        begun = job.computed
        if number == 1:
            why = "the job ends in"
        else:
            why = "Slurm has sent SIGUSR1"
            job.until(lambda begun=begun: job.computed >= begun + 3, "three more iterations")
            # Slurm says of a member that it can't be altered now, and does it
            cluster.try_("scancel", "--batch", "--signal=USR1", f"{job.job}_{number}")
        job.until(lambda out=out, why=why: f"ends with status 0: {why}" in out.read_text(), "an orderly end")
        if number == 1:  # the others' limits are too far away to come first
            cluster.run("scontrol", "update", f"JobId={job.job}_[2-5]", "TimeLimit=30")
    (tmp_path / "at once").write_text("0")
    (tmp_path / "at once").replace(pace)
    job.until_ended()
    states = [cluster.job(f"{job.job}_{number}") for number in range(1, 6)]
    assert [(each["JobState"], each["ExitCode"]) for each in states] == 5 * [("COMPLETED", "0:0")]
    assert job.text.count(f"t is not done, job {job.job} goes on with it") == 4
    ended = [line for line in mails.read_text().splitlines() if " Ended" in line]
    assert len(ended) == 5
    assert all("COMPLETED, ExitCode 0" in line for line in ended)
    written = re.findall(r"^t:\d: iteration \d+$", job.text, re.MULTILINE)
    assert len(set(written)) == len(written), "no rank has computed any twice"
    assert set(job.iterations) == set(range(300))  # where a node comes late, by the other one alone
    check(job, tmp_path, 300)


def test_what_a_job_could_not_end_and_nobody_takes_up_has_failed_until_the_same_task_is_submitted_again(
    cluster, submit, tmp_path
):
    first = submit("--nodes=1", workers=1, iterations=60)
    first.until_iteration(10)
    cluster.run("scancel", "--batch", "--signal=USR1", first.job)
    first.until_ended()
    assert cluster.job(first.job)["ExitCode"] == "75:0"
    assert "no job waits to go on with it: submit it again" in first.text
    assert "Comment=unicron t: not done" in cluster.run("scontrol", "-o", "show", "job", first.job)
    again = submit("--nodes=1", workers=1, iterations=60)
    again.until_ended()
    assert f"goes on with what job {first.job} has left in {first.root}" in again.text
    assert again.iterations == [*range(60)]
    assert "Comment=unicron t: finished" in cluster.run("scontrol", "-o", "show", "job", again.job)
    check(again, tmp_path, 60)


def test_a_job_of_a_users_script_is_requeued_until_its_task_is_done_and_keeps_its_output(cluster, submit, tmp_path):
    cluster.run("scancel", submit("--nodes=1", "--hold", workers=1, iterations=60).job)  # it has written the task file
    script = f"#!/bin/sh\n#SBATCH --nodes=1\nexec {shlex.join(UNICRON)} slurm submit --until-done task.yaml\n"
    (tmp_path / "job.sh").write_text(script)
    number = cluster.try_("sbatch", "--parsable", "job.sh", cwd=tmp_path, env=QUICK).stdout.strip()
    job = Submitted(cluster, tmp_path, number, tmp_path / ".unicron" / "slurm" / number)
    job.until_iteration(10)
    job.until(lambda: "Comment=unicron t: running" in cluster.run("scontrol", "-o", "show", "job", number), "a comment")
    cluster.run("scancel", "--batch", "--signal=USR1", number)
    job.until_ended()
    state = cluster.job(number)
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "1"), job.text
    assert "Slurm overwrites this output as it requeues the job; what its ranks wrote before follows" in job.text
    assert job.iterations == [*range(60)]


def test_a_job_is_preempted_and_the_next_cancelled_and_another_goes_on(cluster, submit, tmp_path):
    folder = tmp_path / "runs"
    first = submit("--dir", folder, "--nodes=2", "--nodelist=n1,n2", "--partition=low", workers=2, iterations=60)
    first.until_iteration(10)
    other = cluster.run(
        "sbatch", "--parsable", "-p", "high", "-N4", "--exclusive", "--output=/dev/null", "--wrap=true"
    ).strip()
    first.until_ended()
    assert "ends with status 75: Slurm has sent SIGUSR1" in first.text, first.text
    cluster.until(lambda: other not in cluster.squeue(), "the end of the other job")
    second = submit("--dir", folder, "--nodes=2", workers=2, iterations=60)
    second.until_iteration(25)
    cluster.run("scancel", second.job)
    second.until_ended()
    third = submit("--dir", folder, "--nodes=2", workers=2, iterations=60)
    third.until_ended()
    assert cluster.job(third.job)["JobState"] == "COMPLETED", third.text
    assert len(third.iterations) == 2 * 60, third.text
    check(third, tmp_path, 60)


def test_a_node_is_drained_in_slurm_and_another_here(cluster, submit, tmp_path):
    job = submit("--nodes=4", workers=2, iterations=200)
    job.until_iteration(5)
    one, other = [name for name in ("n1", "n2", "n3", "n4") if computes(job, name)]
    try:
        cluster.run("scontrol", "update", f"NodeName={one}", "State=DRAIN", "Reason=bad disk")
        job.until(lambda: f"{one} is drained: it was drained in Slurm: bad disk" in job.words, "its drain")
        job.until(lambda: not computes(job, one), "nobody there")
        job.unicron("drain", other)
        job.until(lambda: cluster.states()[other] in {"drng", "drain"}, "the drain of the other in Slurm")
        assert "unicron drain" in cluster.run("sinfo", "-N", "-n", other, "--noheader", "-o", "%E")
        job.until(lambda: not computes(job, other), "nobody on the other")
        cluster.run("scontrol", "update", f"NodeName={one}", "State=RESUME")
        job.until(lambda: f"{one} is in use again: it was resumed in Slurm" in job.words, "its return")
        job.unicron("drain", "--undo", other)
        job.until(lambda: cluster.states()[other] not in {"drng", "drain"}, "the return of the other in Slurm")
        job.until_ended()
        assert cluster.job(job.job)["JobState"] == "COMPLETED", job.text
        check(job, tmp_path, 200)
    finally:
        for node in (one, other):
            cluster.try_("scontrol", "update", f"NodeName={node}", "State=RESUME")


def test_a_job_does_not_need_the_controller(cluster, submit, tmp_path):
    job = submit("--nodes=2", workers=2, iterations=150, nap=0.1)
    job.until_iteration(3)
    cluster.stop("slurmctld")
    try:
        job.until(lambda: "Slurm does not say when this job ends" in job.words, "a question")
        job.until_iteration(60)
    finally:
        cluster.start("slurmctld")
    job.until_ended()
    assert cluster.job(job.job)["JobState"] == "COMPLETED", job.text
    check(job, tmp_path, 150)


def computes(job, node):
    """Whether a worker of the task is on a node."""
    return any(re.match(rf"\s*{node}\s.*=t:", line) for line in job.unicron("nodes").splitlines())
