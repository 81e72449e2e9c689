"""Real clusters of this machine, what their journal and telemetry say, and strikes on their workers."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from unicron_deploy.embedded import Cluster
from unicron_deploy.nats_server import NatsServer, free_port

from benchmarks.harness.command import ROOT
from benchmarks.harness.processes import ONE_THREAD
from unicron import subjects
from unicron.aio import insist
from unicron.bus import topology
from unicron.bus.nats import NatsBus
from unicron.client import Client
from unicron.contracts.base import Message
from unicron.contracts.events import IterationFinished, Regrouped, TaskStateChanged, WorkerReady
from unicron.contracts.tasks import TaskSpec
from unicron.errors import UnicronError
from unicron.service.bootstrap import connected, connected_client
from unicron.settings import Settings

PATIENCE_S = 180.0
TRAINED = ["-m", "benchmarks.harness.trained"]


def task(name: str, words: Sequence[str], workers: int, **fields: Any) -> TaskSpec:
    """Return a task of so many workers that each run Python with these arguments."""
    usual = {"workdir": str(ROOT), "min_workers": workers, "iterations": 10**6, "env": {}, **fields}
    usual["env"] = ONE_THREAD | usual["env"]
    return TaskSpec(name=name, command=["python", *words], max_workers=workers, **usual)


def shrinking(workers: int) -> dict[str, Any]:
    """Return the fields of a task that also trains with fewer workers, and slower in proportion."""
    return {"min_workers": 1, "throughput": {count: float(count) for count in range(1, workers + 1)}}


class Scene:
    """A running cluster, and what it has said, iterations that ended included."""

    def __init__(self, cluster: Cluster, client: Client) -> None:
        self.cluster, self.client = cluster, client
        self.iterations: list[IterationFinished] = []
        self._said: dict[type[Message], list[Any]] = defaultdict(list)

    async def follow(self, kinds: Sequence[type[Message]]) -> None:
        """Keep what goes into the journal, of these kinds or, without any, of all."""
        async for _, message in self.client.follow(filters=subjects.events(*kinds) if kinds else subjects.JOURNAL):
            self._said[type(message)].append(message)

    async def listen(self) -> None:
        """Keep which iterations end."""
        async for message in self.client.telemetry(IterationFinished):
            if isinstance(message, IterationFinished):
                self.iterations.append(message)

    def said(self, kind: type[Message], task: str = "", since: float = 0.0) -> list[Any]:
        """Return the messages of a kind after a Unix second; of one task where it is named."""
        found = [message for message in self._said[kind] if message.at > since]
        return [message for message in found if not task or message.task == task]

    def regrouped_s(self, task: str, since: float, world: int) -> float | None:
        """Return the seconds from a Unix second until all ranks of a whole membership had formed their groups."""
        return whole_s(self.said(Regrouped, task), since, world)

    async def whole(self, task: str, since: float, world: int) -> float:
        """Wait until all ranks are in one membership again; return the seconds from `since` until they were."""
        return float(await until(lambda: self.regrouped_s(task, since, world), f"{task} has {world} workers"))

    async def pid(self, worker: str) -> int:
        """Return the process of a worker."""
        ready = await until(lambda: [m.pid for m in self.said(WorkerReady) if m.worker == worker], f"{worker} is ready")
        return int(ready[-1])

    async def strike(self, task: str, number: int) -> float:
        """Kill one of the workers of a task, each in turn; return the Unix second just before."""
        regrouped = self.said(Regrouped, task)
        newest = max(fact.epoch for fact in regrouped)
        members = {fact.rank: fact.worker for fact in regrouped if fact.epoch == newest}
        pid = await self.pid(members[sorted(members)[number % len(members)]])
        at = time.time()
        os.kill(pid, signal.SIGKILL)
        return at

    async def view(self, task: str) -> Any:
        """Return what the registry says of a task, as soon as it answers and knows it."""
        while True:
            with contextlib.suppress(UnicronError, StopIteration):
                return next(view for view in (await self.client.status()).tasks if view.spec.name == task)
            await asyncio.sleep(0.1)

    async def until_ended(self, task: str, patience_s: float = PATIENCE_S) -> str:
        """Wait for the end of a task; return its state, "hangs" if it has none in time."""
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            changes = self.said(TaskStateChanged, task)
            if changes and changes[-1].state.ended:
                await asyncio.sleep(0.3)  # workers leave, and what they said is on its way
                return str(changes[-1].state)
            await asyncio.sleep(0.05)
        return "hangs"

    async def reached(self, task: str, iteration: int) -> None:
        """Wait until a task has ended an iteration, or has ended itself."""
        deadline = time.monotonic() + PATIENCE_S
        while not any(done.task == task and done.iteration >= iteration for done in self.iterations):
            changes = self.said(TaskStateChanged, task)
            if time.monotonic() > deadline or (changes and changes[-1].state.ended):
                return
            await asyncio.sleep(0.01)


def whole_s(regrouped: Sequence[Regrouped], at: float, world: int) -> float | None:
    """Return the seconds from `at` until all ranks of a membership of `world` had formed their groups; None: never."""
    ends: dict[int, list[float]] = defaultdict(list)
    for fact in regrouped:
        if fact.at > at and fact.world_size == world:
            ends[fact.epoch].append(fact.at)
    return next((max(found) - at for _, found in sorted(ends.items()) if len(found) == world), None)


async def until(condition: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    """Wait until a condition returns something true; return that."""
    deadline = time.monotonic() + patience_s
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {patience_s:g} s: {what}")
        await asyncio.sleep(0.02)
    return found


@contextlib.asynccontextmanager
async def background(*jobs: Coroutine[Any, Any, Any]) -> AsyncIterator[None]:
    """Have coroutines run until the end of the block."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        yield
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def started(cluster: Cluster, *kinds: type[Message]) -> AsyncIterator[Scene]:
    """Have a cluster run until the end of the block, and hear what it says: messages of these kinds, or all."""
    await asyncio.to_thread(cluster.start)
    try:
        await cluster.wait_until_ready(PATIENCE_S)
        async with connected_client(cluster.settings(), "benchmark") as client:
            scene = Scene(cluster, client)
            async with background(scene.follow(kinds), scene.listen()):
                await asyncio.sleep(0.3)
                yield scene
    finally:
        cluster.stop()  # not in a thread: one that has not begun yet can be cancelled


def running(root: Path, nodes: int, slots: int = 1, **settings: Any) -> contextlib.AbstractAsyncContextManager[Scene]:
    """Have a cluster of so many nodes."""
    return started(Cluster(root, nodes=nodes, slots=slots, port=free_port(), **settings))


@contextlib.asynccontextmanager
async def server_only(root: Path) -> AsyncIterator[tuple[NatsServer, NatsBus]]:
    """Have a NATS server with an empty journal, and no cluster."""
    server = NatsServer(root / "nats", free_port())
    await asyncio.to_thread(server.start)
    try:
        async with connected(Settings(nats_url=server.url), "benchmark") as bus:
            await insist(lambda: topology.provision(bus.jetstream), "provisioning")
            yield server, bus
    finally:
        await asyncio.to_thread(server.stop)


@contextlib.contextmanager
def service(name: str, url: str, **environment: str) -> Any:
    """Have the process of one service run beside a server."""
    process = subprocess.Popen(
        [sys.executable, "-m", f"unicron_{name}", "--log-level", "warning"],
        env={**os.environ, "UNICRON_NATS_URL": url, **environment},
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()
