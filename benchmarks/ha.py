"""Three NATS servers, one of them lost at every step of a recovery: how long healing takes, and what is lost.

    python -m benchmarks.ha --strikes 50 --json

A task of three workers trains on a real cluster of this machine. Of each round a worker is killed, and at some step of
its recovery (before it, when the failure is detected, when the workers are to regroup, when they have) one of the
servers is ended in an orderly way, killed, stopped or cut off; it is brought back once the task is whole again. Servers
run in networks of their own, so that cutting one off takes its clients and its peers from it alike; that needs root,
and is left out without.

- `heal_with_leader_killed_s`: from the worker's death to all workers in one group again, median of the rounds in which
  the server that was killed led the journal, the services' state or their leases, and likewise for the other manners;
  `heal_s` of the rounds in which no server was lost is the baseline.
- `gap_p99_s`: of facts that a bystander writes one after the other all the time, how long one took to be stored.
- `lost_facts`: of those that were acknowledged, how many the journal lacks at the end, and how many of the journal's
  entries somebody who followed it all the time was never given. `twice`: entries that it was given twice, or that were
  stored twice, and iterations that were made twice.
- `differs`: the largest difference of the task's parameters from those of a run without faults.

At last two of the three are killed and a worker with them: `trains_without_s` is for how long the other task was seen
to go on, `heal_after_return_s` from one server's return to the struck task being whole.
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import nats.errors
import torch
from unicron_deploy import embedded, nats_server
from unicron_deploy.embedded import Cluster, several

from benchmarks.healing import whole_s
from benchmarks.output import as_json
from unicron import codec, subjects
from unicron.aio import insist
from unicron.bootstrap import connected
from unicron.bus import topology
from unicron.bus.nats import NatsBus
from unicron.client import Client
from unicron.contracts.base import Message
from unicron.contracts.commands import Regroup
from unicron.contracts.events import DeadLetter, FailureDetected, IterationFinished, Regrouped, WorkerReady
from unicron.contracts.tasks import TaskSpec, TaskState
from unicron.errors import UnicronError

SCRIPT = """
import os, time, torch
from unicron.train import Session

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
session = Session(seed=1, accumulate_dtype=torch.float64, iterations=int(os.environ["TOTAL"]), microbatches=6)
session.protect(model=model, optimizer=optimizer)
session.save(os.environ["OUT"])
for iteration in session.iterations():
    for microbatch in session.microbatches():
        x = torch.randn(8, 16)
        if not os.path.exists(os.environ["HURRY"]):
            time.sleep(0.1)
        session.backward((model(x) - x.sum(1, keepdim=True)).square().mean())
    session.step()
