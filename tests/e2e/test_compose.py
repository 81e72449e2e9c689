"""The cluster in containers, as a user runs it: build, submit from the host, lose a node, get it back, finish."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from helpers import ROOT
from helpers.ports import free_port

from unicron.bus import topology
from unicron.client import Client
from unicron.contracts.answers import NodeView, Status, TaskView
from unicron.contracts.tasks import NodeState, TaskState
from unicron.errors import UnicronError
from unicron.service.bootstrap import connected_client
from unicron.settings import Settings
from unicron.taskfile import load

TASK_FILE = ROOT / "examples" / "gpt" / "task.yaml"
NODES = ("node-1", "node-2", "node-3")
IMAGES = {"unicron-control": "keys", "unicron-planner": "planner", "unicron-node": "node-1"}
"""The images, each with a service that has it."""

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
folders = ["/", "/opt/unicron", "/etc", "/home/unicron", "/tmp", "/run/unicron", "/var/cache/unicron"]
paths = [f"{folder}/{tool}" for folder in ("/bin", "/usr/bin", "/usr/local/bin", "/opt/unicron/bin")
         for tool in ("sh", "bash", "dash", "busybox", "apt", "dpkg", "pip", "cc")]
rights = sum(int(status[each], 16) for each in ("CapPrm", "CapEff", "CapBnd"))
print(json.dumps({"user": os.getuid(), "rights": rights, "none new": status["NoNewPrivs"].strip(),
                  "writes": list(filter(may_write, folders)), "tools": list(filter(os.path.lexists, paths))}))
"""
"""Run in a container: who it is there, what it may do, and what there is to do it with."""

BUILD_S = 900
"""Long enough to download all packages over a slow line."""


def _compose() -> list[str]:
    """Return the compose command of this machine, old or new; skip the test where nothing can run it."""
    if shutil.which("docker") is None:
        pytest.skip("no container engine: docker is not installed")
    info = subprocess.run(["docker", "info"], capture_output=True, text=True, check=False)
    if info.returncode:
        reason = (info.stderr.strip().splitlines() or ["docker info failed"])[-1]
        pytest.skip(f"no container engine: {reason}")
    if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0:
        return ["docker", "compose"]
    if shutil.which("docker-compose") is None:
        pytest.skip("no Compose: neither `docker compose` nor `docker-compose` is installed")
    return ["docker-compose"]


class Cluster:
    """A compose project of its own, on a port of its own."""

    def __init__(self, compose: list[str], folder: Path, *options: str) -> None:
        self._compose = [*compose, *options]
        self.key = folder / "operator" / "operator.nk"
        self._project = f"unicron-test-{uuid.uuid4().hex[:8]}"
        self._port = free_port()
        self.url = f"nats://127.0.0.1:{self._port}"
        console = free_port()
        self.console = f"http://127.0.0.1:{console}"
        ports = {"UNICRON_NATS_PORT": str(self._port), "UNICRON_CONSOLE_PORT": str(console)}
        self._environment = {**os.environ, "PWD": str(ROOT), **ports}

    def compose(self, *words: str) -> str:
        """Run one compose command and return what it printed."""
        return self._run([*self._compose, "-p", self._project, *words])

    def container(self, service: str) -> str:
        """Return the id of the container of `service`, running or not."""
        return self._run(["docker", "ps", "-aq", *self._labels(service)]).strip()

    def docker(self, verb: str, service: str) -> None:
        """Run `docker VERB` on the container of `service`."""
        self._run(["docker", verb, self.container(service)])

    def execute(self, service: str, *command: str) -> str:
        """Run a command in the container of `service`, and return what it printed."""
        return self._run(["docker", "exec", self.container(service), *command])

    def size(self, image: str) -> int:
        """Return the size of an image, unpacked, in bytes."""
        return int(self._run(["docker", "image", "inspect", "-f", "{{.Size}}", image]))

    def unicron(self, *words: str) -> str:
        """Run the command line on the host, as a user would."""
        return self._run([sys.executable, "-m", "unicron_cli", *words, "--nats-url", self.url])

    def fetch_key(self) -> None:
        """Fetch the operator's key, as a user would."""
        self._run(["docker", "cp", f"{self.container('keys')}:/keys/operator", str(self.key.parent)])
        self._environment["UNICRON_NATS_NKEY"] = str(self.key)

    def story(self) -> str:
        """Return what there is to read after a failure: the containers, their last lines, and the last events."""
        events = self.unicron("events").splitlines()[-60:]
        return "\n".join([self.compose("ps"), self.compose("logs", "--no-color", "--tail", "60"), *events])

    def _labels(self, service: str) -> list[str]:
        labels = {"project": self._project, "service": service}
        return [word for key, value in labels.items() for word in ("-f", f"label=com.docker.compose.{key}={value}")]

    def _run(self, command: list[str]) -> str:
        ends = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        done = subprocess.run(command, cwd=ROOT, env=self._environment, text=True, check=False, **ends)
        if done.returncode:
            pytest.fail(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-8000:]}")
        return done.stdout


