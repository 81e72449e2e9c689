"""The simulated nodes of `benchmarks.load`, in a process of their own: what thousands of agents send and ask."""

import asyncio
import contextlib
import heapq
import itertools
import json
import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from msgspec.structs import replace
from nats import errors as nats_errors
from unicron_agent.presence import FRESH

from benchmarks.harness.agents import BEAT_S, COMMANDS, answers, joined
from benchmarks.harness.cluster import until
from unicron import codec, fabric_proofs, subjects
from unicron.aio import retry_until_available
from unicron.bus import nats, topology
from unicron.bus.journal import REST_S
from unicron.bus.nats import NatsBus
from unicron.contracts.base import Message
from unicron.contracts.events import (
    IterationFinished,
    NodeAdmitted,
    NodeHeartbeat,
    NodePaced,
    Regrouped,
    StateSecured,
    WorkerExited,
)
from unicron.contracts.tasks import Slot
from unicron.settings import Settings

CONNECTIONS = 12
TICK_S = 0.05
START_S = 300.0  # within which nodes must be admitted, and tasks compute
IN_FLIGHT = 500  # facts that may wait for their acknowledgement; then no more are sent, and the rate shows it
DEBT_S = 1.0  # how much is made up for where the machine was too busy to send
JOINING = 32  # nodes that join at once
STALE_SID = 10_000_000  # of the first subscription that only weighs on the server: what comes for it is for nobody here


@dataclass
class Count:
    """Messages sent and acknowledged since the start, and the seconds of each fact since the last count."""

    sent: Counter[str]
    took: list[float] = field(default_factory=list)


class Fleet:
    """The benchmark's handle of the generator: a pipe to it, and the final number of nodes."""

    def __init__(self, pipe: "Connection[Any, Any]", nodes: int) -> None:
        self._pipe, self.nodes = pipe, nodes

    @staticmethod
    def serve(pipe: "Connection[Any, Any]", settings: Settings) -> None:
        """Be the generator, until it is ended."""
        logging.disable(logging.CRITICAL)  # that the bus is slow the figures say
        asyncio.run(Generator(settings).serve(pipe))

    async def ask(self, what: str, *arguments: Any) -> Any:
        """Have the generator do something that `Generator` does; return what comes of it."""
        self._pipe.send((what, *arguments))
        found = await asyncio.to_thread(self._pipe.recv)
        if isinstance(found, Exception):
            raise found
        return found


@dataclass
class Node:
    """A simulated node, and how often it beats."""

    name: str
    beats: int = 0
    every_s: float = BEAT_S