"""

WORKERS, TOTAL = 3, 6000
PROBER = "prober"
PROBE_S = 0.05
WAIT_S = 90.0
"""Within which every recovery must be over."""

MANNERS = ("ended", "killed", "stopped", "cut off")
STEPS: dict[str, type[Message]] = {
    "before": Message,
    "detected": FailureDetected,
    "regroup ordered": Regroup,
    "regrouped": Regrouped,
}
STREAMS = {"journal": topology.STREAM} | {name: f"KV_{bucket}" for name, bucket in topology.BUCKETS.items()}
SUBNET = "10.77.0"


def call(*words: str) -> None:
    """Run a command."""
    subprocess.run(words, check=True, capture_output=True)


@contextlib.contextmanager
def networks(names: Sequence[str]) -> Iterator[dict[str, str]]:
    """Give each name a network of its own, all on one switch; yield their addresses. We are in one of our own, too."""
    spaces = {name: f"unicron-{os.getpid()}-{name}" for name in names}
    try:
        call("sysctl", "-w", "net.ipv4.ip_nonlocal_bind=1")  # here only: that a port is free is tried from here
        call("ip", "link", "set", "lo", "up")
        call("ip", "link", "add", "switch", "type", "bridge")
        call("ip", "address", "add", f"{SUBNET}.1/24", "dev", "switch")
        call("ip", "link", "set", "switch", "up")
        for number, (name, space) in enumerate(spaces.items(), 11):
            call("ip", "netns", "add", space)
            call("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", space)
            call("ip", "link", "set", name, "master", "switch", "up")
            call("ip", "-n", space, "address", "add", f"{SUBNET}.{number}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                call("ip", "-n", space, "link", "set", device, "up")
        yield {name: f"{SUBNET}.{number}" for number, name in enumerate(names, 11)}
    finally:
        for space in spaces.values():
            subprocess.run(["ip", "netns", "delete", space], check=False, capture_output=True)


def in_networks(root: Path) -> None:
    """Have each server start in its network: by a script that knows it by the folder of its configuration."""
    script = root / "nats-server"
    binary = nats_server.find_binary()
    script.write_text(
        f'#!/bin/sh\nexec ip netns exec "unicron-{os.getpid()}-$(basename "$(dirname "$2")")" {binary} "$@"\n'
    )
    script.chmod(0o700)
    nats_server.find_binary = lambda: str(script)


class Bystander:
    """Writes facts that nobody acts on, one after the other, and reads the journal all the time.

    Attributes:
        took: seconds that each fact took to be stored.
        stored: numbers of the facts that were acknowledged.
        given: entries that were delivered, by sequence.
        said: messages in them.
        finished: telemetry of iterations.
    """

    def __init__(self, bus: NatsBus, reader: Client) -> None:
        self._bus, self._reader = bus, reader
        self.took: list[float] = []
        self.stored: list[int] = []
        self.given: Counter[int] = Counter()
        self.said: list[Message] = []
        self.finished: list[IterationFinished] = []

    async def write(self) -> None:
        """Write without end."""
        for number in itertools.count():
            fact = DeadLetter(
                id=f"probe-{number}",
                at=time.time(),
                source=PROBER,
                correlation=f"probe-{number}",
                subject=f"probe.{number}",
                error="none: benchmarks.ha tries how long a fact takes",
            )
            subject, data, began = subjects.of(fact), codec.encode(fact), time.monotonic()
            await insist(lambda: self._bus.append(subject, data, fact.id), "probing")  # noqa: B023
            self.took.append(time.monotonic() - began)
            self.stored.append(number)
            await asyncio.sleep(PROBE_S)

    async def read(self) -> None:
        """Follow the journal."""
        async for entry in self._reader.bus.follow(subjects.JOURNAL, 0):
            self.given[entry.sequence] += 1
            with contextlib.suppress(UnicronError):
                self.said.append(codec.decode_message(entry.data))

    async def listen(self) -> None:
        """Hear of iterations."""
        async for message in self._reader.telemetry(IterationFinished):
            if isinstance(message, IterationFinished):
                self.finished.append(message)

    def of(self, kind: type[Message], task: str, since: float) -> list[Any]:
        """Return what was said of a task."""
        return [m for m in self.said if isinstance(m, kind) and getattr(m, "task", "") == task and m.at > since]


async def until(condition: Any, what: str, timeout_s: float = WAIT_S) -> Any:
    """Wait until `condition` returns something true; return it."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {timeout_s:g} s: {what}")
        await asyncio.sleep(0.02)
    return found


