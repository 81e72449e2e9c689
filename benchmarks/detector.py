"""How many iteration times the detector takes, through NATS and Faust, and how late it says what follows from them.

    python -m benchmarks.detector --ranks 16384 --json

Real are the server and the detector, each a process of its own. 2,048 nodes of eight ranks are a generator's, which
tells what their agents would: one `ComputeTimed` a node and iteration, as telemetry, whose workers the detector knows
from the journal. Besides, probes: tasks of one worker whose iterations get slow and fast again by turns, so that each
few seconds a `SlowdownDetected` or `SlowdownEnded` follows from one of their iterations.

- `messages_per_s`: the highest of the rates tried, kept up for ten seconds, at which nothing was dropped or piled up:
  the median of the latencies stayed below 100 ms.
- `latency_p50_ms`, `latency_p99_ms`: at half of 5,000 messages a second, from telling the iteration that tips a probe's
  balance until the fact that follows is read from the journal.
- `wide_slowdown_iterations`: the same task then has one rank compute 1.5 times as long; after so many iterations it is
  named, which `wide_named` says.
- `detector_cpu`, `detector_rss_mb`: share of a core at half of 5,000, and its memory.

The baseline, `idle`, is the latency with the probes alone.
"""

import argparse
import asyncio
import contextlib
import itertools
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from unicron_deploy.nats_server import NatsServer, free_port

from benchmarks.agent_cpu import cpu_s
from benchmarks.output import as_json
from unicron import codec, subjects
from unicron.bootstrap import connected
from unicron.bus import topology
from unicron.bus.nats import NatsBus
from unicron.client import Client
from unicron.contracts.base import Message
from unicron.contracts.commands import Regroup
from unicron.contracts.events import IterationFinished, TaskSubmitted
from unicron.contracts.slowdowns import Computed, ComputeTimed, SlowdownDetected, SlowdownEnded
from unicron.contracts.tasks import Member, TaskSpec
from unicron.errors import UnicronError
from unicron.settings import Settings

SLOTS, PROBES = 8, 50
HALF, RATES = 2500, (4000, 5000, 6500, 8000, 10000)
STEP_S, HALF_S = 10.0, 30.0
PROBE_S = 0.5
"""Between two iterations of a probe."""

PATTERN = (1.0,) * 14 + (2.0,) * 11
AT_ONCE = 500
PILED_UP_MS = 100.0
WIDE = "wide"


