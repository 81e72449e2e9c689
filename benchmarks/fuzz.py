"""An attack on an open bus: garbage, real messages with one field changed, and forged commands, while a task trains.

    python -m benchmarks.fuzz --minutes 10 --json

The cluster is a real one of this machine, and whoever reaches its bus may say anything. A field is changed into what
no field of that name can hold, or what contradicts everything before: an epoch or a plan far ahead. Commands are forged
with tokens that nobody was given. (A change that makes another message that could be real does what that would do, on a
bus without keys; it is no part of this.) No process may end by it, no forged command be obeyed, no real one be refused,
and once it is over a fault must be healed, a task be trained and every node be used, before and after all services and
an agent were started again: `poisoned` counts what of that fails, and the details name it.
"""

import argparse
import asyncio
import contextlib
import math
import os
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from unicron_deploy.embedded import Cluster
from unicron_deploy.nats_server import free_port

from benchmarks.output import as_json
from unicron import codec, subjects
from unicron.bootstrap import connected_client
from unicron.bus import nats
from unicron.client import Client
from unicron.contracts.commands import StartWorker, StopWorker
from unicron.contracts.events import CommandRefused, DeadLetter, IterationFinished, Regrouped, WorkerExited, WorkerReady
from unicron.contracts.tasks import NodeState, TaskSpec, TaskState
from unicron.errors import UnicronError
from unicron.said import received
from unicron.services import SERVICES
from unicron.settings import Settings

SCRIPT = """
import time, torch
from unicron.train import Session

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.Adam(model.parameters())
session = Session(seed=1)
session.protect(model=model, optimizer=optimizer)
for iteration in session.iterations():
    for microbatch in session.microbatches():
        time.sleep(0.01)
        session.backward(model(torch.randn(4, 8)).square().mean())
    session.step()
"""

FAR_AHEAD = ("Regrouped", "CollectiveFailed", "TaskStateChanged", "PlanDecided")
"""Messages whose epoch or number is also set far ahead."""

NODES, SLOTS = 2, 2
RATE = 2000
"""Messages a second."""

KEPT = 40
"""Real messages of each type that are changed and sent again."""

HEALED_S = 60.0
"""Seconds within which each check must be through."""

NUMBERS: tuple[Any, ...] = (0, -1, 1, 2**31, 2**53, 2**63 - 1, 2**64 - 1, -(2**63), 1e-320, 1e18, 1e308)
NOT_FINITE = (math.nan, math.inf, -math.inf)
TEXTS = ("", "x", "node-99", "../../etc/passwd", "a.b.>", "\0\x1b[2J", "x" * 5000, "\u202e")


