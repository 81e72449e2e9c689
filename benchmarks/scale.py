"""The cost of one lost node on a very large cluster: bytes of messages and values, and CPU seconds of each service.

The real services, shells and stores included, on the bus in memory in virtual time. By default 131,072 GPUs in 16,384
nodes and 64 tasks that fill them. There are no workers: a script answers each command at once as agents would. It lets
all nodes join, has the tasks submitted, and once all of them compute it loses one node, and lets it join again.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Coroutine, Generator
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from unicron_simulator.policies import experiments
from unicron_simulator.storms.bus import MemoryBucket, MemoryWorld
from unicron_simulator.storms.world import wirings

from benchmarks.harness.agents import BEAT_S, COMMANDS, answers, joined
from benchmarks.harness.cluster import background
from benchmarks.harness.command import Figures, Options, Result, main, option, say
from unicron import codec, subjects
from unicron.bus import replies, topology
from unicron.bus.protocol import JournalEntry, TelemetryEntry
from unicron.clock import VirtualClock
from unicron.contracts.answers import Reply
from unicron.contracts.base import Message
from unicron.contracts.events import FailureDetected, NodeHeartbeat, TaskStateChanged
from unicron.contracts.queries import GetStatus, Query, SubmitTask
from unicron.contracts.tasks import Slot, TaskSpec, TaskState
from unicron.service.service import Service

SLOTS = 8
START = 1_700_000_000.0
ANSWER_S = 0.1  # virtual seconds that agents take to carry a command out; what services say to one another takes none
owner: ContextVar[str] = ContextVar("owner", default="script")  # for whom the running task works


@dataclass
class Counted:
    """Traffic on the bus and its cost, since the last `cut`."""

    messages: int = 0
    bytes: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    largest: Counter[str] = field(default_factory=Counter)
    written: int = 0
    written_bytes: int = 0
    largest_value: int = 0
    cpu_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def cut(self) -> "Counted":
        """Return what was counted so far, and begin anew."""
        taken = Counted(**vars(self))
        vars(self).update(vars(Counted()))
        return taken


class Timed(Coroutine[Any, Any, Any]):
    """A coroutine whose CPU time is counted for its owner."""

    def __init__(self, job: Coroutine[Any, Any, Any], counted: Counted) -> None:
        self._job, self._counted = job, counted

    def send(self, value: Any) -> Any:
        """Go on to the next wait."""
        began = time.thread_time()
        try:
            return self._job.send(value)
        finally:
            self._counted.cpu_s[owner.get()] += time.thread_time() - began

    def throw(self, *error: Any) -> Any:
        """Go on to the next wait, with an error."""
        return self._job.throw(*error)

    def close(self) -> None:
        """End it."""
        self._job.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._job.__await__()


class Journal(list[JournalEntry]):
    """A journal that counts."""

    def __init__(self, counted: Counted) -> None:
        super().__init__()
        self._counted = counted

    def append(self, entry: JournalEntry) -> None:
        """Add an entry."""
        super().append(entry)
        kind = entry.subject.split(".")[4]
        self._counted.messages += 1
        self._counted.bytes += len(entry.data)
        self._counted.kinds[kind] += 1
        self._counted.largest[kind] = max(self._counted.largest[kind], len(entry.data))


class Bucket(MemoryBucket):
    """A bucket of states that counts."""

    def __init__(self, clock: VirtualClock, counted: Counted) -> None:
        super().__init__("state", clock, None)
        self._counted = counted

    async def update(self, key: str, value: bytes, last: int) -> int:
        """Write over revision `last`."""
        self._counted.written += 1
        self._counted.written_bytes += len(value)
        self._counted.largest_value = max(self._counted.largest_value, len(value))
        return await super().update(key, value, last)


class Stage:
    """A cluster without workers, from the Unix second `start` on; of its nodes, `lost` is not there."""

    def __init__(self, nodes: int, tasks: int, start: float = START) -> None:
        self.nodes, self.tasks = nodes, tasks
        self.clock = VirtualClock(start)
        self.counted = Counted()
        self.memory = MemoryWorld(self.clock, 60.0)
        self.memory.journal = Journal(self.counted)
        self.memory.buckets["state"] = Bucket(self.clock, self.counted)
        self.bus = self.memory.connect()
        self.states: dict[str, TaskState] = {}
        self.lost = ""
        self._numbers = count()
        self._seen: dict[type[Message], asyncio.Event] = {}
        self._orders: list[Any] = []

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Let services and agents run."""
        loop = asyncio.get_running_loop()
        loop.set_task_factory(lambda loop, job, **more: asyncio.Task(Timed(job, self.counted), loop=loop, **more))
        services = [self._serve(name, wiring) for name, wiring in wirings().items()]
        async with background(self._agents(), self._answer(), self._heartbeats(), *services):
            yield

    async def _serve(self, name: str, wiring: Any) -> None:
        owner.set(name)
        ids = (f"{name}-{number}" for number in count())
        await Service(wiring, self.memory.connect(), self.clock, 60.0, ids.__next__).run()

    # --- what agents and the server say ------------------------------------------------------------------------------

    async def say(self, fact: Message, node: str) -> None:
        """Put a fact of a node's agent into the journal."""
        fact = replace(fact, id=f"fact-{next(self._numbers)}", at=self.clock.now(), source=node)
        await self.bus.append(subjects.for_message(fact), codec.encode(fact), fact.id)

    async def join(self, number: int) -> None:
        """Let a node join."""
        name = f"node-{number}"
        address = f"10.{number >> 8}.{number & 255}.1"
        slots = [Slot(index=index, kind="gpu", device=f"GPU-{number:08x}-{index}") for index in range(SLOTS)]
        await self.say(joined(name, next(self._numbers), address, slots), name)

    def disconnect(self, name: str) -> None:
        """Say what the server says when the connection of an agent ends."""
        self.lost = name
        advisory = {
            "id": "advisory",
            "timestamp": datetime.fromtimestamp(self.clock.now(), UTC).isoformat(),
            "client": {"name": f"agent.{name}.{name}"},
            "reason": "Client Closed",
        }
        subject = topology.DISCONNECTS.replace("*", topology.NODES)
        for wanted, inbox in self.memory.subscriptions:
            if wanted(subject):
                inbox.put_nowait(TelemetryEntry(subject, json.dumps(advisory).encode()))

    async def _heartbeats(self) -> None:
        while True:
            for number in range(self.nodes):
                name = f"node-{number}"
                if name != self.lost:
                    beat = NodeHeartbeat(node=name, incarnation="", source=name)
                    await self.bus.publish_telemetry(subjects.for_message(beat), codec.encode(beat))
            await asyncio.sleep(BEAT_S)

    async def _agents(self) -> None:
        async for entry in self.bus.follow(subjects.JOURNAL, 0):
            message = codec.decode_message(entry.data)
            self._seen.setdefault(type(message), asyncio.Event()).set()
            if isinstance(message, COMMANDS) and message.node != self.lost:
                self._orders.append(message)
            elif isinstance(message, TaskStateChanged):
                self.states[message.task] = message.state

    async def _answer(self) -> None:
        while True:
            await asyncio.sleep(ANSWER_S)
            orders, self._orders = self._orders, []
            for order in orders:
                for fact in answers(order):
                    await self.say(fact, order.node)

    # --- what is waited for ------------------------------------------------------------------------------------------

    async def next_of(self, kind: type[Message]) -> None:
        """Wait for a message of a kind."""
        event = self._seen[kind] = asyncio.Event()
        await event.wait()

    async def until_all_is_done(self) -> None:
        """Wait until nothing more follows; then all tasks must compute."""
        before = -1
        while before != len(self.memory.journal):
            before = len(self.memory.journal)
            await asyncio.sleep(2.0)
        if bad := [name for name, state in self.states.items() if state is not TaskState.RUNNING]:
            raise SystemExit(f"not all tasks compute: {', '.join(bad)}")

    async def ask(self, query: Query) -> bytes:
        """Ask the registry."""
        data = await self.bus.ask(subjects.for_query("registry", query), codec.encode(query), 1e6)
        reply = codec.decode(data, Reply)
        if reply.error:
            raise SystemExit(reply.error)
        return data


