"""From a lost node to the new plan, through a real bus: what the lookup table is for.

    python -m benchmarks.decision --json

A real nats-server, the planner as a process of its own, and this process as the one that tells of the failure and waits
for the answer: seconds from before FailureDetected is sent until PlanDecided is here. 6 tasks on 16 nodes of 8 slots.
In between the node comes back, and the planner has a moment to make its next table, as it has between real failures.
Beside it, over the same connection: one fact that goes into the journal and comes back, which is the floor under every
answer of a service.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace
from unicron_deploy.nats_server import NatsServer, free_port

from benchmarks.output import as_json
from unicron import codec, subjects
from unicron.bus import nats, topology
from unicron.contracts.base import Message
from unicron.contracts.events import Alert, FailureDetected, NodeAdmitted, PlanDecided, TaskSubmitted
from unicron.contracts.failures import DetectionMethod, FailureStatus, Severity
from unicron.contracts.tasks import Slot, TaskSpec
from unicron.said import OF_SERVICES
from unicron.settings import Settings

NODES, SLOTS, TASKS = 16, 8, 6
REST_S = 0.05
PATIENCE_S = 60.0


class Told:
    """The planner's journal: what is sent, and when what came back."""

    def __init__(self, bus: nats.NatsBus) -> None:
        self._bus = bus
        self._sent = 0
        self._news: asyncio.Queue[tuple[float, Message]] = asyncio.Queue()

    async def follow(self) -> None:
        """Note everything that comes."""
        kinds = subjects.events(PlanDecided, Alert)
        async for entry in self._bus.follow(kinds, 0):
            self._news.put_nowait((time.perf_counter(), codec.decode_message(entry.data)))

    async def send(self, message: Message) -> float:
        """Put a fact into the journal; return when that began."""
        self._sent += 1
        source = OF_SERVICES.get(type(message), "benchmark")
        fact = replace(message, id=f"fact-{self._sent}", at=time.time(), source=source)
        began = time.perf_counter()
        await self._bus.append(subjects.of(fact), codec.encode(fact), fact.id)
        return began

    async def plan(self, trigger: str) -> tuple[float, PlanDecided]:
        """Return the next plan with this trigger, and when it came."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                at, message = await self._news.get()
                if isinstance(message, PlanDecided) and message.plan.trigger == trigger:
                    return at, message

    async def echo(self) -> float:
        """Return the seconds that a fact takes into the journal and back."""
        began = await self.send(Alert(text="echo"))
        async with asyncio.timeout(PATIENCE_S):
            while True:
                at, message = await self._news.get()
                if isinstance(message, Alert):
                    return at - began


def node(name: str, incarnation: int) -> NodeAdmitted:
    """Return the news that a node of `SLOTS` slots is there."""
    there = [Slot(index=index) for index in range(SLOTS)]
    return NodeAdmitted(node=name, incarnation=str(incarnation), host="127.0.0.1", slots=there)


def task(number: int) -> TaskSubmitted:
    """Return a task of its own weight whose FLOP/s grow less than its workers do, and stop growing near its share."""
    every = NODES * SLOTS
    curve = {size: 1e14 * size * (1 - 0.5 * size / every) for size in range(1, every + 1)}
    name = f"task-{number}"
    spec = TaskSpec(name=name, command=["train"], weight=0.5 + 0.3 * number, max_workers=every, throughput=curve)
    return TaskSubmitted(task=name, spec=spec)


async def rounds(told: Told, count: int) -> dict[str, object]:
    """Lose one node after another, each after the last is back; return the figures."""
    for number in range(NODES):
        await told.send(node(f"node-{number}", 0))
    for number in range(TASKS):
        await told.send(task(number))
    await told.plan(f"task_submitted:task-{TASKS - 1}")
    taken, inside, echoes, prepared = [], [], [], 0
    for turn in range(count):
        name = f"node-{turn % NODES}"
        await asyncio.sleep(REST_S)
        method, status = DetectionMethod.NODE_HEALTH, FailureStatus.LOST_CONNECTION
        failed = FailureDetected(severity=Severity.SEV1, method=method, status=status, node=name)
        began = await told.send(failed)
        at, decided = await told.plan(f"node_lost:{name}")
        taken.append((at - began) * 1e3)
        inside.append(decided.plan.lookup_s * 1e3)
        prepared += decided.plan.prepared
        await told.send(node(name, turn + 1))
        await told.plan(f"node_joined:{name}")
        echoes.append(await told.echo() * 1e3)
    return {
        "rounds": count,
        "prepared": prepared,
        **spread("decision", taken),
        **spread("planner_inside", inside),
        **spread("echo", echoes),
    }


def spread(name: str, milliseconds: list[float]) -> dict[str, float]:
    """Return the median and the 99th percentile."""
    return {
        f"{name}_p50_ms": round(statistics.median(milliseconds), 3),
        f"{name}_p99_ms": round(statistics.quantiles(milliseconds, n=100)[98], 3),
    }


async def measure(count: int, folder: Path) -> dict[str, object]:
    """Start everything, and return the figures."""
    server = NatsServer(folder / "nats", free_port())
    server.start()
    planner = None
    try:
        bus = await nats.connect(Settings(nats_url=server.url), "benchmark")
        await topology.provision(bus.jetstream)
        environment = {**os.environ, "UNICRON_NATS_URL": server.url}
        planner = await asyncio.create_subprocess_exec(sys.executable, "-m", "unicron_planner", env=environment)
        told = Told(bus)
        following = asyncio.create_task(told.follow())
        try:
            return await rounds(told, count)
        finally:
            following.cancel()
            await bus.close()
    finally:
        if planner is not None:
            planner.terminate()
            await planner.wait()
        server.stop()


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(options.rounds, Path(folder)))
    floor = {name.removeprefix("echo_"): value for name, value in figures.items() if name.startswith("echo_")}
    text = "\n".join(f"{name:22} {value}" for name, value in figures.items())
    print(as_json("decision", figures, {"one fact into the journal and back": floor}) if options.json else text)


if __name__ == "__main__":
    main()