class Attacker:
    """Listens to what is said on the bus, and says worse.

    Attributes:
        said: how many messages of each kind.
        heard: facts of the cluster since the beginning.
        copied: ids of messages of which a changed copy was sent, after they had been heard themselves.
    """

    def __init__(self, bus: nats.NatsBus, seed: int) -> None:
        self._bus, self._random = bus, Random(seed)
        self._real: dict[str, list[tuple[str, bytes]]] = {}
        self.said: Counter[str] = Counter()
        self.copied: set[str] = set()
        self.heard: list[Any] = []

    async def listen(self) -> None:
        """Keep what is real until cancelled."""
        await asyncio.gather(self._follow(), self._hear())

    async def _follow(self) -> None:
        async for entry in self._bus.follow(subjects.JOURNAL, 0):
            self._keep(entry.subject, entry.data)

    async def _hear(self) -> None:
        async for heard in self._bus.hear([f"{subjects.ROOT}.tel.>"]):
            self._keep(heard.subject, heard.data)

    def _keep(self, subject: str, data: bytes) -> None:
        with contextlib.suppress(UnicronError):  # of what we changed ourselves, too
            message = received(subject, data)
            if isinstance(
                message, CommandRefused | DeadLetter | WorkerExited | WorkerReady | Regrouped | IterationFinished
            ):
                self.heard.append(message)
            if not message.id.startswith("fuzz"):
                kept = self._real.setdefault(type(message).__name__, [])
                kept.append((subject, data))
                del kept[:-KEPT]

    async def attack(self, seconds: float) -> None:
        """Send for so long."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            began = time.monotonic()
            for _ in range(RATE // 20):
                kind = self._random.choices(["garbage", "changed", "forged"], [50, 48, 2])[0]
                subject, data = getattr(self, f"_{kind}")()
                with contextlib.suppress(UnicronError):
                    await self._bus.tell(subject, data)
                    self.said[kind] += 1
            await asyncio.sleep(max(0.0, 0.05 - (time.monotonic() - began)))

    def _one(self) -> tuple[str, bytes]:
        return self._random.choice(self._real[self._random.choice(sorted(self._real))])

    def _garbage(self) -> tuple[str, bytes]:
        subject, data = self._one()
        random = self._random
        nested = b"\x91" * random.randint(1, 5000)
        cut = data[: random.randint(0, len(data))]
        return subject, random.choice([random.randbytes(random.randint(0, 300)), nested, cut, b"\xc1" + cut, b""])

    def _changed(self) -> tuple[str, bytes]:
        """Return a real message with one field changed into what can't be."""
        while True:
            subject, data = self._one()
            plain = msgspec.msgpack.decode(codec.encode(codec.decode_message(data)))
            if plain["type"] in FAR_AHEAD and self._random.random() < 0.3:
                inside = plain.get("plan", plain)
                inside["number" if "plan" in plain else "epoch"] = self._random.randint(10**7, 10**9)
                return subject, msgspec.msgpack.encode(plain)
            self._change(plain)
            with contextlib.suppress(OverflowError):
                changed = msgspec.msgpack.encode(plain)
                if not self._could_be(subject, changed):
                    self.copied.add(codec.decode_message(data).id)
                    return subject, changed

    @staticmethod
    def _could_be(subject: str, data: bytes) -> bool:
        """Return whether a message is in range, and where it belongs."""
        try:
            now = None if ".cmd." in subject else time.time()  # agents don't hold times against their clocks
            received(subject, data, now)
        except UnicronError:
            return False
        return True

    def _change(self, inside: Any) -> None:
        """Change one value somewhere in a map or a list."""
        keys = [key for key in (inside if isinstance(inside, dict) else range(len(inside))) if key != "type"]
        if not keys:
            return
        key = self._random.choice(keys)
        value = inside[key]
        if isinstance(value, dict | list) and value and self._random.random() < 0.8:
            self._change(value)
        elif not isinstance(value, bool):
            inside[key] = self._other(value)

    def _other(self, value: Any) -> Any:
        random = self._random
        if isinstance(value, int):
            return random.choice([*NUMBERS[:8], "7", None])
        if isinstance(value, float):
            return random.choice([*NUMBERS, *NOT_FINITE])
        if isinstance(value, list):
            return random.choice([[], value * 100, [None], "x"])
        return random.choice([*TEXTS, 7, None, [value]])

    def _forged(self) -> tuple[str, bytes]:
        """Return a command that nobody has the right to give: its token was never given out."""
        number, random = self.said["forged"], self._random
        node = f"node-{random.randint(1, NODES)}"
        token = random.choice([2**53, 2**53 - number, 10**12 + number])
        own_id = f"fuzz-forged-{number}"
        head: dict[str, Any] = {"node": node, "token": token, "id": own_id, "at": time.time()}
        spec = TaskSpec(name="forged", command=["true"])
        worker = f"forged-{number}"
        start = StartWorker(**head, source="transition", slot=1, worker=worker, task="forged", spec=spec)
        stop = StopWorker(**head, source="transition", slot=0, worker="fuzzed-1", task="fuzzed")
        command = random.choice([start, stop])
        return subjects.of(command), codec.encode(command)


