"""Clusters in containers, where this machine has an engine: projects of Compose, each with its own names and ports."""

import asyncio
import contextlib
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import pytest

from helpers import ROOT, proxies
from helpers.ports import free_port
from unicron.client import Client
from unicron.contracts.answers import NodeView, Status, TaskView
from unicron.contracts.tasks import NodeState, TaskState
from unicron.errors import UnicronError
from unicron.service.bootstrap import connected_client
from unicron.settings import Settings

IMAGES = {"unicron-control": "keys", "unicron-planner": "planner", "unicron-node": "node-1"}
"""The images, each with a service that has it."""

BUILD_S = 900
"""Long enough to download all packages over a slow line."""


def command() -> list[str]:
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

    def __init__(self, compose: list[str], folder: Path, *options: str, cwd: Path = ROOT) -> None:
        self._compose, self._cwd = [*compose, *options], cwd
        self.key = folder / "operator" / "operator.nk"
        self.project = f"unicron-test-{uuid.uuid4().hex[:8]}"
        self.port = free_port()
        self.url = f"nats://127.0.0.1:{self.port}"
        console = free_port()
        self.console = f"http://127.0.0.1:{console}"
        ports = {"UNICRON_NATS_PORT": str(self.port), "UNICRON_CONSOLE_PORT": str(console)}
        self.environment = {**proxies.USUAL, "PWD": str(ROOT), "UNICRON_NATS_URL": self.url, **ports}

    def compose(self, *words: str) -> str:
        """Run one compose command and return what it printed."""
        return self._run([*self._compose, "-p", self.project, *words])

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
        self.environment["UNICRON_NATS_NKEY"] = str(self.key)

    def type(self, *lines: str) -> str:
        """Run lines as pages have them, in one shell, and return what they printed."""
        return self._run(["bash", "-c", self._script(lines)])

    @contextlib.contextmanager
    def typing(self, line: str, **environment: str) -> Iterator[None]:
        """Have a line run that does not end by itself, without the operator's key."""
        without = {name: value for name, value in self.environment.items() if name != "UNICRON_NATS_NKEY"}
        words = ["bash", "-c", self._script([f"exec env {line}"])]
        with subprocess.Popen(words, env={**without, **environment}, cwd=self._cwd) as process:
            try:
                yield
            finally:
                process.terminate()

    def _script(self, lines: Sequence[str]) -> str:
        """Return a script of lines as pages have them, for this project, and for images that are built already."""
        compose, unicron = " ".join([*self._compose, "-p", self.project]), f"{sys.executable} -m unicron_cli"
        text = "\n".join(lines).replace("docker-compose", compose).replace(" --build", " --no-build")
        text = re.sub(r"(?<!\S)\.venv/bin/unicron", unicron, text)
        text = re.sub(r"(?<!\S)\.venv/bin/python", sys.executable, text)
        return f'set -e\nunicron() {{ {unicron} "$@"; }}\n{text}'

    def story(self) -> str:
        """Return what there is to read after a failure: the containers, their last lines, and the last events."""
        events = self.unicron("events").splitlines()[-60:]
        return "\n".join([self.compose("ps"), self.compose("logs", "--no-color", "--tail", "60"), *events])

    def _labels(self, service: str) -> list[str]:
        labels = {"project": self.project, "service": service}
        return [word for key, value in labels.items() for word in ("-f", f"label=com.docker.compose.{key}={value}")]

    def _run(self, command: list[str]) -> str:
        ends = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        done = subprocess.run(command, cwd=self._cwd, env=self.environment, text=True, check=False, **ends)
        if done.returncode:
            pytest.fail(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-8000:]}")
        return done.stdout


@contextlib.contextmanager
def running(folder: Path, *options: str, ends: Sequence[str] = ()) -> Iterator[Cluster]:
    """Have a cluster of docker-compose.yml; `ends` are further options of the command that ends it."""
    cluster = Cluster(command(), folder, *options)
    try:
        cluster.compose("up", "--no-build", "-d")
        cluster.fetch_key()
        yield cluster
    finally:
        # written, and so shown by pytest where the test fails; the cluster goes away whatever that does
        with contextlib.suppress(pytest.fail.Exception):
            sys.stdout.write(cluster.story())
        cluster.compose(*ends, "down", "-v", "--remove-orphans", "-t", "3")


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
