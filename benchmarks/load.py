"""A very large cluster's telemetry and a thousand facts a second, on three NATS servers and the real control services.

Real are the servers, with three copies that are written through to the disk, the five services, and three agents with a
task of three workers, of which one is killed every ten seconds. The other nodes are a generator's
(`benchmarks.fleet`), in a process of its own: a few connections that speak for all of them. They do what agents do:
join, beat, look at the journal as an agent at rest does (four gets every eight seconds), and answer commands at once.
Those that are needed for `WORKERS` are the workers of simulated tasks, whose `StateSecured` are the facts, which the
registry and the transition service take in; all services read every fact. What a few connections can't show is what
thousands of them cost the servers: memory, and pings. The baseline is, before, a sixth of the time with the cluster of
these workers' nodes alone, and a tenth of the facts.

- `facts_per_s`, `beats_per_s`, `gets_per_s`: what was stored, sent, asked. `heard_per_s` is the telemetry that somebody
  a subscriber to all of it was given, `dropped` what services have not looked at, and `dropped_in_joining` before that.
- `store_p50_ms`, `store_p99_ms`: from sending a fact to its acknowledgement.
- `SERVICE_waiting_p99`, `_max`: inputs that it had read and not taken in, looked at twice a second; `SERVICE_answer_`:
  milliseconds that a query took which stands in that queue like everything else; `SERVICE_behind_`: entries of the
  journal after the last that it has taken in, of the two services that these facts concern.
- `NAME_cpu`: share of a core; `NAME_rss_mb`.
- `heal_p50_s`, `heal_max_s`: from a worker's death to all workers in one group again.
- `false_alarms`: nodes that were given up; none has ever died. `dead_letters`, `slow_consumers` as the servers' logs
  have it, and `disk_mb` of one server.
"""

import asyncio
import contextlib
import multiprocessing
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from unicron_deploy import rights
from unicron_deploy.embedded import Cluster, several
from unicron_deploy.nats_server import free_port

from benchmarks.fleet import Fleet
from benchmarks.harness.cluster import TRAINED, Scene, background, shrinking, started, task
from benchmarks.harness.command import Figures, Options, Result, main, option, say
from benchmarks.harness.processes import cpu_s, memory_mb
from benchmarks.harness.stats import median, percentiles, quantile, worst
from unicron import codec, subjects
from unicron.client import Client
from unicron.contracts.answers import Reply
from unicron.contracts.events import DeadLetter, FailureDetected, Regrouped, TaskStateChanged, WorkerReady
from unicron.contracts.failures import DetectionMethod
from unicron.contracts.queries import GetStates
from unicron.errors import UnicronError
from unicron.services import SERVICES

FLEET = "fleet"  # whose key the generator has
TASKS, WORKERS = 32, 512
"""Simulated tasks, and their workers in all. What a fact costs the transition service grows with its task's workers."""

REAL = 3
STRIKE_S = 10.0
LOOK_S = 0.5
CONCERNED = ("registry", "transition")  # services that take the facts in


def widen() -> None:
    """Let the generator speak for every node, and hear what is for them."""
    as_before = rights.rights

    def wider(name: str) -> rights.Rights:
        if name != FLEET:
            return as_before(name)
        publish = (*(f"{subjects.ROOT}.{kind}.>" for kind in ("evt", "tel")), *rights.READ_JOURNAL)
        return rights.Rights(publish=publish, subscribe=(rights.ALL_STORED,))

    rights.rights = wider


class Usage:
    """CPU seconds and memory of processes, by name."""

    def __init__(self, cluster: Cluster, generator: int) -> None:
        self._pids = {name: cluster.processes[name].pid for name in (*cluster.servers, *SERVICES)}
        self._pids["agent"] = cluster.processes[cluster.nodes[0]].pid
        self._pids |= {"generator": generator, "observer": os.getpid()}
        self._began, self._before = time.monotonic(), {name: cpu_s(pid) for name, pid in self._pids.items()}

    def figures(self) -> Figures:
        """Return shares of a core since it was made, and memory now."""
        took = time.monotonic() - self._began
        shares = {f"{name}_cpu": round((cpu_s(pid) - self._before[name]) / took, 3) for name, pid in self._pids.items()}
        return shares | {f"{name}_rss_mb": round(memory_mb(pid), 1) for name, pid in self._pids.items()}


class Looks:
    """How much waits in each service, looked at all the time."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.heard = 0
        self.failed: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self._found: dict[str, list[float]] = defaultdict(list)

    async def listen(self) -> None:
        """Count telemetry."""
        async for _ in self._client.bus.receive_telemetry([f"{subjects.ROOT}.tel.>"]):
            self.heard += 1

    async def look(self, service: str) -> None:
        """Look without end."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                end, load, began = await self._client.tail(), await self._client.load(service), time.monotonic()
                data = await self._client.bus.ask(subjects.rpc(service), codec.encode(GetStates()), 10.0)
                codec.decode(data, Reply)  # it does not answer that, and says so in its turn
            except UnicronError:
                self.failed[service] += 1
                continue
            self.dropped[service] = load.dropped
            self._found[f"{service}_waiting"].append(load.waiting)
            self._found[f"{service}_answer_ms"].append(1e3 * (time.monotonic() - began))
            if service in CONCERNED:
                self._found[f"{service}_behind"].append(max(0, end - load.position))

    def figures(self) -> Figures:
        """Return the figures since the last time."""
        found, self._found = self._found, defaultdict(list)
        named = {}
        for name, values in sorted(found.items()):
            what, unit = (name.removesuffix("_ms"), "_ms") if name.endswith("_ms") else (name, "")
            named[f"{what}_p99{unit}"] = round(quantile(values, 0.99), 1)
            named[f"{what}_max{unit}"] = round(max(values), 1)
        return named


