"""A very large cluster's telemetry and a thousand facts a second, on three NATS servers and the real control services.

    python -m benchmarks.load --minutes 10 --nodes 16384 --facts 1000 --json

Real are the servers, with three copies that are written through to the disk, the five services, and three agents with
a task of three workers, of which one is killed every ten seconds. The other nodes are a generator's, in a process of
its own: a few connections that speak for all of them, by one key with wider rights than a node's. They do what agents
do: join, beat as often as they are told, listen for what concerns them, look at the journal as an agent at rest does
(four gets every eight seconds), and answer commands at once. They have one slot each, and those that are needed for
`WORKERS` are the workers of simulated tasks, whose `StateSecured` are the facts: each one says which copies of a
worker's state are whole, which the registry and the transition service take in. All five services read every fact.
What a few connections can't show is what thousands of them cost the servers: memory, and pings.

First, for a sixth of the time, the cluster of these workers' nodes alone, with a tenth of the facts: the baseline.

- `facts_per_s`, `beats_per_s`, `gets_per_s`: what was stored, sent, asked. `heard_per_s` is the telemetry that somebody
  who listens to all of it was given, `dropped` what services have not looked at, and `dropped_in_joining` before that.
- `store_p50_ms`, `store_p99_ms`: from sending a fact to its acknowledgement.
- `SERVICE_waiting_p99`, `_max`: inputs that it had read and not taken in, looked at twice a second; `SERVICE_answer_`:
  milliseconds that a query took which stands in that queue like everything else; `SERVICE_behind_`: entries of the
  journal after the last that it has taken in, of the two services that these facts concern.
- `NAME_cpu`: share of a core; `NAME_rss_mb`.
- `heal_p50_s`, `heal_max_s`: from a worker's death to all workers in one group again.
- `false_alarms`: nodes that were given up; none has ever died. `dead_letters`, `slow_consumers` as the servers' logs
  have it, and `disk_mb` of one server.
"""

import argparse
import asyncio
import contextlib
import itertools
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from unicron_deploy import rights
from unicron_deploy.embedded import Cluster, several
from unicron_deploy.nats_server import free_port

from benchmarks.fleet import Fleet, Rates
from benchmarks.ha import SCRIPT, until
from benchmarks.healing import whole_s
from benchmarks.output import as_json
from unicron import codec, subjects
from unicron.bootstrap import connected
from unicron.bus.nats import NatsBus
from unicron.client import Client
from unicron.contracts.base import Message
from unicron.contracts.events import DeadLetter, FailureDetected, Regrouped, WorkerReady
from unicron.contracts.failures import DetectionMethod
from unicron.contracts.queries import GetStates, Reply
from unicron.contracts.tasks import TaskSpec
from unicron.errors import UnicronError
from unicron.services import SERVICES

FLEET = "fleet"
"""Whose key the generator has."""

TASKS, WORKERS = 32, 512
"""Simulated tasks, and their workers in all. What a fact costs the transition service grows with its task's workers."""

REAL = 3
STRIKE_S = 10.0
LOOK_S = 0.5
CONCERNED = ("registry", "transition")
"""Services that take the facts in."""


def widen() -> None:
    """Let the generator speak for every node, and hear what is for them."""
    as_before = rights.rights

    def wider(name: str) -> rights.Rights:
        if name != FLEET:
            return as_before(name)
        publish = (*(f"{subjects.ROOT}.{kind}.>" for kind in ("evt", "tel")), *rights.READ_JOURNAL)
        return rights.Rights(publish=publish, subscribe=(rights.ALL_STORED,))

    rights.rights = wider


