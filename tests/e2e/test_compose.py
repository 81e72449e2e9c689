"""The cluster in containers, as a user runs it: build, submit from the host, lose a node, get it back, finish."""

import asyncio
import contextlib
import json
import re
import urllib.request
from pathlib import Path

import pytest
import yaml
from helpers import ROOT
from helpers.compose import (
    BUILD_S,
    Cluster,
    command,
    connected,
    content,
    node_of,
    running,
    status_when,
    task_of,
    trains,
    up,
)
from helpers.ports import free_port

from unicron.bus import topology
from unicron.contracts.answers import Status
from unicron.contracts.tasks import NodeState, TaskState
from unicron.taskfile import load

TASK_FILE = ROOT / "examples" / "gpt" / "task.yaml"
SHORT = 10
"""Iterations of the task that is waited for to its end."""

NODES = ("node-1", "node-2", "node-3")

LIMIT_MB = {"unicron-control": 300, "unicron-planner": 300, "unicron-node": 1000}
"""How large each may be, in 10^6 bytes; the node's holds torch's CPU build."""

LOOK = """
import json, os, pathlib
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
def may_write(folder):
    try:
        pathlib.Path(folder, "probe").touch()
    except OSError:
        return False
    pathlib.Path(folder, "probe").unlink()
    return True
folders = ["/", "/opt/unicron", "/etc", "/home/unicron", "/tmp", "/run/unicron", "/var/cache/unicron", "/checkpoints"]
paths = [f"{folder}/{tool}" for folder in ("/bin", "/usr/bin", "/usr/local/bin", "/opt/unicron/bin")
         for tool in ("sh", "bash", "dash", "busybox", "apt", "dpkg", "pip", "cc")]
rights = sum(int(status[each], 16) for each in ("CapPrm", "CapEff", "CapBnd"))
print(json.dumps({"user": os.getuid(), "rights": rights, "none new": status["NoNewPrivs"].strip(),
                  "writes": list(filter(may_write, folders)), "tools": list(filter(os.path.lexists, paths))}))
"""
"""Run in a container: who it is there, what it may do, and what there is to do it with."""


def fetched(url: str) -> str:
    """Return what a browser on the host would get."""
    with urllib.request.urlopen(url) as answer:
        return answer.read().decode()


def short_task(folder):
    """Write a file with a task that is soon through, where the other has minutes to be struck in; return it."""
    path = folder / "short.yaml"
    fields = {"name": "short", "iterations": SHORT, "workdir": str(TASK_FILE.parent)}
    path.write_text(yaml.safe_dump(yaml.safe_load(TASK_FILE.read_text()) | fields))
    return path


def check_confinement(cluster: Cluster) -> None:
    """Look into a container of each image, while it works, for what an intruder would find there."""
    writes = {"registry": [], "planner": ["/var/cache/unicron"], "node-1": ["/run/unicron", "/checkpoints"]}
    for service in ("registry", "planner", "node-1"):
        found = json.loads(cluster.execute(service, "python", "-c", LOOK))
        assert found == {"user": 10001, "rights": 0, "none new": "1", "writes": ["/tmp", *writes[service]], "tools": []}
    status = cluster.execute("nats", "cat", "/proc/1/status")
    assert re.search(r"^Uid:\t10001\t10001\t10001\t10001$", status, re.MULTILINE)
    assert re.search(r"^CapBnd:\t0{16}$", status, re.MULTILINE)
    assert re.search(r"^NoNewPrivs:\t1$", status, re.MULTILINE)


@pytest.mark.compose
@pytest.mark.timeout(BUILD_S)
def test_the_images_are_small(images):
    for image, limit in LIMIT_MB.items():
        assert images.size(image) < limit * 10**6, image


def typed(page: str, part: str) -> list[str]:
    """Return the commands of a part of a page, in their order."""
    text = (ROOT / page).read_text().partition(f"# {part}\n")[2].partition("\n## ")[0]
    return [line.partition("  #")[0].strip() for line in text.splitlines() if line.startswith("    ")]


