"""The messages of `unicron up` for a cluster that was started before, and the commands that need one."""

import json

import pytest
from helpers.cli import invoke
from typer.testing import CliRunner
from unicron_chaos.injection import Injection
from unicron_cli import chaos
from unicron_cli.local import unstored
from unicron_cli.main import app
from unicron_deploy.embedded import Cluster

from unicron.contracts.answers import Status, TaskView
from unicron.contracts.tasks import Healing, TaskSpec, TaskState
from unicron.errors import InvalidInputError


@pytest.fixture
def up(tmp_path, monkeypatch):
    """Return what starts a cluster that is only written down."""

    async def ready(*_, **__):
        pass

    monkeypatch.setattr(Cluster, "start", lambda cluster, *_: cluster.stop())
    monkeypatch.setattr(Cluster, "wait_until_ready", ready)
    return lambda *words: invoke("up", "--dir", tmp_path, *words)


def test_options_are_those_of_the_last_time_and_that_is_said(up, tmp_path):
    first = up("--insecure", "--nodes", 2, "--port", 4333)
    assert "with 2 nodes of 2 slots" in first
    assert "as it was started before" not in first
    again = up()
    assert "at nats://127.0.0.1:4333 with 2 nodes of 2 slots" in again
    assert "as it was started before: --nodes 2 --port 4333 --insecure   (unless others are given)" in again
    assert json.loads(up("--port", 4444, "--nodes", 3, "--json"))["kept"] == ["--insecure"]


def test_a_cluster_that_runs_stays_as_it_is_and_that_is_said(up, tmp_path, monkeypatch):
    up("--insecure")
    monkeypatch.setattr(Cluster, "mend", lambda *_: (Cluster.load(tmp_path), ["node-1"]))
    told = CliRunner().invoke(app, ["up", "--dir", str(tmp_path), "--slots", "4"])
    assert "started node-1 again; the rest of the cluster ran on" in told.stdout
    assert "--slots 4: a cluster that runs stays as it is; `unicron down` first" in told.stderr


def test_a_node_in_a_container_is_not_started_from_here_and_how_it_is_is_said(tmp_path):
    with pytest.raises(
        InvalidInputError, match=r"no cluster runs .*`unicron up`; name .*, in containers by `docker start`"
    ):
        invoke("chaos", "restart-node", "node-3", "--dir", tmp_path)


def test_what_a_strike_did_is_said_once(capsys):
    text = "kill-worker long-2 on node-2"
    chaos._print_line(Injection(fault="kill-worker", target="gpt:1", node="node-2", worker="long-2", at=1.0, text=text))
    chaos._print_line(Injection(fault="kill-node", target="node-2", node="node-2", at=1.0, text="node-2 kills itself"))
    assert capsys.readouterr().out == f"gpt:1: {text}\nnode-2 kills itself\n"


@pytest.mark.parametrize(
    ("fields", "state", "iteration", "told"),
    [
        ({}, TaskState.RUNNING, 41, "at iteration 0. To keep one another time, give its task file `checkpoints`"),
        ({}, TaskState.RUNNING, -1, ""),
        ({}, TaskState.FINISHED, 41, ""),
        ({"checkpoints": "/shared"}, TaskState.RUNNING, 41, ""),
        ({"heal": Healing.IN_PLACE}, TaskState.RUNNING, 41, "To keep one another time, have the script save"),
        ({"heal": Healing.RESTART}, TaskState.RUNNING, 41, ""),
    ],
)
def test_a_task_whose_state_lies_in_memory_alone_is_named_before_that_is_gone(fields, state, iteration, told):
    spec = TaskSpec(name="gpt", command=["x"], **fields)
    lost = unstored(Status(tasks=[TaskView(spec=spec, state=state, iteration=iteration)]))
    assert told in lost.get("gpt", "")
    assert ("of iteration 41" in lost.get("gpt", "")) == bool(told)
