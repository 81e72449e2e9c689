"""`unicron run`: what torchrun's users run, healed on this machine."""

import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest
from helpers import ROOT
from helpers.cli import CLEAN, UNICRON, call
from helpers.pages import FENCED, typed
from helpers.waiting import block_until
from typer.testing import CliRunner
from unicron_cli.main import app
from unicron_cli.run import spec_of, take_folder, worded

from unicron.checks import task_problems
from unicron.contracts.tasks import UNCOUNTED, Healing
from unicron.errors import InvalidInputError

DOCS = ROOT / "docs"

SCRIPT = """
import os, secrets, sys
import torch
import torch.distributed as dist
import pynvml

assert (secrets.OWN, pynvml.STUB) == (1, 2), "what is in the script's folder, and on its path"
dist.init_process_group("gloo")
print("rank", dist.get_rank(), "of", dist.get_world_size(), "got", sys.argv[1:], flush=True)
total = torch.ones(1)
dist.all_reduce(total)
if dist.get_rank() == 1 and not os.path.exists("once"):
    open("once", "w").close()
    raise ValueError("only once")
dist.barrier()
open(os.environ["UNICRON_CHECKPOINT_DIR"] + f"/{dist.get_rank()}.pt", "w").close()  # no script makes that folder
print("total", int(total), os.environ.get("UNICRON_CHECKPOINT_DIR"), flush=True)
dist.destroy_process_group()
"""


def run(folder, *words, **more):
    return call([*UNICRON, "run", *words], cwd=folder, **more)


def test_a_script_with_the_options_of_torchrun_is_healed(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "secrets.py").write_text("OWN = 1")
    (tmp_path / "stubs").mkdir()
    (tmp_path / "stubs" / "pynvml.py").write_text("STUB = 2")
    options = ["--standalone", "--nnodes", "1", "--nproc_per_node", "2", "--checkpoints", "own", "--silence", "90"]
    path = {"PYTHONPATH": str(tmp_path / "stubs")}
    ended = run(tmp_path, *options, "train.py", "--lr", "3", "--help", environment=CLEAN | path)
    assert ended.returncode == 0, ended.stderr
    assert "train:0: rank 0 of 2 got ['--lr', '3', '--help']" in ended.stdout
    assert ended.stdout.count(f"total 2 {tmp_path / 'own' / 'train.own'}") == 2
    assert "ValueError: only once" in ended.stderr
    assert "train is back at 2 workers" in ended.stderr
    [_, place] = next(line for line in ended.stderr.splitlines() if "logs are in" in line).split("logs are in ")
    assert not Path(place.split()[0]).exists()


PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}

LATER = """
import os, time
import torch
from unicron.train import Session

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = Session(seed=0, iterations=3, microbatches=2)
session.protect(model=model, optimizer=optimizer)
for iteration in session.iterations():
    for microbatch in session.microbatches():
        session.backward(model(torch.ones(1, 4)).sum())
    session.step()
if session.rank == 0:
    while not os.path.exists("go"):  # as if it were long at it
        time.sleep(0.05)
    torch.save(model.state_dict(), "model.pt")
    print("written", flush=True)
"""


@pytest.mark.exhaustive("tests/unit/cli/test_ranks.py has what decides that a run is over")
def test_what_a_script_does_behind_its_loop_is_waited_for(tmp_path):
    (tmp_path / "train.py").write_text(LATER)
    task = "name: t\nmin_workers: 1\nmax_workers: 2\ncommand: [python, train.py]\nmicrobatches: 2\niterations: 3\n"
    (tmp_path / "task.yaml").write_text(task)
    words = ["run", "--dir", "u", "--nproc-per-node", "2", "--task", "task.yaml", "train.py"]
    with subprocess.Popen([*UNICRON, *words], cwd=tmp_path, env=CLEAN, text=True, **PIPES) as running:
        at = next(line for line in running.stderr if "the cluster is at" in line).split("at ")[-1].split(",")[0]
        there = CLEAN | {"UNICRON_NATS_URL": at, "UNICRON_NATS_NKEY": str(tmp_path / "u/keys/operator/operator.nk")}
        block_until(lambda: "finished" in call([*UNICRON, "status"], there).stdout)
        (tmp_path / "go").touch()
        out, _ = running.communicate()
    assert running.returncode == 0
    assert "written" in out
    assert (tmp_path / "model.pt").stat().st_size > 0


IN_PLACE = """
import os, signal
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
print("begins", dist.get_rank(), "of", os.environ["GROUP_WORLD_SIZE"], flush=True)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(9):
    if step == 5 and dist.get_rank() == 1 and not os.path.exists("once"):
        open("once", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("ends", step, flush=True)
"""


