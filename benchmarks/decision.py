"""From a lost node to the new plan, through a real bus: what the lookup table is for.

A real nats-server, the planner as a process of its own, and this process as the one that says that a node of 16 is lost
and waits for the plan of 6 tasks: milliseconds from before FailureDetected is sent until PlanDecided is here. In
between the node comes back, and the planner has a moment to make its next table, as it has between real failures. The
baseline is one fact that goes into the journal and comes back, the floor under every answer of a service.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from benchmarks.harness.cluster import background, server_only, service
from benchmarks.harness.command import Figures, Options, Result, main, option
from benchmarks.harness.stats import percentiles
from unicron import codec, subjects
from unicron.bus.nats import NatsBus
from unicron.contracts.base import AGENT, Message
from unicron.contracts.events import Alert, FailureDetected, NodeAdmitted, PlanDecided, TaskSubmitted
from unicron.contracts.failures import DetectionMethod, FailureStatus, Severity
from unicron.contracts.tasks import Slot, TaskSpec

NODES, SLOTS, TASKS = 16, 8, 6
REST_S = 0.05
PATIENCE_S = 60.0


class Journal:
    """The planner's journal: what is sent, and when what came back."""

    def __init__(self, bus: NatsBus) -> None:
        self._bus = bus
        self._sent = 0
        self._news: asyncio.Queue[tuple[float, Any]] = asyncio.Queue()

    async def follow(self) -> None:
        """Note everything that comes."""
        async for entry in self._bus.follow(subjects.events(PlanDecided, Alert), 0):
            self._news.put_nowait((time.perf_counter(), codec.decode_message(entry.data)))

    async def send(self, message: Message) -> float:
        """Put a fact into the journal; return when that began."""
        self._sent += 1
        source = "benchmark" if message.SENDER in {"", AGENT} else message.SENDER
        fact = replace(message, id=f"fact-{self._sent}", at=time.time(), source=source)
        began = time.perf_counter()
        await self._bus.append(subjects.for_message(fact), codec.encode(fact), fact.id)
        return began

    async def next(self, matches: Callable[[Any], bool]) -> tuple[float, Any]:
        """Return the next message that matches, and when it came."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                at, message = await self._news.get()
                if matches(message):
                    return at, message

    async def plan(self, trigger: str) -> tuple[float, PlanDecided]:
        """Return the next plan with this trigger, and when it came."""
        return await self.next(lambda each: isinstance(each, PlanDecided) and each.plan.trigger == trigger)

    async def echo_s(self) -> float:
        """Return the seconds that a fact takes into the journal and back."""
        began = await self.send(Alert(text="echo"))
        return (await self.next(lambda each: isinstance(each, Alert)))[0] - began


def node(name: str, incarnation: int) -> NodeAdmitted:
    """Return the news that a node of `SLOTS` slots is there."""
    slots = [Slot(index=index) for index in range(SLOTS)]
    return NodeAdmitted(node=name, incarnation=str(incarnation), host="127.0.0.1", slots=slots)


def submitted(number: int) -> TaskSubmitted:
    """Return a task of its own weight whose FLOP/s grow less than its workers do, and stop growing near its share."""
    every, name = NODES * SLOTS, f"task-{number}"
    curve = {size: 1e14 * size * (1 - 0.5 * size / every) for size in range(1, every + 1)}
    spec = TaskSpec(name=name, command=["train"], weight=0.5 + 0.3 * number, max_workers=every, throughput=curve)
    return TaskSubmitted(task=name, spec=spec)


async def rounds(journal: Journal, count: int) -> Figures:
    """Lose one node after another, each after the last is back; return the figures."""
    for number in range(NODES):
        await journal.send(node(f"node-{number}", 0))
    for number in range(TASKS):
        await journal.send(submitted(number))
    await journal.plan(f"task_submitted:task-{TASKS - 1}")
    taken, inside, echoes, prepared = [], [], [], 0
    kind = {"severity": Severity.SEV1, "method": DetectionMethod.NODE_HEALTH, "status": FailureStatus.LOST_CONNECTION}
    for turn in range(count):
        name = f"node-{turn % NODES}"
        await asyncio.sleep(REST_S)
        began = await journal.send(FailureDetected(**kind, node=name))  # type: ignore[arg-type]
        at, decided = await journal.plan(f"node_lost:{name}")
        taken.append(at - began)
        inside.append(decided.plan.lookup_s)
        prepared += decided.plan.prepared
        await journal.send(node(name, turn + 1))
        await journal.plan(f"node_joined:{name}")
        echoes.append(await journal.echo_s())
    times = {"decision": taken, "planner_inside": inside, "echo": echoes}
    spreads = [percentiles(name, seconds) for name, seconds in times.items()]
    return {"rounds": count, "prepared": prepared} | spreads[0] | spreads[1] | spreads[2]


async def measure(options: Options, folder: Path) -> Result:
    """Start server and planner, and measure."""
    async with server_only(folder) as (server, bus):
        journal = Journal(bus)
        with service("planner", server.url):
            async with background(journal.follow()):
                figures = await rounds(journal, options.rounds)
    floor = {name.removeprefix("echo_"): value for name, value in figures.items() if name.startswith("echo_")}
    return Result(figures, {"one fact into the journal and back": floor})


if __name__ == "__main__":
    main(measure, option("--rounds", default=300))