@pytest.fixture(scope="module", autouse=True)
def images(tmp_path_factory) -> None:
    """Build each image once, where Compose would look at it again for each service that has it."""
    Cluster(_compose(), tmp_path_factory.mktemp("images")).compose("build", *IMAGES.values())


@contextlib.contextmanager
def running(folder: Path, *options: str) -> Iterator[Cluster]:
    cluster = Cluster(_compose(), folder, *options)
    try:
        cluster.compose("up", "--no-build", "-d")
        cluster.fetch_key()
        yield cluster
    finally:
        # written, and so shown by pytest where the test fails; the cluster goes away whatever that does
        with contextlib.suppress(pytest.fail.Exception):
            sys.stdout.write(cluster.story())
        cluster.compose("down", "-v", "--remove-orphans", "-t", "3")


@contextlib.asynccontextmanager
async def connected(cluster: Cluster) -> AsyncIterator[Client]:
    settings = Settings(nats_url=cluster.url, nats_nkey=str(cluster.key), connect_timeout_s=60)
    async with connected_client(settings, "test") as client:
        yield client


async def status_when(client: Client, what: str, holds: Callable[[Status], bool]) -> Status:
    """Ask for the status until `holds`, and return it; errors of a cluster that is just starting are waited out."""
    while True:
        with contextlib.suppress(UnicronError):
            status = await client.status()
            failed = [task for task in status.tasks if task.state is TaskState.FAILED]
            if failed:
                pytest.fail(f"waiting for {what}: the task failed: {failed[0].reason}\n{failed[0].traceback}")
            if holds(status):
                return status
        await asyncio.sleep(0.05)


async def content(cluster: Cluster) -> None:
    """Wait until the doctor finds nothing amiss: what it finds while servers elect their leaders is true, and ends."""
    while True:
        with contextlib.suppress(pytest.fail.Exception):
            assert await asyncio.to_thread(cluster.unicron, "doctor")
            return


def fetched(url: str) -> str:
    """Return what a browser on the host would get."""
    with urllib.request.urlopen(url) as answer:
        return answer.read().decode()


def node_of(status: Status, name: str) -> NodeView | None:
    return next((node for node in status.nodes if node.node == name), None)


def task_of(status: Status, name: str) -> TaskView | None:
    return next((task for task in status.tasks if task.spec.name == name), None)


def up(status: Status, *names: str) -> bool:
    return all((node := node_of(status, name)) and node.state is NodeState.UP for name in names)


def trains(status: Status, task: str, workers: int, beyond: int) -> bool:
    """Say whether `task` computes with so many workers and has got beyond an iteration."""
    view = task_of(status, task)
    return (
        view is not None
        and view.state is TaskState.RUNNING
        and len(view.members) == workers
        and view.iteration > beyond
    )


def check_confinement(cluster: Cluster) -> None:
    """Look into a container of each image, while it works, for what an intruder would find there."""
    writes = {"registry": [], "planner": ["/var/cache/unicron"], "node-1": ["/run/unicron"]}
    for service in ("registry", "planner", "node-1"):
        found = json.loads(cluster.execute(service, "python", "-c", LOOK))
        assert found == {"user": 10001, "rights": 0, "none new": "1", "writes": ["/tmp", *writes[service]], "tools": []}
    status = cluster.execute("nats", "cat", "/proc/1/status")
    assert re.search(r"^Uid:\t10001\t10001\t10001\t10001$", status, re.MULTILINE)
    assert re.search(r"^CapBnd:\t0{16}$", status, re.MULTILINE)
    assert re.search(r"^NoNewPrivs:\t1$", status, re.MULTILINE)
    for image, limit in LIMIT_MB.items():
        assert cluster.size(image) < limit * 10**6, image


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

            ended = lambda status: task_of(status, spec.name).state is TaskState.FINISHED  # noqa: E731
            status = await status_when(client, "the task finishes", ended)
            assert task_of(status, spec.name).iteration >= spec.iterations - 1


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
            shrunk = lambda status: trains(status, spec.name, full - 2, lost_at + 1)  # noqa: E731
            status = await status_when(client, "training goes on without server and node", shrunk)
            assert node_of(status, "node-3").state is NodeState.LOST
            await content(cluster)
