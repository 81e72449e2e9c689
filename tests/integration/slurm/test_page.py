"""What the page on Slurm tells to type is typed, in its order, on a Slurm of four nodes."""

import shlex
import subprocess
import tomllib

import pytest
from helpers import ROOT
from helpers.cli import UNICRON
from helpers.pages import FENCED, typed
from helpers.slurm import missing, slurm
from unicron_provisioner.config import load

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.exhaustive("a program is run as a job in each run; the page takes minutes"),
]

PAGE = ROOT / "docs" / "start" / "slurm.md"

PROGRAM = """
import sys
import torch.distributed as dist

dist.init_process_group("gloo")
print("rank", dist.get_rank(), "of", dist.get_world_size(), sys.argv[1:], flush=True)
dist.destroy_process_group()
"""

SESSION = """
import time
import torch
from unicron.train import Session

model = torch.nn.Linear(4, 1)
session = Session(seed=1, iterations=40, microbatches=4)
session.protect(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
for iteration in session.iterations():
    for _ in session.microbatches():
        time.sleep(0.05)
        session.backward(model(torch.rand(2, 4)).square().mean())
    session.step()
    print("iteration", iteration, flush=True)
"""

TASK = """
name: gpt
max_workers: 3
command: [python, session.py]
microbatches: 4
iterations: 40
checkpoints: {store}
"""


@pytest.fixture
def cluster(tmp_path_factory):
    with slurm(tmp_path_factory.mktemp("slurm"), nodes=4) as running:
        yield running


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "session.py").write_text(SESSION)
    (tmp_path / "store").mkdir()
    (tmp_path / "task.yaml").write_text(TASK.format(store=tmp_path / "store"))
    return tmp_path


def type_in(cluster, folder, words, **env):
    command = [*UNICRON, *words[1:]] if words[0] == "unicron" else words
    done = subprocess.run(command, cwd=folder, env=cluster.env | env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}: {done.stderr}"
    return done.stdout


def ended(cluster, folder, job):
    cluster.until(lambda: not cluster.squeue(), "the end of all jobs")
    text = "".join(path.read_text() for path in sorted(folder.glob(f"slurm-{job}*.out")))
    assert cluster.job(job)["JobState"] == "COMPLETED", text
    return text


def test_the_page_word_for_word(cluster, folder):
    lines = [words for line in typed(PAGE) for words in line.commands()]
    run, submit, here, status, array = lines
    job = type_in(cluster, folder, run).split()[-1]
    assert "rank 1 of 2 ['--lr', '0.1']" in ended(cluster, folder, job)
    job = type_in(cluster, folder, submit).split()[-1]
    out = folder / f"slurm-{job}.out"
    cluster.until(lambda: out.exists() and "iteration 3" in out.read_text(), "iteration 3")
    assert f"job: {job} runs" in type_in(cluster, folder, here)
    assert "gpt" in type_in(cluster, folder, status)
    ended(cluster, folder, job)
    job = type_in(cluster, folder, array).split()[-1]
    text = ended(cluster, folder, job)
    assert text.count("gpt has ended before") == 9, text


def test_a_script_with_torchrun_after_the_change_that_the_page_shows(cluster, folder):
    [change] = [match[3] for match in FENCED.finditer(PAGE.read_text()) if match[2] == "diff"]
    new = [line[1:] for line in change.splitlines() if line[0] in " +" and "gpus" not in line]  # there are none here
    text = "\n".join(new).replace("--nproc-per-node=8", "--nproc-per-node=2").replace("--nodes=4", "--nodes=2")
    (folder / "job.sh").write_text(text.replace("unicron ", f"{shlex.join(UNICRON)} ") + "\n")
    job = cluster.run("sbatch", "--parsable", "--chdir", str(folder), str(folder / "job.sh")).strip()
    assert "rank 3 of 4 ['--lr', '0.1']" in ended(cluster, folder, job)
    assert sum(line[0] == "+" for line in change.splitlines()) == 3


def test_the_pool_of_the_page_can_be_used(tmp_path):
    [text] = [match[3] for match in FENCED.finditer(PAGE.read_text()) if match[2] == "toml"]
    (tmp_path / "keys").mkdir()
    (tmp_path / "pools.toml").write_text(text.replace("/shared/unicron/keys", str(tmp_path / "keys")))
    assert tomllib.loads(text)["pool"]["gpu"]["provider"] == "slurm"
    supply = load(str(tmp_path / "pools.toml"), "nats://127.0.0.1:4222")["gpu"]
    assert type(supply.provider).__name__ == "SlurmProvider"
