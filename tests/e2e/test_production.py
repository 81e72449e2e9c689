"""A set-up of `unicron init` for Compose, on a real engine, as the page has it typed: a node dies and comes back."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import sys
from functools import partial

import pytest
from helpers import ROOT
from helpers.compose import BUILD_S, Cluster, command, connected, node_of, status_when, task_of, trains, up
from helpers.pages import typed
from helpers.receiver import Receiver
from helpers.setup_here import NODES, SERVERS, settle

from unicron.contracts.tasks import NodeState

pytestmark = [
    pytest.mark.compose,
    pytest.mark.exhaustive("what is written has tests without an engine"),
    pytest.mark.timeout(BUILD_S + 900),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to the containers' user"),
]

USER = 10001
HOSTS = [*SERVERS, *NODES]

TASK = """
name: gpt
workdir: /opt/unicron/examples/gpt
checkpoints: {checkpoints}
min_workers: 1
max_workers: 2
command: [python, train.py]
microbatches: 12
iterations: 1000000
"""

NOTIFY = """
[channel.own]
kind = "json"
url = "{url}/own"

[rule.all]
channels = ["own"]
wait_s = 0
"""


def page():
    """Return what the page has typed, with this machine's addresses for its hosts."""
    lines = [
        line.text
        for line in typed(ROOT / "docs" / "howto" / "production.md")
        if "test_production.py types" in line.why_not
    ]
    for name, address in zip("abc", SERVERS, strict=True):
        lines = [re.sub(rf"(?<=[ ,/]){name}(?=[ ,:])", address, line) for line in lines]
    return lines


def made_for_here(folder, run, receiver):
    """Do what README.md leaves to people, and give each host's files to the containers' user."""
    here = settle(folder, slots=2)
    checkpoints = run / "checkpoints"
    for host in HOSTS:
        state = run / host
        compose, conf = folder / host / "docker-compose.yml", folder / host / "etc/unicron/nats.conf"
        text = compose.read_text().replace("- /var/lib/unicron:", f"- {state}:")
        text = re.sub(r"# - /srv/project:/srv/project .*", f"- {checkpoints}:{checkpoints}", text)
        # no GPUs; and an engine that is in a container itself may not raise limits
        lines = [line for line in text.splitlines(keepends=True) if not re.search("driver: nvidia|ulimits:", line)]
        compose.write_text("".join(lines))
        assert conf.exists() is (host in SERVERS)
        if host in SERVERS:
            with (folder / host / "etc/unicron/notify/notify.toml").open("a") as file:
                file.write(NOTIFY.format(url=receiver.url))
        state.mkdir()
        for path in (state, *(folder / host / "etc").rglob("*")):
            shutil.chown(path, USER, USER)
    checkpoints.mkdir()
    shutil.chown(checkpoints, USER, USER)
    return here


@contextlib.contextmanager
def started(folder, line):
    """Have all hosts' containers run, each host a project; yield these by host."""
    hosts = {host: Cluster(command(), folder, cwd=folder / host) for host in HOSTS}
    try:
        for host in hosts.values():
            host.type(line)
        yield hosts
    finally:
        for host in hosts.values():
            with contextlib.suppress(pytest.fail.Exception):
                sys.stdout.write(host.compose("logs", "--no-color", "--tail", "30"))
            host.compose("down", "-v", "-t", "3")


async def clean(desk, *lines):
    """Wait until doctor has nothing to say of the cluster: what it says while servers elect and nodes join is true."""
    while True:
        with contextlib.suppress(pytest.fail.Exception):
            checks = json.loads(await asyncio.to_thread(desk.type, *lines))["checks"]
            if all(check["state"] == "ok" for check in checks):
                return
            sys.stdout.write("; ".join(f"{c['name']}: {c['found']}" for c in checks if c["state"] != "ok") + "\n")


def goes_on_without_n2(beyond, status):
    """Say whether the task computes on n1 alone: the node is given up before the others have met again."""
    nodes = {member.node for member in task_of(status, "gpt").members}
    return nodes == {"n1"} and node_of(status, "n2").state is NodeState.LOST and trains(status, "gpt", 2, beyond)


async def test_what_was_written_for_compose_runs_and_outlives_a_node(tmp_path):
    init, *_, begin, reach, submit, doctor = page()
    desk, folder = Cluster(command(), tmp_path, cwd=tmp_path), tmp_path / "cluster"
    desk.type(init)
    with Receiver() as receiver:
        here = made_for_here(folder, tmp_path, receiver)
        desk.url, desk.key = here.url, folder / "keys/operator/operator.nk"
        reach = reach.replace(":4222", f":{here.ports['4222']}")
        (tmp_path / "task.yaml").write_text(TASK.format(checkpoints=tmp_path / "checkpoints"))
        with started(folder, begin) as hosts:
            async with connected(desk) as client:
                await status_when(client, "both nodes are up", lambda status: up(status, *NODES))
                desk.type(reach, submit)
                status = await status_when(client, "it trains", lambda status: trains(status, "gpt", 2, 5))
                await clean(desk, reach, f"{doctor} --json")
                iteration = task_of(status, "gpt").iteration
                hosts["n2"].docker("kill", "agent")
                await status_when(client, "it goes on on n1", partial(goes_on_without_n2, iteration))
                hosts["n2"].docker("start", "agent")
                await status_when(client, "n2 is back", lambda status: up(status, *NODES))
                await clean(desk, reach, f"{doctor} --json")
                with (folder / "n2/etc/unicron/agent.env").open("a") as file:
                    file.write("UNICRON_HANG_S=60\n")
                told = json.loads(desk.type(reach, f"{doctor} --json"))["checks"]
                [settings] = [check["found"] for check in told if check["name"] == "settings"]
                assert settings == "n2: UNICRON_HANG_S is 20.0, not 60"
        assert [each for each in receiver.at("/own") if each.body["kind"] == "node_lost"]
