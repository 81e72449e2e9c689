"""`unicron` without arguments, and `unicron doctor`: what is here, and which command is the next one."""

import json
import os
import socket
import subprocess
import sys

import pytest
from helpers.cli import invoke
from helpers.ports import free_port
from unicron_cli import here
from unicron_deploy.embedded import Cluster
from unicron_deploy.nats_server import NatsServer

from unicron.processes import ProcessRecord

SCRIPT, SESSION = "import torch.distributed as dist\n", "import torch.distributed\nfrom unicron.train import Session\n"
TASK = "name: gpt\ncommand: [python, train.py]\n"
RUN, SBATCH = "unicron run --nproc-per-node 2 train.py", "unicron slurm run --nodes=2 -- train.py"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder of a machine on which no cluster runs, nothing was left behind, and there is no Slurm."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(here, "clusters", dict)
    monkeypatch.setattr(here, "left_behind", list)
    monkeypatch.setattr(here, "ranks_here", lambda: 2)
    monkeypatch.setattr(here, "PORT", free_port())
    (tmp_path / "bin").mkdir()
    for name in [name for name in os.environ if name.startswith(("UNICRON_", "SLURM_"))]:
        monkeypatch.delenv(name)
    return tmp_path


def stopped(folder):
    (folder / ".unicron").mkdir()
    Cluster(folder / ".unicron")._save()


def containers(folder):
    (folder / ".unicron" / "containers" / "operator").mkdir(parents=True)


def slurm(folder):
    (folder / "bin" / "sbatch").touch(mode=0o755)


def written(name, text):
    return lambda folder: (folder / name).write_text(text)


train, task = written("train.py", SCRIPT), written("gpt.yaml", TASK)


@pytest.mark.parametrize(
    ("there", "command"),
    [
        ([], "unicron run --nproc-per-node 2 SCRIPT.py"),
        ([written("a.py", "print()"), written("b.yaml", "a: 1"), written("c.py", SESSION)], here.next_command([])),
        ([train, written("a.py", SCRIPT)], RUN),
        ([task], "unicron up && unicron submit gpt.yaml"),
        ([train, task], RUN),
        ([train, slurm], SBATCH),
        ([stopped], "unicron up"),
        ([containers, task, train, slurm], "docker-compose start"),
    ],
)
def test_what_is_here_leads_to_the_next_command(folder, there, command):
    for put in there:
        put(folder)
    found = here.findings({})
    assert here.next_command(found) == command
    assert invoke().splitlines()[-2:][0] == f"next: {command}"


def test_containers_whose_key_is_here_are_asked_or_started_and_not_built_again(folder, monkeypatch):
    (folder / "bin" / "docker").touch(mode=0o755)
    (folder / "examples" / "gpt").mkdir(parents=True)
    for name in ("docker-compose.yml", "examples/gpt/task.yaml"):
        written(name, "")(folder)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{folder}/docker.sock")
    assert "docker-compose up --build -d" not in [each.command for each in here.findings({})], "no engine runs"
    with socket.socket(socket.AF_UNIX) as engine:
        engine.bind(f"{folder}/docker.sock")
        engine.listen()
        assert "docker-compose up --build -d" in [each.command for each in here.findings({})]
    containers(folder)
    commands = [each.command for each in here.findings({})]
    assert (commands[0], commands[1:]) == ("docker-compose start", ["unicron demo"])
    with socket.create_server(("127.0.0.1", here.PORT)):
        assert here.next_command(here.findings({})) == "unicron status"
        task(folder)
        assert here.next_command(here.findings({})) == "unicron submit gpt.yaml"
    assert [each.command for each in here.findings({"UNICRON_NATS_URL": "nats://a:1"})][1:] == ["unicron demo"]


def test_within_a_job_the_program_runs_there_and_a_cluster_that_is_named_comes_first(folder):
    train(folder)
    assert here.next_command(here.findings({"SLURM_JOB_ID": "7"})) == "unicron slurm run -- train.py"
    assert here.findings({"UNICRON_NATS_URL": "nats://a:1", "SLURM_JOB_ID": "7"})[0].command == "unicron status"


def test_clusters_that_run_say_until_when_and_those_of_other_folders_come_last(folder, monkeypatch, tmp_path):
    train(folder)
    own, other, run = (folder / name for name in (".unicron", "other", "run"))
    for path, port in ((own, 4222), (other, 4333), (run, 4444)):
        path.mkdir()
        Cluster(path, port=port)._save()
    us = ProcessRecord.from_pid(os.getpid())
    gone = ProcessRecord(pid=us.pid, ticks=us.ticks - 1)
    monkeypatch.setattr(here, "clusters", lambda: {own: 1, other: 2, run: 3})
    monkeypatch.setattr(here, "owner_of", {1: None, 2: None, 3: us}.get)
    found = here.findings({})
    assert [each.command.split()[-1] for each in found] == ["status", "status", "train.py", "status"]
    assert found[0].command == "unicron status"
    assert "until `unicron down`" in found[0].found
    assert f"until `unicron down --dir {other}`" in found[3].found
    assert found[3].command.startswith(f"UNICRON_NATS_URL=nats://127.0.0.1:4333 UNICRON_NATS_NKEY={other}/keys/")
    assert f"until the command ends that has started it, process {us.pid}" in found[1].found, "a command given here"
    monkeypatch.chdir(other)
    assert [each.command.split()[-1] for each in here.findings({})] == ["status"] * 3
    task(other)
    monkeypatch.setattr(here, "_begun_here", lambda _: False)
    assert [each.command.split()[-2:] for each in here.findings({})] == [["submit", "gpt.yaml"]] * 2, (
        "others' are not ours"
    )
    monkeypatch.chdir(folder)
    monkeypatch.setattr(here, "owner_of", lambda _: gone)
    assert [each.name for each in here.findings({})] == ["script"], "what outlived its command is no cluster"


@pytest.mark.real
def test_a_cluster_is_known_by_its_server(tmp_path, monkeypatch):
    monkeypatch.undo()
    folder = tmp_path / "c"
    server = NatsServer(folder / "nats", free_port())
    pid = server.start()
    Cluster(folder)._save()
    found = here.clusters()
    server.kill()
    assert found[folder] == pid


def test_doctor_ends_with_it(folder):
    train(folder)
    told = json.loads(
        subprocess.run(
            [sys.executable, "-m", "unicron_cli", "doctor", "--json"], capture_output=True, text=True, check=False
        ).stdout
    )
    assert told["next"] == told["here"][0]["command"]