class Fleet:
    """Nodes that tell of one task on all of them, and probes."""

    def __init__(self, bus: NatsBus, ranks: int) -> None:
        self.bus, self.ranks = bus, ranks
        self.nodes = [f"node-{number}" for number in range(ranks // SLOTS)]
        self.sent: dict[str, float] = {}
        self.late: list[float] = []
        self.said: list[tuple[int, Message]] = []
        self.slow_rank, self.iteration, self.told = -1, 0, 0
        self._turns = itertools.count()
        self._ids = itertools.count()

    async def begin(self) -> None:
        """Have the journal tell of the tasks and of who is in them."""
        orders: list[Message] = []
        names = [WIDE, *(f"probe{number}" for number in range(PROBES))]
        for name in names:
            spec = TaskSpec(name=name, command=["x"], iterations=10**8)
            orders.append(TaskSubmitted(task=name, spec=spec, source="registry"))
            nodes = self.nodes if name == WIDE else self.nodes[:1]
            for first, node in enumerate(nodes):
                ranks = [first * SLOTS + slot for slot in range(SLOTS)] if name == WIDE else [0]
                members = [Member(node=node, slot=slot, worker=f"{name}-{rank}") for slot, rank in enumerate(ranks)]
                order = Regroup(node=node, task=name, epoch=0, rendezvous="h:1", members=members, ranks=ranks)
                orders.append(replace(order, world_size=self.ranks if name == WIDE else 1, source="transition"))
        for some in (orders[first : first + AT_ONCE] for first in range(0, len(orders), AT_ONCE)):
            await asyncio.gather(*(self._append(order) for order in some))

    async def _append(self, message: Message) -> None:
        message = replace(message, id=f"b{next(self._ids)}", at=time.time())
        await self.bus.append(subjects.of(message), codec.encode(message), message.id)

    async def read(self) -> None:
        """Follow what the detector says."""
        async for entry in self.bus.follow(subjects.events(SlowdownDetected, SlowdownEnded), 0):
            message = codec.decode_message(entry.data)
            self.said.append((self.iteration, message))
            if message.correlation in self.sent:
                self.late.append(time.monotonic() - self.sent.pop(message.correlation))

    async def _tell(self, message: Message) -> None:
        message = replace(message, id=f"b{next(self._ids)}", at=time.time(), source=message.node)  # type: ignore[attr-defined]
        await self.bus.tell(subjects.of(message), codec.encode(message))
        if isinstance(message, IterationFinished) and message.task != WIDE:
            self.sent[message.id] = time.monotonic()
        self.told += 1

    def _iteration(self) -> Iterable[Message]:
        """Return what the nodes tell of one iteration of the wide task."""
        for first, node in enumerate(self.nodes):
            ranks = range(first * SLOTS, (first + 1) * SLOTS)
            workers = [
                Computed(worker=f"{WIDE}-{rank}", rank=rank, place=0, seconds=0.15 if rank == self.slow_rank else 0.1)
                for rank in ranks
            ]
            yield ComputeTimed(node=node, task=WIDE, epoch=0, iteration=self.iteration, workers=workers)
        yield self._finished(WIDE, self.iteration, 1.0 if self.slow_rank < 0 else 1.5, self.ranks)
        self.iteration += 1

    def _finished(self, task: str, iteration: int, seconds: float, world_size: int) -> IterationFinished:
        place = {"node": self.nodes[0], "slot": 0, "task": task, "worker": f"{task}-0"}
        told = {"iteration": iteration, "world_size": world_size, "seconds": seconds, "loss": 1.0}
        return IterationFinished(**place, **told, epoch=0)  # type: ignore[arg-type]

    async def probe(self) -> None:
        """Let the probes finish iterations, for ever: first as many as make a mean."""
        for turn in self._turns:
            began = time.monotonic()
            for number in range(PROBES):
                seconds = PATTERN[(turn + number) % len(PATTERN)] if turn > 2 * len(PATTERN) else 1.0
                await self._tell(self._finished(f"probe{number}", turn, seconds, 1))
            pause = PROBE_S if turn > 2 * len(PATTERN) else PROBE_S / 5
            await asyncio.sleep(max(0.0, began + pause - time.monotonic()))

    async def run(self, rate: float, seconds: float) -> float:
        """Tell iterations of the wide task at a rate; return the rate that it came to."""
        began, count = time.monotonic(), 0
        messages = itertools.chain.from_iterable(iter(self._iteration, None))
        while (now := time.monotonic() - began) < seconds:
            while count < rate * now:
                await self._tell(next(messages))
                count += 1
            await asyncio.sleep(0.005)
        return count / (time.monotonic() - began)


async def read_up_to(client: Client, position: int) -> None:
    """Wait until the detector serves, and has read the journal so far."""
    while True:
        with contextlib.suppress(UnicronError):
            if (await client.load("detector")).position >= position:
                return
        await asyncio.sleep(0.2)


async def settled(client: Client) -> int:
    """Wait until the detector has taken in what was told; return how much it has dropped in all."""
    while True:
        with contextlib.suppress(UnicronError):
            load = await client.load("detector")
            if load.waiting == 0:
                await asyncio.sleep(0.5)
                return (await client.load("detector")).dropped
        await asyncio.sleep(0.1)


def latency(late: list[float]) -> dict[str, float]:
    """Return median and 99th percentile, in milliseconds."""
    ordered = sorted(late)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {
        "latency_p50_ms": round(1e3 * statistics.median(ordered), 1),
        "latency_p99_ms": round(1e3 * p99, 1),
        "latency_count": len(ordered),
    }


async def measure(bus: NatsBus, ranks: int, pid: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return figures, those without load, and details."""
    fleet, client = Fleet(bus, ranks), Client(bus)
    await fleet.begin()
    jobs = [asyncio.create_task(fleet.read())]
    await read_up_to(client, await bus.tail())
    jobs.append(asyncio.create_task(fleet.probe()))
    await asyncio.sleep(2 * len(PATTERN) * PROBE_S / 5 + 3.0)
    fleet.late.clear()
    await asyncio.sleep(HALF_S)
    idle = latency(fleet.late)
    fleet.late.clear()
    used, began = cpu_s(pid), time.monotonic()
    await fleet.run(HALF, HALF_S)
    figures: dict[str, Any] = {"detector_cpu": round((cpu_s(pid) - used) / (time.monotonic() - began), 3)}
    figures = {"messages_per_s": 0.0, **latency(fleet.late), **figures}
    dropped, steps = await settled(client), {}
    for rate in RATES:
        fleet.late.clear()
        reached = await fleet.run(rate, STEP_S)
        lost = await settled(client) - dropped
        dropped += lost
        steps[rate] = {"reached_per_s": round(reached), "dropped": lost, **(latency(fleet.late) if fleet.late else {})}
        print(f"{rate}: {steps[rate]}", file=sys.stderr, flush=True)
        if not lost and steps[rate].get("latency_p50_ms", math.inf) < PILED_UP_MS:
            figures["messages_per_s"] = max(figures["messages_per_s"], round(reached))
    fleet.slow_rank, first = ranks // 2 + 3, fleet.iteration
    await fleet.run(HALF, 14 * (ranks // SLOTS) / HALF)
    await settled(client)
    wide = [(at, said) for at, said in fleet.said if isinstance(said, SlowdownDetected) and said.task == WIDE]
    named = [each.rank for _, said in wide[-1:] for each in said.workers]
    figures["wide_slowdown_iterations"] = wide[-1][1].iteration + 1 - first if wide else None
    figures["wide_named"] = named == [fleet.slow_rank]
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    figures["detector_rss_mb"] = round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1)
    for job in jobs:
        job.cancel()
    return figures, idle, {"steps": steps, "ranks": ranks}


async def run(folder: Path, ranks: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Start server and detector, and measure."""
    server = NatsServer(folder / "nats", free_port())
    await asyncio.to_thread(server.start)
    try:
        async with connected(Settings(nats_url=server.url), "benchmark") as bus:
            await topology.provision(bus.jetstream)
            words = ["-m", "unicron_detector", "--nats-url", server.url, "--log-level", "warning"]
            detector = await asyncio.create_subprocess_exec(sys.executable, *words)
            try:
                return await measure(bus, ranks, detector.pid)
            finally:
                detector.terminate()
                await detector.wait()
    finally:
        await asyncio.to_thread(server.stop)


def main() -> None:
    """Tell the detector of iterations, and print what it takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=16384, help="of the task, eight on a node")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="unicron-detector-") as folder:
        figures, idle, details = asyncio.run(run(Path(folder), options.ranks))
    if options.json:
        print(as_json("detector", figures, {"idle": idle}, details))
    else:
        for name, value in figures.items():
            print(f"{name:28} {value}")


if __name__ == "__main__":
    main()