class Checks:
    """What must go on as if nothing had been.

    Attributes:
        failed: in words.
    """

    def __init__(self, cluster: Cluster, client: Client, attacker: Attacker) -> None:
        self._cluster, self._client, self._attacker = cluster, client, attacker
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
            done = [each for each in self._attacker.heard if isinstance(each, IterationFinished)]
            real = [each for each in done if each.id[:5] != "fuzz" and each.at > since and each.task == "fuzzed"]
            return sum(each.world_size == size for each in real) >= 3

        await self._until(trains)

    async def _heals(self) -> None:
        view = next(view for view in (await self._client.status()).tasks if view.spec.name == "fuzzed")
        victim = view.members[-1]
        await self._client.inject(victim.node, "kill-worker", victim.worker)

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
    script = str(root / "script.py")
    return TaskSpec(
        name=name,
        command=["python", script],
        workdir=str(root),
        min_workers=1,
        max_workers=workers,
        microbatches=6,
        iterations=iterations,
        throughput={count: float(count) for count in range(1, workers + 1)},
    )


async def run(root: Path, seconds: float, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Attack a cluster in `root` for so long; return figures and details."""
    cluster = Cluster(root, nodes=NODES, slots=SLOTS, port=free_port(), insecure=True)
    await asyncio.to_thread(cluster.start)
    try:
        (cluster.root / "script.py").write_text(SCRIPT)
        await cluster.wait_until_ready()
        settings = msgspec.structs.replace(Settings.load([]), nats_url=cluster.url)
        async with connected_client(settings, "fuzz") as client:
            return await _attacked(cluster, client, await nats.connect(settings, "attacker"), seconds, seed)
    finally:
        await asyncio.to_thread(cluster.stop)


async def _attacked(
    cluster: Cluster, client: Client, bus: nats.NatsBus, seconds: float, seed: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    attacker = Attacker(bus, seed)
    listening = asyncio.create_task(attacker.listen())
    checks = Checks(cluster, client, attacker)
    await client.submit(task("fuzzed", cluster.root, workers=3, iterations=1_000_000))
    await checks.all("before")
    memory, began = _memory_mb(cluster), time.time()
    await attacker.attack(seconds)
    crashed = sorted(set(cluster.names) - set(cluster.alive()))
    grown = _memory_mb(cluster) - memory
    iterations = sum(isinstance(each, IterationFinished) and each.at > began for each in attacker.heard)
    await checks.all("after")
    for name in SERVICES:
        cluster.kill(name)
        await asyncio.to_thread(cluster.start_process, name)
    cluster.kill(cluster.nodes[0])
    await asyncio.to_thread(cluster.start_process, cluster.nodes[0])
    await checks.all("restarted")
    crashed += sorted(set(cluster.names) - set(cluster.alive()))
    refused = [each for each in attacker.heard if isinstance(each, CommandRefused)]
    foreign = [each for each in refused if "fuzz" not in each.command and each.id[:5] != "fuzz"]
    real = [each.reason for each in foreign if each.command not in attacker.copied]
    told = [each for each in attacker.heard if isinstance(each, WorkerReady | WorkerExited)]
    obeyed = {each.worker for each in told if each.task == "forged" and not each.id.startswith("fuzz")}
    listening.cancel()
    await bus.close()
    figures = {
        "messages": attacker.said.total(),
        "crashes": len(crashed),
        "poisoned": len(checks.failed),
        "wrong_commands_obeyed": len(obeyed),
        "real_commands_refused": len(real),
        "rss_growth_mb": round(grown, 1),
        "iterations_meanwhile": iterations,
        "dead_letters": sum(isinstance(each, DeadLetter) for each in attacker.heard),
    }
    said = {"said": dict(attacker.said), "crashed": crashed, "poisoned": checks.failed, "refused": real[:10]}
    return figures, {**said, "seed": seed, "seconds": seconds}


def _memory_mb(cluster: Cluster) -> float:
    """Return the resident memory of the services and agents."""
    pages = 0
    for name, process in cluster.processes.items():
        with contextlib.suppress(OSError):
            pages += int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) if name != "nats" else 0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    """Attack, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long")
    parser.add_argument("--seed", type=int, default=1, help="of what is sent")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="unicron-fuzz-") as root:
        figures, details = asyncio.run(run(Path(root), 60 * arguments.minutes, arguments.seed))
    if arguments.json:
        print(as_json("fuzz", figures, details=details))
    else:
        print("\n".join(f"{name:24} {value}" for name, value in {**figures, **details}.items()))


if __name__ == "__main__":
    main()