class Seen:
    """What was said in the journal of the real task and of failures, and how much telemetry was heard."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.said: list[Message] = []
        self.heard = 0

    async def read(self) -> None:
        """Follow the journal."""
        filters = subjects.events(FailureDetected, DeadLetter, Regrouped, WorkerReady)
        async for entry in self._client.bus.follow(filters, 0):
            with contextlib.suppress(UnicronError):
                message = codec.decode_message(entry.data)
                if getattr(message, "task", "real").startswith("real") or isinstance(message, FailureDetected):
                    self.said.append(message)

    async def listen(self) -> None:
        """Count telemetry."""
        async for _ in self._client.bus.hear([f"{subjects.ROOT}.tel.>"]):
            self.heard += 1

    def of(self, kind: type[Message], since: float = 0.0) -> list[Any]:
        """Return what was said of a kind."""
        return [message for message in self.said if isinstance(message, kind) and message.at > since]


class Usage:
    """CPU seconds and memory of processes, by name."""

    def __init__(self, cluster: Cluster, generator: int) -> None:
        self._pids = {name: cluster.processes[name].pid for name in (*cluster.servers, *SERVICES)}
        self._pids |= {
            "agent": cluster.processes[cluster.nodes[0]].pid,
            "generator": generator,
            "observer": os.getpid(),
        }
        self._began, self._before = time.monotonic(), {name: self._cpu_s(pid) for name, pid in self._pids.items()}

    def _cpu_s(self, pid: int) -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def figures(self) -> dict[str, float]:
        """Return shares of a core since it was made, and memory now."""
        took, found = time.monotonic() - self._began, {}
        for name, pid in self._pids.items():
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            found[f"{name}_cpu"] = round((self._cpu_s(pid) - self._before[name]) / took, 3)
            found[f"{name}_rss_mb"] = round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1)
        return found


class Looks:
    """How much waits in each service, looked at all the time."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.failed: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self._found: dict[str, list[float]] = {}

    async def look(self, service: str) -> None:
        """Look without end."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                end = await self._client.tail()
                load = await self._client.load(service)
                began = time.monotonic()
                data = await self._client.bus.ask(subjects.rpc(service), codec.encode(GetStates()), 10.0)
                codec.decode(data, Reply)  # it does not answer that, and says so in its turn
            except UnicronError:
                self.failed[service] += 1
                continue
            self.dropped[service] = load.dropped
            self._note(f"{service}_waiting", load.waiting)
            self._note(f"{service}_answer_ms", 1e3 * (time.monotonic() - began))
            if service in CONCERNED:
                self._note(f"{service}_behind", max(0, end - load.position))

    def _note(self, name: str, value: float) -> None:
        self._found.setdefault(name, []).append(value)

    def figures(self) -> dict[str, float]:
        """Return the figures since the last time."""
        found, self._found = self._found, {}
        named = {}
        for name, values in sorted(found.items()):
            what, unit = (name.removesuffix("_ms"), "_ms") if name.endswith("_ms") else (name, "")
            named[f"{what}_p99{unit}"] = round(quantile(values, 0.99), 1)
            named[f"{what}_max{unit}"] = round(max(values), 1)
        return named


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which that share of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Run:
    """One cluster, and the load on it."""

    def __init__(self, cluster: Cluster, bus: NatsBus, fleet: Fleet, generator: int) -> None:
        self.cluster, self.client, self.fleet = cluster, Client(bus), fleet
        self.generator = generator
        self.seen, self.looks = Seen(self.client), Looks(self.client)

    async def phase(self, seconds: float, rates: Rates) -> dict[str, Any]:
        """Load the cluster for a while, and strike; return the figures."""
        await self.fleet.go(rates)
        await asyncio.sleep(min(5.0, seconds))  # what came before is taken in
        self.looks.figures()
        sent, heard, usage = await self.fleet.count(), self.seen.heard, Usage(self.cluster, self.generator)
        began, heals = time.monotonic(), list[float]()
        for number in itertools.count():
            heals.append(await self.strike(number))
            left = seconds - (time.monotonic() - began)
            if left <= 0:
                break
            await asyncio.sleep(min(STRIKE_S, left))
        took = time.monotonic() - began
        done = await self.fleet.count()
        await self.fleet.go(Rates(facts=0.0))
        figures: dict[str, Any] = {
            "seconds": round(took, 1),
            **{f"{name}_per_s": round((done.sent[name] - sent.sent[name]) / took, 1) for name in done.sent},
            "heard_per_s": round((self.seen.heard - heard) / took, 1),
            "store_p50_ms": round(1e3 * statistics.median(done.took), 2) if done.took else None,
            "store_p99_ms": round(1e3 * quantile(done.took, 0.99), 2) if done.took else None,
            "heals": len(heals),
            "heal_p50_s": round(statistics.median(heals), 3),
            "heal_max_s": round(max(heals), 3),
        }
        return {**figures, **self.looks.figures(), **usage.figures()}

    async def strike(self, number: int) -> float:
        """Kill a worker; return how long it took to heal."""
        view = next(each for each in (await self._status()).tasks if each.spec.name == "real")
        name = view.members[number % len(view.members)].worker
        victim = await until(lambda: [m.pid for m in self.seen.of(WorkerReady) if m.worker == name], f"{name} is ready")
        killed = time.time()
        os.kill(victim[-1], signal.SIGKILL)
        return float(await until(lambda: whole_s(self.seen.of(Regrouped), killed, REAL), "healed"))

    async def _status(self) -> Any:
        while True:
            with contextlib.suppress(UnicronError):
                return await self.client.status()
            await asyncio.sleep(0.5)

    async def submit(self) -> None:
        """Have the real task train, and then the simulated ones, on the nodes that join for them."""
        root = self.cluster.root
        real = TaskSpec(
            name="real",
            command=["python", str(root / "script.py")],
            workdir=str(root),
            max_workers=REAL,
            microbatches=6,
            iterations=10**6,
            throughput={count: float(count) for count in range(1, REAL + 1)},
            env={"OUT": str(root / "real.pt"), "HURRY": str(root / "hurry"), "TOTAL": str(10**6)},
        )
        await self.client.submit(real)
        await until(lambda: whole_s(self.seen.of(Regrouped), 0.0, REAL), "the real task trains")
        await self.fleet.join(min(WORKERS, self.fleet.nodes))
        each = min(WORKERS, self.fleet.nodes) // TASKS
        for number in range(TASKS):
            spec = replace(
                real,
                name=f"simulated-{number}",
                command=["none"],
                env={},
                min_workers=each,
                max_workers=each,
                microbatches=each,
                throughput={each: float(each)},
            )
            await self.client.submit(spec)
        await self.fleet.until_computing(TASKS * each)

    async def whole(self, seconds: float, facts: float) -> tuple[dict[str, Any], dict[str, Any]]:
        """Measure the baseline, and then the load; return the figures of the load, and the baseline's."""
        jobs = [asyncio.create_task(job) for job in (self.seen.read(), self.seen.listen())]
        await self.submit()
        jobs += [asyncio.create_task(self.looks.look(service)) for service in SERVICES]
        baseline = await self.phase(seconds / 6, Rates(facts=facts / 10))
        began = time.monotonic()
        await self.fleet.join(self.fleet.nodes)
        joined_s, dropped = time.monotonic() - began, sum(self.looks.dropped.values())
        figures = await self.phase(seconds, Rates(facts=facts))
        for job in jobs:
            job.cancel()
        alarms = [each for each in self.seen.of(FailureDetected) if each.method == DetectionMethod.NODE_HEALTH]
        for each in alarms[:: max(1, len(alarms) // 10)]:
            print(f"false alarm {each.at - began:.1f} s after the last began to join: {each.reason}", file=sys.stderr)
        logs = [self.cluster.log(name).read_text(errors="replace") for name in self.cluster.servers]
        store = self.cluster.root / self.cluster.servers[0] / "store"
        figures |= {
            "nodes": self.fleet.nodes,
            "join_all_s": round(joined_s, 1),
            "false_alarms": len(alarms),
            "dead_letters": len(self.seen.of(DeadLetter)),
            "dropped_in_joining": dropped,
            "dropped": sum(self.looks.dropped.values()) - dropped,
            "unanswered": sum(self.looks.failed.values()),
            "slow_consumers": sum(log.count("Slow Consumer") for log in logs),
            "disk_mb": round(sum(path.stat().st_size for path in store.rglob("*") if path.is_file()) / 1e6, 1),
        }
        return figures, baseline


async def run(root: Path, minutes: float, nodes: int, facts: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run everything in `root`; return figures and those of the baseline."""
    widen()
    cluster = Cluster(root, nodes=REAL, slots=1, servers=several(free_port()))
    cluster.keys.admit(FLEET)
    (root / "script.py").write_text(SCRIPT)
    os.environ["UNICRON_ATTEMPTS"] = "1000"  # on one node more fail than on any that is not to be taken out of use
    await asyncio.to_thread(cluster.start)
    try:
        await cluster.wait_until_ready(120.0)
        async with connected(cluster.settings(), "load") as bus:
            ours, theirs = multiprocessing.get_context("spawn").Pipe()
            generator = multiprocessing.get_context("spawn").Process(
                target=Fleet.serve, args=(theirs, cluster.settings(FLEET)), daemon=True
            )
            generator.start()
            try:
                made = Run(cluster, bus, Fleet(ours, nodes), int(generator.pid or 0))
                return await made.whole(60 * minutes, facts)
            finally:
                generator.terminate()
    finally:
        await asyncio.to_thread(cluster.stop)


def main() -> None:
    """Load a cluster, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="of the full load")
    parser.add_argument("--nodes", type=int, default=16384, help="that are simulated")
    parser.add_argument("--facts", type=float, default=1000.0, help="a second")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="unicron-load-") as folder:
        figures, baseline = asyncio.run(run(Path(folder), arguments.minutes, arguments.nodes, arguments.facts))
    if arguments.json:
        print(as_json("load", figures, {"a tenth of the facts, few nodes": baseline}))
    else:
        print("\n".join(f"{name:28} {value!s:>12} {baseline.get(name, '')!s:>12}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