class Loaded:
    """One cluster, and the load on it."""

    def __init__(self, scene: Scene, fleet: Fleet, generator: int) -> None:
        self.scene, self.fleet, self.generator = scene, fleet, generator
        self.looks = Looks(scene.client)

    async def phase(self, seconds: float, facts_per_s: float) -> Figures:
        """Load the cluster for a while, and strike; return the figures."""
        await self.fleet.ask("go", facts_per_s)
        await asyncio.sleep(min(5.0, seconds))  # what came before is taken in
        self.looks.figures()
        before, heard, usage = (
            await self.fleet.ask("count"),
            self.looks.heard,
            Usage(self.scene.cluster, self.generator),
        )
        began, heals, left = time.monotonic(), list[float](), seconds
        while left > 0:
            killed = await self.scene.strike("real", len(heals))
            heals.append(await self.scene.whole("real", killed, REAL))
            left = seconds - (time.monotonic() - began)
            await asyncio.sleep(min(STRIKE_S, max(0.0, left)))
        took, after = time.monotonic() - began, await self.fleet.ask("count")
        await self.fleet.ask("go", 0.0)
        return {
            "seconds": round(took, 1),
            **{f"{name}_per_s": round((sent - before.sent[name]) / took, 1) for name, sent in after.sent.items()},
            "heard_per_s": round((self.looks.heard - heard) / took, 1),
            **percentiles("store", after.took),
            "heals": len(heals),
            "heal_p50_s": median(heals),
            "heal_max_s": worst(heals),
            **self.looks.figures(),
            **usage.figures(),
        }

    async def submit(self) -> None:
        """Have the real task train, and then the simulated ones, on the nodes that join for them."""
        began, env = time.time(), {"PACE": "0.1"}
        await self.scene.client.submit(task("real", TRAINED, REAL, microbatches=6, env=env, **shrinking(REAL)))
        await self.scene.whole("real", began, REAL)
        await self.fleet.ask("join", min(WORKERS, self.fleet.nodes))
        each = min(WORKERS, self.fleet.nodes) // TASKS
        for number in range(TASKS):
            spec = task(f"simulated-{number}", ["none"], each, microbatches=each, throughput={each: float(each)})
            await self.scene.client.submit(spec)
        await self.fleet.ask("until_computing", TASKS * each)

    async def whole(self, seconds: float, facts_per_s: float) -> Result:
        """Measure the baseline, and then the load."""
        async with background(self.looks.listen(), *map(self.looks.look, SERVICES)):
            await self.submit()
            baseline = await self.phase(seconds / 6, facts_per_s / 10)
            began = time.time()
            await self.fleet.ask("join", self.fleet.nodes)
            joined_s, dropped = time.time() - began, self.looks.dropped.total()
            figures = await self.phase(seconds, facts_per_s)
        alarms = [each for each in self.scene.said(FailureDetected) if each.method == DetectionMethod.NODE_HEALTH]
        for each in alarms[:: max(1, len(alarms) // 10)]:
            say(f"false alarm {each.at - began:.1f} s after the last began to join: {each.reason}")
        cluster = self.scene.cluster
        logs = [cluster.log(name).read_text(errors="replace") for name in cluster.servers]
        store = cluster.root / cluster.servers[0] / "store"
        figures |= {
            "nodes": self.fleet.nodes,
            "join_all_s": round(joined_s, 1),
            "false_alarms": len(alarms),
            "dead_letters": len(self.scene.said(DeadLetter)),
            "dropped_in_joining": dropped,
            "dropped": self.looks.dropped.total() - dropped,
            "unanswered": self.looks.failed.total(),
            "slow_consumers": sum(log.count("Slow Consumer") for log in logs),
            "disk_mb": round(sum(path.stat().st_size for path in store.rglob("*") if path.is_file()) / 1e6, 1),
        }
        return Result(figures, {"a tenth of the facts, few nodes": baseline})


@contextlib.contextmanager
def generating(cluster: Cluster, nodes: int) -> Iterator[tuple[Fleet, int]]:
    """Have the generator, and its process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    generator = context.Process(target=Fleet.serve, args=(theirs, cluster.settings(FLEET)), daemon=True)
    generator.start()
    try:
        yield Fleet(ours, nodes), int(generator.pid or 0)
    finally:
        generator.terminate()


async def measure(options: Options, root: Path) -> Result:
    """Load a cluster."""
    widen()
    cluster = Cluster(root, nodes=REAL, slots=1, servers=several(free_port()))
    cluster.keys.admit(FLEET)
    os.environ["UNICRON_ATTEMPTS"] = "1000"  # on one node more fail than on any that is not to be taken out of use
    async with started(cluster, FailureDetected, DeadLetter, Regrouped, WorkerReady, TaskStateChanged) as scene:
        with generating(cluster, options.nodes) as (fleet, generator):
            return await Loaded(scene, fleet, generator).whole(60 * options.minutes, options.facts)


if __name__ == "__main__":
    main(
        measure,
        option("--minutes", default=10.0, help="of the full load"),
        option("--nodes", default=16384, help="that are simulated"),
        option("--facts", default=1000.0, help="a second"),
    )
