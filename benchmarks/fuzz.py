"""An attack on a cluster's bus: garbage, real messages with one field changed, forged commands, while a task trains.

    python -m benchmarks.fuzz --minutes 10 --json
    python -m benchmarks.fuzz --insecure --json

The cluster is a real one of this machine. Three are at work: one with the key of a node, one with a subscriber's and
one with a user's; each says what it can on subjects that are its own, and the rest wherever it likes; and each has the
server send what it may ask for, entries of the journal and receipts, to where others would take it for something said:
as commands, orders, facts and states of services. Meanwhile faults strike: a worker, a service, an agent is killed.
With `--insecure` there are no keys, one attacker, and no faults.

A field is changed into what no field of that name can hold, or what contradicts everything before: an epoch or a plan
far ahead. Commands are forged with tokens that nobody was given. (A change that makes another message that could be
real does what that would do, to the node itself where there are keys; it is no part of this, but of storms.) No process
may end by it, no forged command be obeyed, no real one be refused, and once it is over a fault must be healed, a task
be trained and every node be used, before and after all services and an agent were started again: `poisoned` counts what
of that fails, and the details name it. The parameters must be those of a run without a cluster: `parameters_differ`.
"""

import asyncio
import contextlib
import itertools
import os
import time
from collections import Counter, deque
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from unicron_deploy.embedded import Cluster
from unicron_deploy.nats_server import free_port
from unicron_deploy.rights import SUBSCRIBER, USER
from unicron_simulator.storms import lies

from benchmarks.fuzz_checks import HEALED_S, SCRIPT, Checks, parameters_differ, task
from benchmarks.harness.command import Options, Result, main, option
from unicron import codec, subjects
from unicron.authentication import authenticate
from unicron.bus import access, nats, topology
from unicron.bus.client import KeyedClient
from unicron.client import Client
from unicron.contracts.base import Message
from unicron.contracts.events import CommandRefused, DeadLetter, IterationFinished, Regrouped, WorkerExited, WorkerReady
from unicron.errors import UnicronError
from unicron.service.bootstrap import connected
from unicron.services import SERVICES

SLOTS = 2
OPEN = "open"
"""Name of the one attacker that needs no key."""

RATES = {OPEN: 2000, "node-3": 700, SUBSCRIBER: 1000, USER: 1000}
"""Messages a second of each attacker; those with keys are all but the first."""

TICK_S = 0.05
"""How often each sends."""

FRESH, POOL = 20, 2000
"""Messages that are made anew at each tick, and of which each attacker takes its pick."""

KEPT = 40
"""Real messages of each type that are changed and sent again."""

STRIKES_S = 12.0
"""From one fault to the next: what comes of one is over by then."""

FLUSH_S = 10
"""How long the server may take to read what was sent."""


class Overheard:
    """The real messages on the bus.

    Attributes:
        heard: facts of the cluster since the beginning.
        real: the last messages of each type, with their subjects.
    """

    def __init__(self, bus: nats.NatsBus) -> None:
        self._bus = bus
        self.real: dict[str, list[tuple[str, bytes]]] = {}
        self.heard: list[Any] = []

    async def listen(self) -> None:
        """Keep what is real until cancelled."""
        await asyncio.gather(self._follow(), self._hear())

    async def _follow(self) -> None:
        async for entry in self._bus.follow(subjects.JOURNAL, 0):
            self._keep(entry.subject, entry.data)

    async def _hear(self) -> None:
        async for heard in self._bus.receive_telemetry([f"{subjects.ROOT}.tel.>"]):
            self._keep(heard.subject, heard.data)

    def _keep(self, subject: str, data: bytes) -> None:
        with contextlib.suppress(UnicronError):  # of what we changed ourselves, too
            message: Message = authenticate(subject, data)
            if isinstance(
                message, CommandRefused | DeadLetter | WorkerExited | WorkerReady | Regrouped | IterationFinished
            ):
                self.heard.append(message)
            if not message.id.startswith("fuzz"):
                kept = self.real.setdefault(type(message).__name__, [])
                kept.append((subject, data))
                del kept[:-KEPT]