class Run:
    """One cluster, and what is done to it."""

    def __init__(self, cluster: Cluster, bus: NatsBus, seen: Bystander, manners: Sequence[str]) -> None:
        self.cluster, self.bus, self.seen, self.manners = cluster, bus, seen, manners
        self.client = Client(bus)
        self.rounds: list[dict[str, Any]] = []

    def task(self, name: str) -> TaskSpec:
        """Return a task that trains until it is told to hurry."""
        root = self.cluster.root
        return TaskSpec(
            name=name,
            command=["python", str(root / "script.py")],
            workdir=str(root),
            max_workers=WORKERS,
            microbatches=6,
            iterations=TOTAL,
            throughput={count: float(count) for count in range(1, WORKERS + 1)},
            env={"OUT": str(root / f"{name}.pt"), "HURRY": str(root / "hurry"), "TOTAL": str(TOTAL)},
        )

    async def leaders(self) -> dict[str, str]:
        """Return which server leads each stream, once every server has all of each."""
        while True:
            with contextlib.suppress(nats.errors.Error):
                found = {name: (await self.bus.jetstream.stream_info(each)).cluster for name, each in STREAMS.items()}
                whole = [
                    each for each in found.values() if each and sum(bool(r.current) for r in each.replicas or []) == 2
                ]
                if len(whole) == len(found) and all(each.leader for each in whole):
                    return {name: str(each and each.leader).rpartition("-")[0] for name, each in found.items()}
            await asyncio.sleep(0.1)

    async def view(self, name: str) -> Any:
        """Return how a task stands."""
        while True:
            with contextlib.suppress(UnicronError):
                return next(each for each in (await self.client.status()).tasks if each.spec.name == name)
            await asyncio.sleep(0.1)

    async def lose(self, server: str, manner: str) -> None:
        """Take a server away."""
        match manner:
            case "ended":
                self.cluster.processes[server].signal(signal.SIGTERM)
            case "killed":
                await asyncio.to_thread(self.cluster.kill, server)
            case "stopped":
                self.cluster.processes[server].signal(signal.SIGSTOP)
            case "cut off":
                call("ip", "link", "set", server, "down")

    async def bring_back(self, server: str, manner: str) -> None:
        """Give it back."""
        match manner:
            case "ended" | "killed":
                await until(lambda: server not in self.cluster.alive(), f"{server} ends")
                await asyncio.to_thread(self.cluster.start_process, server)
            case "stopped":
                self.cluster.processes[server].signal(signal.SIGCONT)
            case "cut off":
                call("ip", "link", "set", server, "up")

    def whole(self, since: float) -> float | None:
        """Return after how many seconds all workers of the task were in one group again."""
        return whole_s(self.seen.of(Regrouped, "struck", since), since, WORKERS)

    async def victim(self, number: int) -> int:
        """Return the process of one of the task's workers, as the journal has them; the registry may be behind it."""
        regrouped = self.seen.of(Regrouped, "struck", 0.0)
        newest = max(fact.epoch for fact in regrouped)
        members = {fact.rank: fact.worker for fact in regrouped if fact.epoch == newest}
        name = members[sorted(members)[number % len(members)]]
        ready = lambda: [m.pid for m in self.seen.said if isinstance(m, WorkerReady) and m.worker == name]  # noqa: E731
        return int((await until(ready, f"{name} is ready"))[-1])

    async def strike(self, number: int, server: str, manner: str, step: str) -> None:
        """Kill a worker, and lose a server at that step of its recovery; note how it went."""
        leads = [name for name, leader in (await self.leaders()).items() if leader == server]
        victim = await self.victim(number)
        if step == "before" and server:
            await self.lose(server, manner)
            lost_at = time.time()
            await asyncio.sleep(0.2)
        killed = time.time()
        os.kill(victim, signal.SIGKILL)
        if step != "before" and server:
            kind = STEPS[step]
            await until(lambda: self.seen.of(kind, "struck", killed - 0.1), step)
            await self.lose(server, manner)
            lost_at = time.time()
        heal = await until(lambda: self.whole(killed), f"healed, with {server or 'no server'} {manner} {step}")
        note = {"server": server, "leads": leads, "manner": manner, "step": step, "heal_s": round(heal, 3)}
        self.rounds.append(note)
        print(note, file=sys.stderr, flush=True)
        if server:
            await asyncio.sleep(max(0.0, lost_at + 1.0 - time.time()))  # so quickly it would hardly have been away
            await self.bring_back(server, manner)

    async def two_lost(self) -> dict[str, float]:
        """Kill two of the servers, and a worker; return how it went."""
        await self.leaders()
        first, second, _ = self.cluster.servers
        victim = await self.victim(0)
        for server in (first, second):
            await self.lose(server, "killed")
        began = time.time()
        os.kill(victim, signal.SIGKILL)
        await asyncio.sleep(10.0)
        bystanding = [m for m in self.seen.finished if m.task == "beside" and m.at > began]
        healed = self.seen.of(Regrouped, "struck", began)
        back = time.time()
        await self.bring_back(first, "killed")
        after = await until(lambda: self.whole(back), "healed after one of two servers was back")
        await self.bring_back(second, "killed")
        return {
            "trains_without_s": max((m.at for m in bystanding), default=began) - began,
            "healed_without_a_majority": len(healed),
            "heal_after_return_s": after,
        }

    async def all(self, strikes: int) -> dict[str, float]:
        """Do all rounds."""
        for name in ("struck", "beside"):
            await self.client.submit(self.task(name))
        await until(
            lambda: {m.task for m in self.seen.finished if m.iteration >= 3} == {"struck", "beside"}, "training"
        )
        for number in range(max(1, strikes // 10)):
            await self.strike(number, "", "not lost", "before")
        kinds = itertools.product(STEPS, self.manners, self.cluster.servers)
        for number, (step, manner, server) in enumerate(itertools.islice(itertools.cycle(kinds), strikes)):
            await self.strike(number, server, manner, step)
        return await self.two_lost()

    async def end(self) -> None:
        """Have both tasks end."""
        (self.cluster.root / "hurry").touch()
        for name in ("struck", "beside"):
            while (view := await self.view(name)).state is not TaskState.FINISHED:
                if view.state is TaskState.FAILED:
                    raise SystemExit(f"{name} failed: {view.reason}")
                await asyncio.sleep(0.2)


def differs(root: Path, name: str) -> float:
    """Return the largest difference of a task's parameters from those of one process that nothing struck."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("UNICRON_")}
    env |= {"OUT": str(root / "plain.pt"), "HURRY": "/", "TOTAL": str(TOTAL), "OMP_NUM_THREADS": "1"}
    if not (root / "plain.pt").exists():
        subprocess.run([sys.executable, str(root / "script.py")], check=True, env=env, stdout=subprocess.DEVNULL)
    ours, plain = (torch.load(root / f"{each}.pt", weights_only=True) for each in (name, "plain"))
    return max(float((ours[key].double() - plain[key].double()).abs().max()) for key in plain)


async def run(
    root: Path, strikes: int, addresses: dict[str, str]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Run everything in `root`; return figures, baselines and details."""
    servers = [
        embedded.Server(each.name, each.port, each.routes, addresses.get(each.name, each.host)) for each in several()
    ]
    cluster = Cluster(root, nodes=3, slots=2, servers=servers)
    cluster.keys.admit(PROBER)
    (root / "script.py").write_text(SCRIPT)
    os.environ["UNICRON_ATTEMPTS"] = "1000"  # on one node more fail than on any that is not to be taken out of use
    await asyncio.to_thread(cluster.start)
    try:
        await cluster.wait_until_ready(120.0)
        async with connected(cluster.settings(PROBER), PROBER) as prober, connected(cluster.settings(), "ha") as bus:
            client = Client(bus)
            seen = Bystander(prober, client)
            jobs = [asyncio.create_task(job) for job in (seen.write(), seen.read(), seen.listen())]
            made = Run(cluster, bus, seen, MANNERS if addresses else MANNERS[:-1])
            two = await made.all(strikes)
            await made.end()
            await made.leaders()
            jobs[0].cancel()
            await asyncio.sleep(3.0)
            stored = [entry async for entry in entries(client)]
            for job in jobs:
                job.cancel()
            apart = {name: await asyncio.to_thread(differs, root, name) for name in ("struck", "beside")}
    finally:
        await asyncio.to_thread(cluster.stop)
    return summed_up(made, seen, stored, two | {"differs": max(apart.values())})


async def entries(client: Client) -> Any:
    """Yield all that the journal holds."""
    end = await client.tail()
    async for entry in client.bus.follow(subjects.JOURNAL, 0):
        yield entry
        if entry.sequence >= end:
            return


def summed_up(
    made: Run, seen: Bystander, stored: list[Any], more: dict[str, float]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return figures, baselines and details."""
    ids: Counter[str] = Counter()
    for entry in stored:
        with contextlib.suppress(UnicronError):
            ids[codec.decode_message(entry.data).id] += 1
    made_twice = Counter((m.task, m.iteration) for m in seen.finished)
    unstored = [number for number in seen.stored if f"probe-{number}" not in ids]
    ungiven = [entry.sequence for entry in stored if entry.sequence not in seen.given]
    heals = {
        manner: [each["heal_s"] for each in made.rounds if each["manner"] == manner and each["leads"]]
        for manner in made.manners
    }
    took = sorted(seen.took)
    figures = {
        "strikes": sum(bool(each["server"]) for each in made.rounds),
        **{f"heal_with_leader_{_word(manner)}_s": _median(found) for manner, found in heals.items()},
        **{f"heal_with_leader_{_word(manner)}_max_s": max(found, default=None) for manner, found in heals.items()},
        "gap_p99_s": round(took[int(len(took) * 0.99)], 3),
        "gap_max_s": round(took[-1], 3),
        "lost_facts": len(unstored) + len(ungiven),
        "twice": sum(count - 1 for counter in (ids, seen.given, made_twice) for count in counter.values() if count > 1),
        **{name: round(value, 6) for name, value in more.items()},
    }
    undisturbed = [each["heal_s"] for each in made.rounds if not each["server"]]
    details = {"facts": len(seen.stored), "entries": len(stored), "rounds": made.rounds}
    details["stored_p50_s"] = round(statistics.median(took), 4)
    return figures, {"no server lost": {"heal_s": statistics.median(undisturbed)}}, details


def _word(manner: str) -> str:
    return manner.replace(" ", "_")


def _median(found: list[float]) -> float | None:
    return statistics.median(found) if found else None


def main() -> None:
    """Strike, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strikes", type=int, default=48, help="servers to lose")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    parser.add_argument("--apart", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if os.geteuid() == 0 and not arguments.apart:
        os.execvp("unshare", ["unshare", "--net", sys.executable, "-m", "benchmarks.ha", *sys.argv[1:], "--apart"])
    with tempfile.TemporaryDirectory(prefix="unicron-ha-") as folder, contextlib.ExitStack() as stack:
        names = [each.name for each in several()]
        addresses = stack.enter_context(networks(names)) if arguments.apart else {}
        if addresses:
            in_networks(Path(folder))
        figures, baselines, details = asyncio.run(run(Path(folder), arguments.strikes, addresses))
    if arguments.json:
        print(as_json("ha", figures, baselines, details))
    else:
        print("\n".join(f"{name:36} {value}" for name, value in {**figures, **details}.items()))


if __name__ == "__main__":
    main()
