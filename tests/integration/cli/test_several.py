"""`unicron run` on several machines: here two addresses of this one, with processes of their own."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from helpers.cli import UNICRON
from helpers.ports import free_port
from helpers.waiting import block_until

from unicron.processes import ProcessRecord

pytestmark = [
    pytest.mark.real,
    pytest.mark.exhaustive("two clusters' worth of processes; tests/unit/cli/test_meeting.py has what is decided"),
]

SCRIPT = """
import os, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
print("begins", dist.get_rank(), "of", dist.get_world_size(), flush=True)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    ends = torch.tensor([float(os.path.exists("enough"))])
    dist.all_reduce(ends)
    if ends.item():
        break
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.05)
print("done", dist.get_rank(), flush=True)
dist.destroy_process_group()
"""


class Machine:
    """`unicron run` as one of two machines would run it."""

    def __init__(self, folder, port, rank):
        self.out = folder / f"out-{rank}"
        words = ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-id", "r"]
        where = ["--rdzv-endpoint", f"127.0.0.1:{port}", "--node-rank", str(rank)]
        own = {"HOME": str(folder / "home"), "TMPDIR": str(folder), "UNICRON_HOST": f"127.0.0.{rank + 1}"}
        with self.out.open("wb") as out:
            self.process = subprocess.Popen(
                [*UNICRON, "run", *words, *where, "train.py"],
                cwd=folder,
                stdout=out,
                stderr=out,
                env={**os.environ, **own},
            )

    def text(self):
        return self.out.read_text()


@pytest.fixture
def machines(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "home").mkdir()
    port = free_port()
    found = [Machine(tmp_path, port, rank) for rank in (1, 0)]  # who comes too early waits
    yield found[::-1]
    for machine in found:
        if machine.process.poll() is None:
            machine.process.terminate()
        machine.process.wait()


def running(machines):
    return sum(machine.text().count(": begins ") for machine in machines)


def content(path):
    try:
        return path.read_bytes()
    except OSError:  # it has ended
        return b""


def workers(folder):
    return sorted((folder / f"unicron-{os.getuid()}" / "r-1" / "workers").glob("*.json"))


def test_two_machines_train_one_model_and_go_on_when_a_rank_and_then_an_agent_is_killed(machines, tmp_path):
    first, second = machines
    block_until(lambda: running(machines) == 4)
    token = tmp_path / "home" / ".unicron" / "run" / "r.token"
    assert token.stat().st_mode & 0o777 == 0o600
    secret = token.read_text().split(".")[2]
    shown = [*Path("/proc").glob("[0-9]*/cmdline"), *Path("/proc").glob("[0-9]*/environ")]
    assert [path for path in shown if secret.encode() in content(path)] == []
    os.kill(json.loads(workers(tmp_path)[0].read_text())["pid"], signal.SIGKILL)
    block_until(lambda: running(machines) == 8)
    assert "was ended by SIGKILL" in first.text()
    lock = tmp_path / f"unicron-{os.getuid()}" / "r-1" / "agent.lock"
    os.kill(int(lock.read_text()), signal.SIGKILL)
    block_until(lambda: "the agent of node-2 was ended by SIGKILL: started again" in second.text())
    (tmp_path / "enough").touch()
    assert [machine.process.wait() for machine in machines] == [0, 0], first.text() + second.text()
    assert "train finished" in first.text()
    assert "train is finished" in second.text()
    assert not token.exists()
    assert not list(tmp_path.glob("unicron-*/r-1")), "nothing is left of it on the other machine"


def test_what_runs_on_a_machine_ends_with_the_command_there(machines, tmp_path):
    _, second = machines
    block_until(lambda: running(machines) == 4)
    agent = int((tmp_path / f"unicron-{os.getuid()}" / "r-1" / "agent.lock").read_text())
    pids = [agent, *(json.loads(path.read_text())["pid"] for path in workers(tmp_path))]
    started = [ProcessRecord.from_pid(pid) for pid in pids]
    assert len(started) == 3
    second.process.kill()
    block_until(lambda: not any(each.alive() for each in started))
