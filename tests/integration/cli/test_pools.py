"""A cluster that begins without nodes: they come by a pool, and one that is killed is replaced, on this machine."""

import json

import pytest
from helpers.cli import UNICRON, call, reaching
from helpers.ports import free_port
from helpers.training import SMALL, write_script
from helpers.waiting import block_until

pytestmark = [
    pytest.mark.real,
    pytest.mark.exhaustive("storms have the core, tests/contract/test_providers.py the provider"),
]

POOLS = """
[pool.cpu]
provider = "local"
min = 2
max = 4
spares = 1
slots = 1

[pool.cpu.local]
env = {UNICRON_CHAOS = "true"}
"""

TASK = """
name: t
min_workers: 1
max_workers: 2
command: [python, script.py]
microbatches: 4
iterations: 100000
"""


@pytest.fixture
def ask(tmp_path):
    """Return what asks a cluster that began without nodes; each command by the operator's key."""
    (tmp_path / "pools.toml").write_text(POOLS)
    (tmp_path / "task.yaml").write_text(TASK)
    write_script(tmp_path, SMALL)
    home, port = tmp_path / "u", free_port()
    url = f"nats://127.0.0.1:{port}"
    environment = reaching(url) | {"UNICRON_NATS_NKEY": str(home / "keys/operator/operator.nk")}

    def ask(*words):
        done = call([*UNICRON, *words], environment, tmp_path)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    ports = ("--port", str(port), "--console-port", str(free_port()))
    ask("up", "--nodes", "0", "--pools", "pools.toml", "--dir", str(home), *ports)
    try:
        yield ask
    finally:
        ask("down", "--dir", str(home))


def test_a_killed_machine_is_replaced_once_and_its_task_is_whole_again(ask):
    def pool():
        [view] = json.loads(ask("pools", "--json"))["pools"]
        return view

    def machines():
        return {each["machine"]: each["node"] for each in pool()["machines"] if each["stage"] == "up"}

    def workers():
        [task] = json.loads(ask("status", "--json"))["tasks"]
        return [member["node"] for member in task["members"]] if task["state"] == "running" else []

    ask("submit", "task.yaml")
    block_until(lambda: len(machines()) == 3 and len(workers()) == 2)
    before = machines()
    struck = workers()[0]
    [lost] = [machine for machine, node in before.items() if node == struck]
    ask("chaos", "kill-node", struck)
    block_until(lambda: lost not in machines() and len(machines()) == 3)
    block_until(lambda: len(workers()) == 2 and struck not in workers())
    assert len(machines().keys() - before.keys()) == 1, "one came for one"
    asked = [line for line in ask("events").splitlines() if "MachineAsked" in line and lost in line]
    assert len(asked) == 1, "and was asked for once"
