"""A cluster whose nodes are jobs of a real Slurm, by what `unicron init` wrote: a lost one is replaced."""

import re
import shutil
import sys
from pathlib import Path

import pytest
from helpers.cli import UNICRON
from helpers.ports import free_port
from helpers.slurm import missing, slurm
from helpers.training import SMALL, write_script
from unicron_deploy.production.hosts import Kind, checked
from unicron_deploy.production.setup import write

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.exhaustive("the provider keeps the contract of all; pools are shown with agents of this machine"),
]

TASK = """
name: t
min_workers: 1
max_workers: 2
command: [python, script.py]
microbatches: 4
iterations: 100000
"""


PREFIX = "/opt/unicron/.venv/bin"


@pytest.fixture
def setup(tmp_path):
    """Return the folder of a set-up whose machines have their keys where `unicron up` makes them."""
    folder, hosts = tmp_path / "cluster", ["h1", "h2", "h3"]
    write(folder, checked(["a", "b", "c"], hosts, Kind.SLURM, partition="all", shared=str(tmp_path / "u")))
    pools = folder / "a/etc/unicron/pools.toml"
    lines = pools.read_text().replace("slots = 8", "slots = 1").splitlines()
    pools.write_text("\n".join(line for line in lines if "METRICS" not in line))  # all nodes are this machine
    shutil.copytree(f"{folder}/nodes{tmp_path}/u/rules", tmp_path / "u" / "rules")
    (tmp_path / "u" / "keys").mkdir(mode=0o700)
    return folder


@pytest.fixture
def cluster(setup, tmp_path_factory):
    hooks = (setup / "nodes/etc/slurm/unicron.conf").read_text().replace(PREFIX, str(Path(sys.executable).parent))
    with slurm(tmp_path_factory.mktemp("slurm"), nodes=3, more=hooks) as running:
        yield running


@pytest.fixture
def unicron(cluster, setup, tmp_path):
    """Return what calls a command in a cluster that has no nodes of its own."""
    (tmp_path / "task.yaml").write_text(TASK)
    write_script(tmp_path, SMALL)
    port, home = free_port(), tmp_path / "u"
    env = {
        "UNICRON_NATS_URL": f"nats://127.0.0.1:{port}",
        "UNICRON_NATS_NKEY": str(home / "keys/operator/operator.nk"),
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": "200",
    }

    def call(*words):
        done = cluster.try_(*UNICRON, *words, env=env if words[0] != "up" else {})
        assert not done.returncode, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    ports = ["--port", str(port), "--console-port", str(free_port())]
    call("up", "--nodes", "0", "--pools", str(setup / "a/etc/unicron/pools.toml"), "--dir", str(home), *ports)
    call("submit", str(tmp_path / "task.yaml"))
    yield call
    call("down", "--dir", str(home))
    cluster.try_("scancel", "--user=root")


def jobs(cluster):
    """Return comment and node of each job that runs, by the machine that it is."""
    lines = cluster.run("squeue", "--noheader", "--states=RUNNING", "-o", "%j|%k|%N").splitlines()
    return {machine: (comment, node) for machine, comment, node in (line.split("|") for line in lines)}


def test_a_lost_machine_is_replaced_and_its_task_is_whole_again(cluster, unicron):
    def computing():
        return len(re.findall(r"=t:", unicron("nodes"))) == 2

    cluster.until(computing, "a whole task")
    cluster.until(lambda: all("task t" in comment for comment, _ in jobs(cluster).values()), "comments")
    before = jobs(cluster)
    lost, (_, node) = next(iter(before.items()))
    cluster.kill(node)
    cluster.until(lambda: lost not in jobs(cluster) and len(jobs(cluster)) == 2, "another machine")
    assert len(before.keys() & jobs(cluster).keys()) == 1
    cluster.until(computing, "a whole task again")
    _, (_, node) = next(iter(jobs(cluster).items()))
    cluster.start(next(name for name in cluster.names if cluster.states()[name].startswith("down")))
    cluster.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=bad disk")
    cluster.until(lambda: node not in {where for _, where in jobs(cluster).values()}, "nobody on what is drained")
    cluster.until(computing, "a whole task elsewhere")