class Generator:
    """Speaks for all simulated nodes."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._buses: list[NatsBus] = []
        self._nodes: list[Node] = []
        self._named: dict[str, Node] = {}
        self._due: list[tuple[float, int]] = []
        self._admitted: set[str] = set()
        self._workers: dict[str, Regrouped] = {}
        self._facts_per_s = 0.0
        self._in_flight: set[asyncio.Task[None]] = set()
        self._counted = Count(Counter({"facts": 0, "beats": 0, "gets": 0, "gets_answered": 0}))
        self._ids = 0

    async def serve(self, pipe: "Connection[Any, Any]") -> None:
        """Do what is asked, until the process is ended."""
        self._buses = [await nats.connect(self._settings, f"fleet-{number}") for number in range(CONNECTIONS)]
        self._inboxes = [bus.client.new_inbox() for bus in self._buses]
        for bus, inbox in zip(self._buses, self._inboxes, strict=True):
            await bus.client.subscribe(inbox, cb=self._answered)
        position = await self._buses[0].tail()
        jobs = [self._follow(position), self._each_tick(), self._iterate()]
        running = asyncio.gather(*jobs)
        while not running.done():
            what, *arguments = await asyncio.to_thread(pipe.recv)
            try:
                found = await getattr(self, what)(*arguments)
            except Exception as error:  # noqa: BLE001 - the other side raises it
                found = error
            pipe.send(found)
        running.result()

    def _bus(self, number: int) -> NatsBus:
        return self._buses[number % CONNECTIONS]

    async def _say(self, fact: Message, node: str) -> int:
        """Put a fact of a node's agent into the journal."""
        self._ids += 1
        fact = replace(fact, id=f"fleet-{self._ids}", at=time.time(), source=node, correlation=f"fleet-{self._ids}")
        bus = self._bus(_number(node))
        return await retry_until_available(
            lambda: bus.append(subjects.for_message(fact), codec.encode(fact), fact.id), "saying a fact"
        )

    # --- what is asked -----------------------------------------------------------------------------------------------

    async def join(self, nodes: int) -> None:
        """Have nodes join."""
        missing = list(range(len(self._nodes), nodes))
        self._nodes += [Node(f"sim-{number}") for number in missing]
        self._named = {node.name: node for node in self._nodes}

        async def some() -> None:
            while missing:
                await self._join(missing.pop())

        await asyncio.gather(*(some() for _ in range(JOINING)))
        await until(lambda: len(self._admitted) >= nodes, "nodes are admitted", START_S)

    async def _join(self, number: int) -> None:
        node, bus = self._nodes[number], self._bus(number)
        for at, each in enumerate(subjects.read_by(node.name)):
            sid = STALE_SID + 10 * number + at
            await bus.client._send_command(f"SUB {subjects.stored(each)} {sid}\r\n".encode())  # noqa: SLF001
        slots = [Slot(index=0, kind="cpu")]
        await self._say(joined(node.name, 1, "127.0.0.1", slots), node.name)
        heapq.heappush(self._due, (time.monotonic(), number))

    async def until_computing(self, workers: int) -> None:
        """Wait until so many simulated workers have regrouped."""
        await until(lambda: len(self._workers) >= workers, "simulated tasks compute", START_S)

    async def go(self, facts_per_s: float) -> None:
        """Send so many facts a second from now on."""
        self._facts_per_s = facts_per_s

    async def count(self) -> Count:
        """Return what was sent, and how long the latest facts took."""
        found = Count(Counter(self._counted.sent), self._counted.took)
        self._counted.took = []
        return found

    # --- what agents do ----------------------------------------------------------------------------------------------

    async def _follow(self, position: int) -> None:
        """Read what concerns the nodes."""
        filters = [f"{subjects.ROOT}.cmd.*.{kind.__name__}.>" for kind in COMMANDS]
        async for entry in self._buses[0].follow([*filters, f"{subjects.ROOT}.evt.registry.>"], position):
            message = codec.decode_message(entry.data)
            node = self._named.get(getattr(message, "node", ""))
            if node is None:
                continue
            if isinstance(message, NodeAdmitted | NodePaced):
                node.every_s = max(BEAT_S, message.heartbeat_s)
            if isinstance(message, NodeAdmitted):
                self._admitted.add(node.name)
            elif isinstance(message, COMMANDS):
                self._begin(self._carry_out(message))

    async def _carry_out(self, order: Message) -> None:
        for fact in answers(order):
            if isinstance(fact, Regrouped):
                self._workers[fact.worker] = fact
            elif isinstance(fact, WorkerExited):
                self._workers.pop(fact.worker, None)
            await self._say(fact, fact.node)

    async def _each_tick(self) -> None:
        """Beat, look and publish facts, as many as are due."""
        looked = published = time.monotonic()  # up to when all is done
        looks, facts = itertools.count(), itertools.count()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            await self._beat(now)
            looked, published = max(looked, now - DEBT_S), max(published, now - DEBT_S)
            while looked < now:
                looked += REST_S / max(1, len(self._nodes))
                with contextlib.suppress(nats_errors.Error):
                    await self._look(next(looks))
            workers = list(self._workers.values()) if self._facts_per_s else []
            published = published if workers else now
            while published < now and len(self._in_flight) < IN_FLIGHT:
                published += 1 / self._facts_per_s
                number = next(facts)
                self._begin(self._secure(workers[number % len(workers)], number // len(workers)))

    def _begin(self, job: Any) -> None:
        task = asyncio.ensure_future(job)
        self._in_flight.add(task)
        task.add_done_callback(self._in_flight.discard)

    async def _beat(self, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            at, number = heapq.heappop(self._due)
            node = self._nodes[number]
            node.beats += 1
            heapq.heappush(self._due, (at + (node.every_s if node.beats >= FRESH else BEAT_S), number))
            beat = NodeHeartbeat(node=node.name, incarnation=f"{fabric_proofs.boot_id(node.name)}.1")
            await self._send(beat, number)
            self._counted.sent["beats"] += 1

    async def _send(self, telemetry: Any, number: int) -> None:
        self._ids += 1
        said = replace(telemetry, id=f"fleet-{self._ids}", at=time.time(), source=telemetry.node)
        with contextlib.suppress(nats_errors.Error):  # its connection broke: what it would have published is lost
            await self._bus(number).client.publish(subjects.for_message(said), codec.encode(said))

    async def _look(self, number: int) -> None:
        """Ask where in the journal the last is of each thing that an agent reads."""
        if not self._nodes:
            return
        number %= len(self._nodes)
        node, bus, inbox = self._nodes[number], self._bus(number), self._inboxes[number % CONNECTIONS]
        for pattern in subjects.read_by(node.name):
            request = {"last_by_subj": pattern}
            await bus.client.publish(f"$JS.API.DIRECT.GET.{topology.STREAM}", json.dumps(request).encode(), reply=inbox)
            self._counted.sent["gets"] += 1

    async def _answered(self, _: Any) -> None:
        self._counted.sent["gets_answered"] += 1

    async def _secure(self, worker: Regrouped, iteration: int) -> None:
        began = time.monotonic()
        await self._say(StateSecured(**_place(worker), iteration=iteration, nodes=["sim-1"]), worker.node)
        self._counted.took.append(time.monotonic() - began)
        self._counted.sent["facts"] += 1

    async def _iterate(self) -> None:
        """Publish for each task, once a second, that an iteration is done."""
        for iteration in range(10**9):
            for worker in [each for each in self._workers.values() if each.rank == 0]:
                group = {"epoch": worker.epoch, "world_size": worker.world_size}
                place = {**_place(worker), **group, "iteration": worker.iteration + iteration}
                await self._send(IterationFinished(**place, seconds=1.0, loss=1.0), _number(worker.node))
            await asyncio.sleep(1.0)


def _place(worker: Regrouped) -> dict[str, Any]:
    return {"node": worker.node, "slot": worker.slot, "task": worker.task, "worker": worker.worker}


def _number(node: str) -> int:
    return int(node.rpartition("-")[2])