class Attacker:
    """Says worse than what is said.

    Attributes:
        said: how many messages of each kind.
        copied: ids of messages of which a changed copy was sent, after they had been heard themselves.
        refused: how often the server said that it has no right to.
    """

    def __init__(self, name: str, overheard: Overheard, seed: int) -> None:
        self.name, self._overheard, self._random = name, overheard, Random(f"{seed}:{name}")
        self._connection = KeyedClient()
        self._pool: deque[tuple[str, str, bytes, str]] = deque(maxlen=POOL)
        self._forgeries = itertools.count()
        self.said: Counter[str] = Counter()
        self.copied: set[str] = set()
        self.refused = 0

    async def attack(self, cluster: Cluster, seconds: float) -> None:
        """Send for so long, without waiting for anything but the server's reading."""
        await self._connect(cluster)
        self._pool.append(("forged", *self._forged(), ""))  # one at least, however few there is time for
        with contextlib.suppress(Exception):
            await self._connection.publish(*self._pool[0][1:3])
            self.said["forged"] += 1
        start, tried = time.monotonic(), 0
        while (began := time.monotonic()) < start + seconds:
            self._pool.extend(self._made() for _ in range(FRESH))
            behind = int(RATES[self.name] * (began - start)) - tried
            tried += behind
            for _ in range(behind):
                kind, subject, data, reply = self._random.choice(self._pool)
                with contextlib.suppress(Exception):  # a connection that is down for a moment, a subject with blanks
                    await self._connection.publish(subject, data, reply=reply)
                    self.said[kind] += 1
            with contextlib.suppress(Exception):
                await self._connection.flush(FLUSH_S)
            await asyncio.sleep(max(0.0, TICK_S - (time.monotonic() - began)))
        await self._connection.close()

    async def _connect(self, cluster: Cluster) -> None:
        async def failed(error: Exception) -> None:
            self.refused += access.Refusal.parse(error) is not None

        key = None if self.name == OPEN else str(cluster.keys.path(self.name))
        await self._connection.connect(
            cluster.url, name="attacker", error_cb=failed, max_reconnect_attempts=-1, nkeys_seed=key
        )

    def _made(self) -> tuple[str, str, bytes, str]:
        """Return a message, with what kind of one it is, where it is said, and where a reply is to go."""
        random = self._random
        directed = 0 if self.name == OPEN else 5  # an attacker with all rights needs no reply for it
        kind = random.choices(["garbage", "changed", "forged", "asked", "directed"], [50, 46, 2, 2, directed])[0]
        reply = self._elsewhere() if directed else ""
        if kind == "forged":
            return (kind, *self._forged(), reply)
        if kind == "directed":
            entry = b'{"seq": %d}' % random.randint(1, 1 + len(self._overheard.heard))
            return kind, f"$JS.API.DIRECT.GET.{topology.STREAM}", entry, reply
        subject, data = self._one()
        if kind == "garbage":
            return kind, subject, lies.garbage(random, data), reply
        changed = self._changed(subject, data)
        asked = random.choice([subjects.rpc, subjects.orders])("registry")
        return kind, asked if kind == "asked" else subject, changed, reply

    def _elsewhere(self) -> str:
        """Return a subject that has a meaning for others."""
        state, lease = (f"$KV.{bucket}.{self._random.choice(SERVICES)}" for bucket in topology.BUCKETS.values())
        order = subjects.orders(self._random.choice([*SERVICES, "node-1", "node-2"]))
        return self._random.choice([state, lease, order, self._forged()[0], self._one()[0]])

    def _one(self) -> tuple[str, bytes]:
        """Return something real: most often, where this one has a node's key, what that has said."""
        random, real = self._random, self._overheard.real
        found = real[random.choice(sorted(real))]
        if self.name != OPEN and random.random() < 0.8:
            own = [each for some in real.values() for each in some if subjects.sender(each[0]) == self.name]
            found = [each for each in own if ".cmd." not in each[0]] or found
        return random.choice(found)

    def _changed(self, subject: str, data: bytes) -> bytes:
        """Return a real message with one field changed into what can't be."""
        while True:
            changed = lies.impossible(self._random, data)
            if not self._could_be(subject, changed):
                self.copied.add(codec.decode_message(data).id)
                return changed

    @staticmethod
    def _could_be(subject: str, data: bytes) -> bool:
        """Return whether a message is in range, and where it belongs; far ahead is left to the services' doubts."""
        try:
            message = authenticate(subject, data)
        except UnicronError:
            return False
        plan = getattr(message, "plan", None)
        return max(getattr(message, "epoch", 0), plan.number if plan else 0) < lies.FAR_FROM

    def _forged(self) -> tuple[str, bytes]:
        """Return a command that nobody has the right to give."""
        node = f"node-{self._random.randint(1, 2)}"
        command = lies.forged(self._random, next(self._forgeries), node, "fuzzed", "fuzzed-1")
        command = msgspec.structs.replace(command, id=f"{command.id}-{self.name}", at=time.time())
        return subjects.for_message(command), codec.encode(command)


