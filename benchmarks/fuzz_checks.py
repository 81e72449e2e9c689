"""Checks around an attack on a cluster that training, healing, and exact parameters go on undisturbed."""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import torch
from unicron_deploy.embedded import Cluster

from unicron.aio import retry_until_available
from unicron.client import Client
from unicron.contracts.base import Message
from unicron.contracts.events import IterationFinished
from unicron.contracts.tasks import NodeState, TaskSpec, TaskState
from unicron.errors import UnicronError

SCRIPT = """
import os, sys, time, torch
from unicron.train import Session

folder = sys.argv[1]
os.makedirs(folder, exist_ok=True)
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
session = Session(seed=1)
session.protect(model=model, optimizer=optimizer)
for iteration in session.iterations():
    for microbatch in session.microbatches():
        time.sleep(float(os.environ.get("FUZZ_PAUSE_S", "0.01")))
        samples = torch.randn(4, 8)
        wanted = samples.sum(1, keepdim=True) + torch.randn(4, 1)
        session.backward((model(samples) - wanted).square().mean())
    session.step()
    if session.iteration == iteration + 1 and session.iteration % 50 == 0:
        scratch = f"{folder}/{session.iteration}.{os.getpid()}"
        torch.save(model.state_dict(), scratch)
        os.replace(scratch, f"{folder}/{session.iteration}.pt")
"""
"""Trains what never settles, and keeps the parameters after every 50th update."""

MICROBATCHES = 6

HEALED_S = 60.0
"""Seconds within which each check must be through."""


class Checks:
    """Checks that a cluster goes on undisturbed.

    Attributes:
        failed: in words.
    """

    def __init__(self, cluster: Cluster, client: Client, heard: Sequence[Message]) -> None:
        self._cluster, self._client, self._heard = cluster, client, heard
        self.failed: list[str] = []
        self._tasks = 0

    async def all(self, when: str) -> None:
        """Check everything; `when` is for the report."""
        await self._within(f"{when}: every node is used", self._ready)
        await self._within(f"{when}: the task trains", lambda: self._trains(time.time()))
        await self._within(f"{when}: a killed worker is replaced", self._heals)
        await self._within(f"{when}: another task is trained", self._another)

    async def _within(self, what: str, check: Callable[[], Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(HEALED_S):
                await check()
        except (TimeoutError, UnicronError, LookupError) as error:
            self.failed.append(f"{what}: {error!r}; {await self._standing()}")

    async def _standing(self) -> str:
        with contextlib.suppress(UnicronError):
            status = await self._client.status()
            nodes = {view.node: str(view.state) for view in status.nodes}
            tasks = {
                view.spec.name: f"{view.state} {[each.worker for each in view.members]} {view.reason[:200]}"
                for view in status.tasks
            }
            plan = status.plan and {share.task: [*map(str, share.slots)] for share in status.plan.shares}
            return f"nodes {nodes}, tasks {tasks}, plan {plan}"
        return "no status"

    async def _until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        while True:
            with contextlib.suppress(UnicronError):
                if await condition():
                    return
            await asyncio.sleep(0.1)

    async def _ready(self) -> None:
        async def ready() -> bool:
            states = {view.node: view.state for view in (await self._client.status()).nodes}
            return all(states.get(node) == NodeState.UP for node in self._cluster.nodes)

        await self._until(ready)

    async def _trains(self, since: float, size: int = 3) -> None:
        async def trains() -> bool:
            done = [each for each in self._heard if isinstance(each, IterationFinished)]
            real = [each for each in done if each.id[:5] != "fuzz" and each.at > since and each.task == "fuzzed"]
            return sum(each.world_size == size for each in real) >= 3

        await self._until(trains)

    async def _heals(self) -> None:
        view = next(view for view in (await self._client.status()).tasks if view.spec.name == "fuzzed")
        victim = view.members[-1]
        # its agent may have been started again just now: the node counts as up, and nobody answers there yet
        await retry_until_available(
            lambda: self._client.inject(victim.node, "kill-worker", victim.worker), "killing a worker"
        )

        async def replaced() -> bool:
            view = next(view for view in (await self._client.status()).tasks if view.spec.name == "fuzzed")
            names = [member.worker for member in view.members]
            return view.state == TaskState.RUNNING and len(names) == 3 and victim.worker not in names

        await self._until(replaced)
        await self._trains(time.time())

    async def _another(self) -> None:
        self._tasks += 1
        name = f"after-{self._tasks}"
        await self._client.submit(task(name, self._cluster.root, workers=1, iterations=5))

        async def finished() -> bool:
            views = (await self._client.status()).tasks
            return any(view.spec.name == name and view.state == TaskState.FINISHED for view in views)

        await self._until(finished)


def task(name: str, root: Path, workers: int, iterations: int) -> TaskSpec:
    """Return a task that trains a small model."""
    return TaskSpec(
        name=name,
        command=["python", str(root / "script.py"), str(root / name)],
        workdir=str(root),
        min_workers=1,
        max_workers=workers,
        microbatches=MICROBATCHES,
        iterations=iterations,
        throughput={count: float(count) for count in range(1, workers + 1)},
    )


def parameters_differ(root: Path, name: str) -> float:
    """Return by how much the parameters of a task differ from those of a run without a cluster, at most ever."""
    kept = {path.name: path for path in (root / name).glob("*.pt")}
    last = max(int(path.stem) for path in kept.values())
    alone = {"UNICRON_ITERATIONS": str(last), "UNICRON_MICROBATCHES": str(MICROBATCHES), "FUZZ_PAUSE_S": "0"}
    command = [sys.executable, str(root / "script.py"), str(root / "undisturbed")]
    subprocess.run(command, env={**os.environ, **alone}, check=True)
    worst = 0.0
    for number, path in kept.items():
        ours, theirs = torch.load(path), torch.load(root / "undisturbed" / number)
        worst = max(worst, *(float((ours[key] - theirs[key]).abs().max()) for key in theirs))
    return worst