@pytest.mark.exhaustive("healing in place is shown without the command, and the command by restarts")
def test_the_first_page_and_that_on_healing_in_place_word_for_word(tmp_path):
    [script] = [
        match[3] for match in FENCED.finditer((DOCS / "start" / "script.md").read_text()) if match[2] == "python"
    ]
    (tmp_path / "train.py").write_text(script)
    first, again, drill = [
        words
        for page in ("start/script.md", "howto/in-place.md")
        for line in typed(DOCS / page)
        if "types it" in line.why_not
        for words in line.commands()
    ]
    assert first == again
    tried = run(tmp_path, *drill[2:])
    assert tried.returncode == 0, tried.stderr
    assert "could take the place of rank 1: on trial" in tried.stderr
    assert not (tmp_path / "struck").exists(), "it ends with the drill"
    ended = run(tmp_path, *first[2:])
    assert ended.returncode == 0, ended.stderr
    assert "the cluster is at" in ended.stderr
    assert "in place: another process could take the place of rank 1" in ended.stderr
    assert "(train-2) was ended by SIGKILL" in ended.stderr
    assert "train is back at 2 workers, " in ended.stderr
    assert ended.stdout.count("train:0: iteration 0 loss") == 1, "the other rank did not begin again"
    assert "train:0: iteration 140 loss" in ended.stdout


def test_a_script_without_a_loop_trains_and_the_last_line_says_that_nobody_is_replaced(tmp_path):
    hidden = IN_PLACE.replace("for step in range(9):", "def once(step):").replace(
        'print("ends", step', 'once(0)\nprint("e"'
    )
    deep = hidden.replace("torch.nn.Linear(4, 1)", "torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))")
    (tmp_path / "train.py").write_text(deep)  # the second layer's weights are needed to go back through it
    ended = run(tmp_path, "--in-place", "--nodes", "2", "--slots", "1", "train.py")
    assert ended.returncode == 0, ended.stderr
    last = ended.stderr.strip().splitlines()[-1]
    assert "in place: another process can't take the place of rank" in last
    assert "the model is called at train.py:" in last
    assert "in-place healing is off" in last


ENDLESS = """
import signal
import torch.distributed as dist

dist.init_process_group("gloo")
print("begins", dist.get_rank(), flush=True)
signal.pause()
"""


def mentioning(folder):
    """Return the processes whose command or environment names a folder."""
    return [
        process.name
        for process in Path("/proc").glob("[0-9]*")
        if any(bytes(folder) in read(process / name) for name in ("cmdline", "environ"))
    ]


def read(path):
    try:
        return path.read_bytes()
    except OSError:  # another user's, or gone
        return b""


@pytest.mark.parametrize(("number", "words"), [(signal.SIGHUP, []), (signal.SIGKILL, ["--in-place", "--nodes", "2"])])
def test_nothing_outlives_the_command_however_it_ends(tmp_path, number, words):
    (tmp_path / "train.py").write_text(ENDLESS)
    command = [*UNICRON, "run", "--dir", str(tmp_path / "u"), *words, "--slots", "2", "train.py"]
    options = {"cwd": tmp_path, "env": CLEAN, "text": True, "start_new_session": True, **PIPES}
    hears = partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)  # also where the tests run under nohup
    with subprocess.Popen(command, preexec_fn=hears, **options) as running:  # noqa: PLW1509 there are none here
        for _ in range(4 if words else 2):
            next(line for line in running.stdout if "begins" in line)
        assert len(mentioning(tmp_path)) > 6, "a server, services, an agent and ranks"
        running.send_signal(number)
        block_until(lambda: not mentioning(tmp_path))


@pytest.mark.exhaustive("how a program fails is shown without the command")
def test_a_program_that_fails_for_good_ends_with_its_last_words(tmp_path):
    (tmp_path / "kept").mkdir()
    ended = run(tmp_path, "--max-restarts", "1", "--dir", "kept", "bash", "-c", "echo rank $RANK; exit 3")
    assert ended.returncode == 1
    assert ended.stdout == "rank 0\n" * 2
    assert "no progress: 2 starts of all ranks in a row failed" in ended.stderr
    assert list((tmp_path / "kept").glob("nodes/node-1/logs/bash-2.log"))
    again = run(tmp_path, "--dir", "kept", "true")
    assert again.returncode
    assert "a cluster has run there; give a folder that is new" in again.stderr


def test_a_folder_for_checkpoints_is_made_and_one_runs_alone(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInputError, match=r"file/b/t\.own can't be made: Not a directory; give another folder"):
        take_folder(tmp_path / "file" / "b" / "t.own")
    take_folder(tmp_path / "a" / "t.own")
    take_folder(tmp_path / "a" / "u.own")
    with pytest.raises(InvalidInputError, match=r"another run writes its checkpoints to .*t\.own; wait for its end"):
        take_folder(tmp_path / "a" / "t.own")


def test_the_interpreter_may_be_left_out():
    assert worded(["train.py", "-x"], module=False) == ["python", "train.py", "-x"]
    assert worded(["package.train", "-x"], module=True) == ["python", "-m", "package.train", "-x"]
    assert worded(["python", "-u", "train.py"], module=False) == ["python", "-u", "train.py"]


@pytest.mark.parametrize(
    ("command", "name"),
    [(["python", "a b/my train.py"], "my-train"), (["./run"], "run"), (["python", "-m", "x.y"], "x-y")],
)
def test_any_program_makes_a_task(command, name):
    spec = spec_of(command, 4, 2, None)
    assert (spec.name, spec.heal, spec.iterations) == (name, Healing.RESTART, UNCOUNTED)
    assert task_problems(spec) == []


def test_a_script_that_is_not_there_is_refused_before_a_cluster_is_started(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInputError, match=f"nosuch.py: no such file in {tmp_path}"):
        CliRunner().invoke(app, ["run", "nosuch.py"], catch_exceptions=False)