def secrets_in(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.compose
@pytest.mark.exhaustive("the commands find a key where unit tests say")
@pytest.mark.timeout(BUILD_S + 1200)
async def test_readme_in_its_order_leaves_the_keys_of_the_first_cluster_alone(tmp_path):
    """`unicron up`, then the containers in the same folder and on the same port, then `unicron up` again."""
    cluster = Cluster(command(), tmp_path, "-f", str(ROOT / "docker-compose.yml"), cwd=tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    own = {
        "unicron up": f"unicron up --port {cluster.port} --console-port {free_port()}",
        "unicron status --watch": ":",
        "make install": ":",
    }
    _, *first = [own.get(line, line) for line in typed("README.md", "A cluster of your own")]
    second = [own.get(line, line) for line in typed("docs/start/containers.md", "A cluster in containers")]
    try:
        for line in first:
            cluster.type(line)
        before = secrets_in(tmp_path / ".unicron" / "keys")
        assert before
        for line in second:
            cluster.type(line)
            if "docker cp" in line:
                await content(cluster)
        assert secrets_in(tmp_path / ".unicron" / "keys") == before
        assert "as it was started before" in cluster.type("unicron up")
        assert "gpt" in cluster.type("unicron tasks"), "the first cluster lets its user in, and goes on"
    finally:
        with contextlib.suppress(pytest.fail.Exception):
            cluster.type("unicron down")
        cluster.compose("down", "-v", "--remove-orphans", "-t", "3")


@pytest.mark.compose
@pytest.mark.timeout(BUILD_S + 1200)
async def test_a_node_dies_and_comes_back_in_containers(tmp_path):
    spec = load(TASK_FILE).spec
    full = min(spec.max_workers, 6)
    with running(tmp_path) as cluster:
        async with connected(cluster) as client:
            await status_when(client, "all nodes are up", lambda status: up(status, *NODES))

            cluster.unicron("submit", str(TASK_FILE))
            check_confinement(cluster)
            trained = lambda status: trains(status, spec.name, full, 9)  # noqa: E731
            status = await status_when(client, f"ten iterations on {full} workers", trained)

            view = task_of(status, spec.name)
            assert view
            victim = view.members[-1].node
            cluster.docker("kill", victim)
            shrunk = lambda status: trains(status, spec.name, full - 2, view.iteration + 1)  # noqa: E731
            status = await status_when(client, f"training goes on without {victim}", shrunk)
            assert node_of(status, victim).state is NodeState.LOST
            assert victim not in {member.node for member in task_of(status, spec.name).members}
            failures = json.loads(await asyncio.to_thread(fetched, f"{cluster.console}/api/failures"))
            assert [victim, [spec.name]] in [[line["node"], line["tasks"]] for line in failures]
            assert "<title>" in await asyncio.to_thread(fetched, cluster.console)

            before = task_of(status, spec.name).iteration
            cluster.docker("start", victim)
            grown = lambda status: up(status, victim) and trains(status, spec.name, full, before)  # noqa: E731
            status = await status_when(client, f"{victim} is back and the task at its full size", grown)
            assert victim in {member.node for member in task_of(status, spec.name).members}

            cluster.unicron("remove", spec.name)
            cluster.unicron("submit", str(short_task(tmp_path)))
            ended = lambda status: (view := task_of(status, "short")) and view.state is TaskState.FINISHED  # noqa: E731
            status = await status_when(client, "a short task finishes", ended)
            assert task_of(status, "short").iteration >= SHORT - 1


@pytest.mark.compose
@pytest.mark.timeout(BUILD_S + 600)
async def test_a_server_of_three_dies_and_then_a_node_in_containers(tmp_path):
    spec = load(TASK_FILE).spec
    full = min(spec.max_workers, 6)
    with running(tmp_path, "--env-file", str(ROOT / "deploy" / "ha.env")) as cluster:
        async with connected(cluster) as client:
            await status_when(client, "all nodes are up", lambda status: up(status, *NODES))
            journal = (await client.bus.jetstream.stream_info(topology.STREAM)).cluster
            assert {journal.leader, *(each.name for each in journal.replicas)} == {"nats", "nats-2", "nats-3"}
            cluster.unicron("submit", str(TASK_FILE))
            trained = lambda status: trains(status, spec.name, full, 4)  # noqa: E731
            await status_when(client, f"five iterations on {full} workers", trained)

            # one that leads the journal, where that is not the one whose port the host has
            cluster.docker("kill", journal.leader if journal.leader != "nats" else "nats-2")
            cluster.docker("kill", "node-3")
            lost_at = task_of(await status_when(client, "somebody answers", lambda _: True), spec.name).iteration

            def shrunk(status: Status) -> bool:
                # with its server a node may lose its place for a moment: it is back, and then dies
                return node_of(status, "node-3").state is NodeState.LOST and trains(
                    status, spec.name, full - 2, lost_at + 1
                )

            await status_when(client, "training goes on without server and node", shrunk)
            await content(cluster)
