"""The findings of `unicron doctor` about this machine, and about a cluster that can't be reached."""

import collections
import os
import shutil
import sys

import pytest
from helpers.amd import AmdMachine, told
from helpers.ports import free_port
from helpers.refusing import REFUSED, serving
from unicron_cli import doctor, production

from unicron.contracts.tasks import NodeState
from unicron.settings import Settings
from unicron.train.groups.nccl import ENVIRONMENT

WHY = "Authorization Violation"


@pytest.fixture
def poor(monkeypatch):
    """A machine without GPUs, and with little room."""
    room = collections.namedtuple("room", "f_bavail f_frsize")  # noqa: PYI024
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(os, "statvfs", lambda _: room(64, 1024**2))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: collections.namedtuple("usage", "free")(5 * 1024**2))  # noqa: PYI024


async def test_what_is_missing_is_told_with_the_cure(poor, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    nobody = Settings(nats_url=f"nats://127.0.0.1:{free_port()}", connect_timeout_s=1000.0)
    told = {check.name: (check.state, check.found, check.cure) for check in await doctor.examine(nobody)}
    for name, state, found, cure in (
        ("GPUs", "warning", "NVML finds none", "none needed for CPU slots; for GPUs install NVIDIA's driver"),
        ("/dev/shm", "warning", "64 MiB free", "start the container with --shm-size=1g"),
        (f"disk of {tmp_path}", "warning", "5 MiB free", "have 1024 MiB for journal, logs and checkpoints: remove"),
        (
            "NATS",
            "missing",
            f"at {nobody.nats_url}: nothing listens there",
            "`docker-compose start` in containers), or",
        ),
    ):
        assert told[name][0] == state
        assert found in told[name][1]
        assert cure in told[name][2]
    assert "start the server" not in told["NATS"][1]


@pytest.mark.parametrize(("had", "state"), [(False, "warning"), (True, "missing")])
async def test_a_machine_without_any_cluster_lacks_none(poor, tmp_path, monkeypatch, had, state):
    monkeypatch.chdir(tmp_path)
    nobody = Settings(nats_url=f"nats://127.0.0.1:{free_port()}", connect_timeout_s=1000.0)
    monkeypatch.setattr(doctor, "Settings", lambda: nobody)  # as where none is named
    monkeypatch.delenv("UNICRON_NATS_URL", raising=False)
    if had:
        (tmp_path / ".unicron").mkdir()
        (tmp_path / ".unicron" / "cluster.json").write_text("{}")
    [nats] = [check for check in await doctor.examine(nobody) if check.name == "NATS"]
    assert nats.state == state
    assert nats.cure.startswith("none needed for `unicron run`") == (not had)


@pytest.mark.parametrize(
    ("split", "state", "found"), [(False, "ok", "2 seen by amd-smi"), (True, "missing", "is split up, and workers can")]
)
def test_gpus_of_amd_are_counted_as_agents_count_them(split, state, found, tmp_path, monkeypatch):
    machine = AmdMachine(tmp_path / "bin", monkeypatch)
    machine.has(told(0), ({**told(0)[0], "gpu": 1}, told(1)[1]) if split else told(1))
    check = doctor._gpus()
    assert check.state == state
    assert found in check.found


async def test_a_key_that_is_missing_has_another_cure_than_a_server_that_is():
    async with serving(REFUSED) as url:
        check = (await doctor.examine(Settings(nats_url=url, connect_timeout_s=1000.0)))[-1]
    assert check.found == f"the NATS server at {url} turns us away ({WHY}): it lets in nobody without a key"
    assert check.cure.startswith("set UNICRON_NATS_NKEY to the path of one that it knows, see `unicron credentials`")


def test_clocks_that_are_off_are_told_by_node():
    assert production.clocks({"n1": 0.01, "n2": -1.0}).state == "ok"
    check = production.clocks({"n1": 0.01, "n2": -45.2, "n3": 3600.0})
    assert (check.state, check.found) == ("warning", "not as this machine's: n2 is 45 s behind, n3 is 3600 s ahead")
    assert check.cure.startswith("set them, by NTP")


def test_variables_of_nccl_are_told_where_they_are_set_to_something_else(monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    assert doctor._overridden() == ""
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    assert doctor._overridden() == "TORCH_NCCL_ASYNC_ERROR_HANDLING=3"


@pytest.mark.parametrize(
    ("nodes", "state", "words"),
    [
        ({NodeState.UP: ["n1", "n2"], NodeState.LEFT: ["n3"]}, "ok", "n1, n2 up; "),
        ({NodeState.UP: ["n1"], NodeState.DRAINING: ["n2"]}, "warning", "n1 up; n2 drained: no work goes there; "),
        ({NodeState.DRAINING: ["n2"], NodeState.LOST: ["n3"]}, "warning", "n2 drained: no work goes there; n3 lost; "),
        ({NodeState.LOST: ["n3"]}, "missing", "none is up; start an agent"),
    ],
)
def test_a_node_that_does_not_work_is_named_with_the_command_for_it(nodes, state, words):
    check = doctor.judge_nodes(nodes)
    assert check.state == state
    assert f"{check.found}; {check.cure}".startswith(words)
    if state == "warning":
        assert ("`unicron drain --undo n2`" in check.cure) == (NodeState.DRAINING in nodes)
        assert ("n3: see to the machine" in check.cure and "`docker start`" in check.cure) == (NodeState.LOST in nodes)