class Strikes:
    """Faults that strike while the attack goes on.

    Attributes:
        struck: in words.
        crashed: processes that were gone before their turn.
    """

    def __init__(self, cluster: Cluster, client: Client) -> None:
        self._cluster, self._client = cluster, client
        self.struck: list[str] = []
        self.crashed: list[str] = []

    async def strike(self, seconds: float) -> None:
        """Kill a worker, a service, an agent, and so on; begin none that could not be over in time."""
        services = itertools.cycle(SERVICES)
        kinds = itertools.cycle(["worker", "service", "agent"])
        for _ in range(int(seconds / STRIKES_S)):
            match next(kinds):
                case "worker":
                    await self._kill_worker()
                case "service":
                    await self._kill(next(services))
                case _:
                    await self._kill(self._cluster.nodes[0])
            await asyncio.sleep(STRIKES_S)

    async def _kill_worker(self) -> None:
        with contextlib.suppress(UnicronError, LookupError):  # it is about to be replaced, or has just gone
            view = next(each for each in (await self._client.status()).tasks if each.spec.name == "fuzzed")
            victim = view.members[-1]
            await self._client.inject(victim.node, "kill-worker", victim.worker)
            self.struck.append(victim.worker)

    async def _kill(self, name: str) -> None:
        if name not in self._cluster.alive():
            self.crashed.append(name)
        await asyncio.to_thread(self._cluster.kill, name)
        await asyncio.to_thread(self._cluster.start_process, name)
        self.struck.append(name)


