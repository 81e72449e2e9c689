"""A user of a real Slurm who is no operator: what they may not do is told with the cure, and all else goes on."""

import os
import pwd
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.cli import UNICRON
from helpers.slurm import missing, slurm
from helpers.training import SMALL, write_script

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.skipif(not shutil.which("useradd"), reason="no useradd here, which gives this test its user"),
    pytest.mark.exhaustive("what Slurm's refusals become has unit tests; a user takes a change of this machine"),
]

TASK = """
name: t
min_workers: 1
max_workers: 2
command: [python, script.py]
microbatches: 4
iterations: 100000
"""

POOLS = """
[pool.gpu]
provider = "slurm"
max = 2

[pool.gpu.slurm]
partition = "staff"

[pool.away]
provider = "slurm"
max = 1

[pool.away.slurm]
partition = "hidden"
"""

PARTITIONS = """
PartitionName=staff Nodes=n1 AllowGroups=root
PartitionName=hidden Nodes=n1 Hidden=YES
"""

CALL = """
import asyncio, sys
from unicron_provisioner.config import load
from unicron_provisioner.providers.protocol import MachineRequest, ProviderError

pool, _, _ = sys.argv[2].partition("-")
provider = load("pools.toml", "nats://127.0.0.1:9")[pool].provider
request = MachineRequest(machine=sys.argv[2], pool=pool, slots=1, reason="it is wanted")
try:
    asyncio.run(provider.ask(request) if sys.argv[1] == "ask" else provider.release(sys.argv[2]))
except ProviderError as error:
    print(type(error).__name__, error)
print([f"{report.machine} {report.state} {report.reason}" for report in asyncio.run(provider.list())])
"""


@pytest.fixture
def user():
    """Have one more user on this machine for as long."""
    name = f"unicron{os.getpid()}"
    subprocess.run(["useradd", "--no-create-home", name], check=True, capture_output=True)
    number = pwd.getpwnam(name).pw_uid
    yield name
    subprocess.run(["userdel", name], check=True, capture_output=True)
    for left in Path("/dev/shm").glob(f"unicron-{number}-*"):
        shutil.rmtree(left)


@pytest.fixture
def cluster(tmp_path, user):
    with slurm(tmp_path / "slurm", nodes=2, more=PARTITIONS, users=True) as running:
        yield running


@pytest.fixture
def call(cluster, user, tmp_path):
    """Return what calls a command as that user, in a folder of theirs."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "task.yaml").write_text(TASK)
    (home / "pools.toml").write_text(POOLS)
    (home / "call.py").write_text(CALL)
    write_script(home, SMALL)
    shutil.chown(home, user)

    def run(*words, **env):
        done = cluster.try_(*words, env={"HOME": str(home), "COLUMNS": "200", **env}, user=user, cwd=home)
        assert not done.returncode, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    return run


def test_a_user_may_not_drain_in_slurm_use_all_partitions_or_end_anothers_job(cluster, call, tmp_path):
    job = call(*UNICRON, "slurm", "submit", "--nodes=2", "task.yaml").split()[-1]
    out, key = tmp_path / "home" / f"slurm-{job}.out", f".unicron/slurm/{job}/keys/operator/operator.nk"

    def said(words):
        return out.exists() and words in " ".join(out.read_text().split())

    def computing():
        [url] = re.findall(r"the cluster is at (\S+),", out.read_text())
        lines = call(*UNICRON, "nodes", UNICRON_NATS_URL=url, UNICRON_NATS_NKEY=key).splitlines()
        return {name for name in cluster.names if any(re.match(rf"\s*{name}\s.*=t:", line) for line in lines)}

    cluster.until(lambda: said("the cluster is at"), "a cluster")
    cluster.until(lambda: computing() == {"n1", "n2"}, "a whole task")
    [url] = re.findall(r"the cluster is at (\S+),", out.read_text())
    call(*UNICRON, "drain", "n2", UNICRON_NATS_URL=url, UNICRON_NATS_NKEY=key)
    cluster.until(lambda: computing() == {"n1"}, "nobody on what is drained")
    cluster.until(lambda: said("n2 stays as it is in Slurm: scontrol: "), "what Slurm says")
    cure = "takes an operator of Slurm: have one do it: scontrol update NodeName=n2 State=DRAIN 'Reason=unicron drain'"
    assert said(cure)
    assert cluster.states()["n2"] not in {"drain", "drng"}
    call("scancel", job)
    cluster.until(lambda: not cluster.squeue(), "the end of the job")

    told = call(sys.executable, "call.py", "ask", "gpu-1")
    if told.startswith("RefusedError"):
        assert told.startswith("RefusedError [pool.gpu.slurm] partition = 'staff': sbatch: ")
        assert told.endswith("[]\n")
    else:  # newer versions take the job, and look at rights then
        cluster.until(lambda: "gpu-1 ended" in call(sys.executable, "call.py", "release", "gpu-9"), "what it waits for")
        told = call(sys.executable, "call.py", "release", "gpu-9")
        assert "name a partition in [pool.gpu.slurm]" in told
        assert call(sys.executable, "call.py", "release", "gpu-1") == "[]\n"
    assert "that you may use: `scontrol show partition` lists" in told
    assert cluster.squeue() == []

    told = call(sys.executable, "call.py", "ask", "away-1")
    assert "away-1 coming" in told or "away-1 running" in told, told
    assert call(sys.executable, "call.py", "release", "away-1") == "[]\n"
    assert cluster.squeue() == []

    of_root = cluster.run(
        "sbatch", "--parsable", "--job-name=gpu-2", "--output=/dev/null", "--wrap=tail -f /dev/null"
    ).strip()
    told = call(sys.executable, "call.py", "release", "gpu-2")
    assert told.startswith(f"RefusedError gpu-2 is job {of_root}: scancel: ")
    assert "this takes the owner of the job, or an operator of Slurm: have one of them do it" in told
    assert of_root in cluster.squeue()
