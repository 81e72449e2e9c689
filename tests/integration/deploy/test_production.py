"""What `unicron init` writes, started on this machine as systemd would start it: doctor finds all of it well."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.cli import CLEAN, UNICRON, call
from helpers.setup_here import NODES, SERVERS, settle
from helpers.waiting import block_until
from unicron_deploy.nats_server import find_binary
from unicron_deploy.production.hosts import INSTANCES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.real,
    pytest.mark.exhaustive("three hosts' worth of processes; tests/unit/deploy has each file"),
]

PREFIX = "/opt/unicron/.venv/bin"


def moved(folder, run):
    """Have the paths of a set-up lie in its folder, and what it runs be this machine's."""
    for host in (*SERVERS, *NODES):
        for path in [each for each in (folder / host).rglob("*") if each.is_file() and "keys" not in each.parts]:
            text = path.read_text()
            text = text.replace("/etc/unicron", f"{folder}/{host}/etc/unicron").replace("/var/", f"{run}/{host}/var/")
            text = text.replace(f"{PREFIX}/python", sys.executable)
            path.write_text(text.replace(f"{PREFIX}/nats-server", find_binary()))


def command(unit, instance):
    """Return the command and the environment that a unit has for an instance."""
    words, environment = [], {}
    for line in unit.read_text().replace("%i", instance).splitlines():
        name, _, value = line.partition("=")
        if name == "EnvironmentFile":
            environment |= dict(each.split("=", 1) for each in Path(value).read_text().splitlines())
        elif name == "Environment":
            environment |= dict([value.split("=", 1)])
        elif name == "ExecStart":
            words = shlex.split(value)
    return words, environment


@pytest.fixture
def cluster(tmp_path):
    folder = tmp_path / "cluster"
    done = call([*UNICRON, "init", str(folder), "--servers", ",".join(SERVERS), "--nodes", "n[1-2]"])
    assert done.returncode == 0, done.stderr
    here = settle(folder, slots=1)
    moved(folder, tmp_path)
    units = [(host, "unicron-nats.service", "") for host in SERVERS]
    units += [(host, "unicron@.service", name) for host in SERVERS for name in INSTANCES]
    units += [(node, "unicron-agent.service", "") for node in NODES]
    started = []
    try:
        for host, unit, instance in units:
            words, environment = command(folder / host / "etc/systemd/system" / unit, instance)
            with (tmp_path / f"{host}-{unit}-{instance}.log").open("w") as log:
                environment = {**CLEAN, **environment, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
                started.append(subprocess.Popen(words, env=environment, stdout=log, stderr=log))
        yield folder, here.url
    finally:
        for process in reversed(started):
            process.terminate()
        for process in reversed(started):
            process.wait(40)


def test_what_was_written_runs_and_doctor_finds_it_well(cluster):
    folder, url = cluster
    reach = {**CLEAN, "UNICRON_NATS_URL": url, "UNICRON_NATS_NKEY": str(folder / "keys/operator/operator.nk")}
    reach |= {"UNICRON_CONNECT_TIMEOUT_S": "60", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    words = ["doctor", "--cluster", "--json", "--setup", folder]

    def found():
        done = call([*UNICRON, *words], reach)
        return {check["name"]: check for check in json.loads(done.stdout)["checks"]} if done.stdout else {}

    block_until(lambda: [name for name, check in found().items() if check["state"] != "ok"] == ["people"])
    with (folder / "n2/etc/unicron/agent.env").open("a") as file:
        file.write("UNICRON_HANG_S=60\n")
    assert found()["settings"]["found"] == "n2: UNICRON_HANG_S is 20.0, not 60"