async def run(root: Path, seconds: float, seed: int, *, insecure: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Attack a cluster in `root` for so long; return figures and details."""
    os.environ["UNICRON_ATTEMPTS"] = str(10**6)  # the detector's: no honest node is given up for what strikes it here
    cluster = Cluster(root, nodes=2 if insecure else 3, slots=SLOTS, port=free_port(), insecure=insecure)
    await asyncio.to_thread(cluster.start)
    try:
        (cluster.root / "script.py").write_text(SCRIPT)
        await cluster.wait_until_ready()
        async with connected(cluster.settings(), "fuzz") as bus, connected(cluster.settings(), "ears") as ears:
            return await _attacked(cluster, Client(bus), Overheard(ears), seconds, seed)
    finally:
        await asyncio.to_thread(cluster.stop)


async def _attacked(
    cluster: Cluster, client: Client, overheard: Overheard, seconds: float, seed: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    listening = asyncio.create_task(overheard.listen())
    checks = Checks(cluster, client, overheard.heard)
    strikes = Strikes(cluster, client)
    names = [OPEN] if cluster.insecure else [name for name in RATES if name != OPEN]
    attackers = [Attacker(name, overheard, seed) for name in names]
    await client.submit(task("fuzzed", cluster.root, workers=3, iterations=1_000_000))
    await checks.all("before")
    memory, began = _memory_mb(cluster), time.time()
    striking = 0.0 if cluster.insecure else seconds
    await asyncio.gather(*(each.attack(cluster, seconds) for each in attackers), strikes.strike(striking))
    ended = time.time()
    crashed = strikes.crashed + sorted(set(cluster.names) - set(cluster.alive()))
    grown = _memory_mb(cluster) - memory
    await checks.all("after")
    for name in [*SERVICES, cluster.nodes[0]]:
        cluster.kill(name)
        await asyncio.to_thread(cluster.start_process, name)
    await checks.all("restarted")
    crashed += sorted(set(cluster.names) - set(cluster.alive()))
    await client.remove("fuzzed")
    listening.cancel()
    differ = await asyncio.to_thread(parameters_differ, cluster.root, "fuzzed")
    real, obeyed = _commands(overheard, attackers)
    trained = [each.at for each in overheard.heard if isinstance(each, IterationFinished) and began < each.at < ended]
    stood = max(after - before for before, after in itertools.pairwise([began, *sorted(trained), ended]))
    said = sum((each.said for each in attackers), Counter[str]())
    figures = {
        "messages": said.total(),
        "crashes": len(crashed),
        "poisoned": len(checks.failed),
        "wrong_commands_obeyed": len(obeyed),
        "real_commands_refused": len(real),
        "rss_growth_mb": round(grown, 1),
        "training_stopped": int(stood > HEALED_S),
        "parameters_differ": differ,
        "iterations_meanwhile": len(trained),
        "longest_pause_s": round(stood, 1),
        "strikes": len(strikes.struck),
        "dead_letters": sum(isinstance(each, DeadLetter) for each in overheard.heard),
    }
    details = {
        "said": dict(said),
        "of": {each.name: {"sent": each.said.total(), "refused_by_the_server": each.refused} for each in attackers},
        "crashed": crashed,
        "poisoned": checks.failed,
        "refused": real[:10],
        "struck": strikes.struck,
    }
    return figures, {**details, "server_log_mb": round(cluster.log("nats").stat().st_size / 2**20, 1), "seed": seed}


def _commands(overheard: Overheard, attackers: list[Attacker]) -> tuple[list[str], set[str]]:
    """Return why real commands were refused, and whom forged ones have started."""
    copied = set[str]().union(*(each.copied for each in attackers))
    refused = [each for each in overheard.heard if isinstance(each, CommandRefused)]
    foreign = [each for each in refused if "fuzz" not in each.command and each.id[:5] != "fuzz"]
    facts = [each for each in overheard.heard if isinstance(each, WorkerReady | WorkerExited)]
    obeyed = {each.worker for each in facts if each.task == "forged" and not each.id.startswith("fuzz")}
    return [each.reason for each in foreign if each.command not in copied], obeyed


def _memory_mb(cluster: Cluster) -> float:
    """Return the resident memory of the services and agents."""
    pages = 0
    for name, process in cluster.processes.items():
        with contextlib.suppress(OSError):
            pages += int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) if name != "nats" else 0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def measure(options: Options, folder: Path) -> Result:
    """Attack a cluster, and return what came of it."""
    figures, details = await run(folder, 60 * options.minutes, options.seed, insecure=options.insecure)
    return Result(figures, details=details)


if __name__ == "__main__":
    main(
        measure,
        option("--minutes", default=1.0, help="how long"),
        option("--insecure", action="store_true", help="without keys"),
        option("--seed", default=1, help="of what is sent"),
    )