def task(number: int, workers: int) -> TaskSpec:
    """Return a task that keeps whole nodes busy: GPT-3 of 175 billion parameters."""
    spec = experiments.gpt3(f"task-{number}", "175B", weight=0.5 + 0.02 * number, most=workers, batch=workers)
    return replace(spec, iterations=100_000)


async def fill(stage: Stage) -> dict[str, Counted]:
    """Let all nodes join, and all tasks compute; return what each took."""
    found = {}
    for number in range(stage.nodes):
        await stage.join(number)
    await stage.until_all_is_done()
    found["join_all"] = stage.counted.cut()
    say(f"{stage.nodes} nodes have joined")
    for number in range(stage.tasks):
        await stage.ask(SubmitTask(spec=task(number, stage.nodes * SLOTS // stage.tasks)))
    await stage.until_all_is_done()
    found["start_all"] = stage.counted.cut()
    say(f"{stage.tasks} tasks compute")
    return found


async def play(stage: Stage) -> dict[str, Counted]:
    """Fill the cluster, lose a node and get it back; return what each took."""
    async with stage.running():
        found = await fill(stage)
        await asyncio.sleep(10.0)
        found["rest_10_s"] = stage.counted.cut()
        stage.disconnect("node-1")
        await stage.next_of(FailureDetected)
        found["detect"] = stage.counted.cut()
        await asyncio.sleep(ANSWER_S / 10)
        found["decide"] = stage.counted.cut()
        await stage.until_all_is_done()
        found["recover"] = stage.counted.cut()
        stage.lost = ""
        await stage.join(1)
        await stage.until_all_is_done()
        found["rejoin"] = stage.counted.cut()
        stage.counted.bytes = len(await stage.ask(GetStatus()))
        stage.counted.largest["Reply"] = min(stage.counted.bytes, replies.PIECE)
        found["status"] = stage.counted.cut()
    return found


def figures(stage: Stage, found: dict[str, Counted]) -> Figures:
    """Return what is worth a line."""
    lost = [found["detect"], found["decide"], found["recover"]]
    largest: Counter[str] = Counter()
    for each in found.values():
        largest |= each.largest
    services = list(wirings())
    return {
        "gpus": stage.nodes * SLOTS,
        "nodes": stage.nodes,
        "tasks": stage.tasks,
        "largest_message_kb": round(max(largest.values()) / 1000, 1),
        "largest_value_kb": round(max(each.largest_value for each in found.values()) / 1000, 1),
        "status_reply_kb": round(found["status"].bytes / 1000),
        "decision_cpu_ms": round(1e3 * sum(found["decide"].cpu_s[name] for name in services)),
        "lost_messages": sum(each.messages for each in lost),
        "lost_kb": round(sum(each.bytes for each in lost) / 1000),
        "lost_written_kb": round(sum(each.written_bytes for each in lost) / 1000),
        "joined_messages": found["rejoin"].messages,
        "joined_kb": round(found["rejoin"].bytes / 1000),
        "joined_written_kb": round(found["rejoin"].written_bytes / 1000),
        **{f"lost_{name}_cpu_s": round(sum(each.cpu_s[name] for each in lost), 2) for name in services},
        **{f"joined_{name}_cpu_s": round(found["rejoin"].cpu_s[name], 2) for name in services},
        **{f"rest_{name}_cpu_share": round(found["rest_10_s"].cpu_s[name] / 10, 3) for name in services},
    }


def measure(options: Options, _: Path) -> Result:
    """Play it in virtual time."""
    logging.disable(logging.CRITICAL)
    stage = Stage(options.nodes, options.tasks)
    found = stage.clock.run(play(stage))
    return Result(figures(stage, found), details={name: vars(each) for name, each in found.items()})


if __name__ == "__main__":
    main(
        measure,
        option("--nodes", default=16384, help="of eight GPUs each"),
        option("--tasks", default=64, help="which share the nodes out evenly"),
    )
