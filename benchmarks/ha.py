"""Three NATS servers, one of them lost at every step of a recovery: how long healing takes, and what is lost.

A task of three workers trains on a real cluster. Of each round a worker is killed, and at some step of its recovery
(before it, when the failure is detected, when the workers are to regroup, when they have) one of the servers is ended
in an orderly way, killed, stopped or cut off; it is brought back once the task is whole again. Servers run in networks
of their own, so that cutting one off takes its clients and its peers from it alike; that needs root, and is left out
without.

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
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import nats.errors
import torch
from unicron_deploy import nats_server
from unicron_deploy.embedded import Cluster, Server, several

from benchmarks.harness.cluster import TRAINED, Scene, background, shrinking, started, task, until
from benchmarks.harness.command import Figures, Options, Result, main, option, say
from benchmarks.harness.processes import ONE_THREAD
from benchmarks.harness.stats import median, quantile
from unicron import codec, subjects
from unicron.aio import retry_until_available
from unicron.bus import topology
from unicron.bus.nats import NatsBus
from unicron.contracts.base import Message
from unicron.contracts.commands import Regroup
from unicron.contracts.events import DeadLetter, FailureDetected, Regrouped
from unicron.contracts.tasks import TaskState
from unicron.errors import UnicronError
from unicron.service.bootstrap import connected

WORKERS, MICROBATCHES, TOTAL = 3, 6, 6000
TASKS = ("struck", "beside")
PROBER, PROBE_S = "prober", 0.05

SIGNALS = {"ended": signal.SIGTERM, "killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
MANNERS = (*SIGNALS, "cut off")
STEPS: dict[str, type[Message]] = {
    "before": Message, "detected": FailureDetected, "regroup ordered": Regroup, "regrouped": Regrouped,
}  # fmt: skip
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
    script, binary = root / "nats-server", nats_server.find_binary()
    space = f'"unicron-{os.getpid()}-$(basename "$(dirname "$2")")"'
    script.write_text(f'#!/bin/sh\nexec ip netns exec {space} {binary} "$@"\n')
    script.chmod(0o700)
    nats_server.find_binary = lambda: str(script)


class Bystander:
    """Writes facts that nobody acts on, one after the other, and reads the journal all the time."""

    def __init__(self, bus: NatsBus, reader: NatsBus) -> None:
        self._bus, self._reader = bus, reader
        self.took: list[float] = []  # seconds until each fact was stored
        self.stored: list[int] = []  # numbers of the facts that were acknowledged
        self.given: Counter[int] = Counter()  # entries that were delivered, by sequence

    async def write(self) -> None:
        """Write without end."""
        for number in itertools.count():
            name, why = f"probe-{number}", "none: benchmarks.ha tries how long a fact takes"
            fact = DeadLetter(id=name, at=time.time(), source=PROBER, correlation=name, subject=name, error=why)
            subject, data, began = subjects.for_message(fact), codec.encode(fact), time.monotonic()
            await retry_until_available(lambda: self._bus.append(subject, data, fact.id), "probing")  # noqa: B023
            self.took.append(time.monotonic() - began)
            self.stored.append(number)
            await asyncio.sleep(PROBE_S)

    async def read(self) -> None:
        """Follow the journal."""
        async for entry in self._reader.follow(subjects.JOURNAL, 0):
            self.given[entry.sequence] += 1


class Rounds:
    """The faults of the cluster, round by round."""

    def __init__(self, scene: Scene, bus: NatsBus, manners: Sequence[str]) -> None:
        self.scene, self.cluster, self.bus, self.manners = scene, scene.cluster, bus, manners
        self.rounds: list[dict[str, Any]] = []

    async def leaders(self) -> dict[str, str]:
        """Return which server leads each stream, once every server has all of each."""
        while True:
            with contextlib.suppress(nats.errors.Error):
                found = {name: (await self.bus.jetstream.stream_info(each)).cluster for name, each in STREAMS.items()}
                current = [sum(bool(each.current) for each in one.replicas or []) for one in found.values() if one]
                if current == [2] * len(STREAMS) and all(one and one.leader for one in found.values()):
                    return {name: str(one and one.leader).rpartition("-")[0] for name, one in found.items()}
            await asyncio.sleep(0.1)

    async def lose(self, server: str, manner: str) -> float:
        """Take a server away; return when that was."""
        if manner == "cut off":
            call("ip", "link", "set", server, "down")
        else:
            self.cluster.processes[server].signal(SIGNALS[manner])
        return time.time()

    async def bring_back(self, server: str, manner: str) -> None:
        """Give it back."""
        if manner == "cut off":
            call("ip", "link", "set", server, "up")
        elif manner == "stopped":
            self.cluster.processes[server].signal(signal.SIGCONT)
        else:
            await until(lambda: server not in self.cluster.alive(), f"{server} ends")
            await asyncio.to_thread(self.cluster.start_process, server)

    async def strike(self, number: int, server: str, manner: str, step: str) -> None:
        """Kill a worker, and lose a server at that step of its recovery; note how it went."""
        leads = [name for name, leader in (await self.leaders()).items() if leader == server]
        lost_at = 0.0
        if step == "before" and server:
            lost_at = await self.lose(server, manner)
            await asyncio.sleep(0.2)
        killed = await self.scene.strike("struck", number)
        if step != "before" and server:
            await until(lambda: self.scene.said(STEPS[step], "struck", killed - 0.1), step)
            lost_at = await self.lose(server, manner)
        heal = await self.scene.whole("struck", killed, WORKERS)
        note = {"server": server, "leads": leads, "manner": manner, "step": step, "heal_s": round(heal, 3)}
        self.rounds.append(note)
        say(str(note))
        if server:
            await asyncio.sleep(max(0.0, lost_at + 1.0 - time.time()))  # so quickly it would hardly have been away
            await self.bring_back(server, manner)

    async def two_lost(self) -> Figures:
        """Kill two of the servers, and a worker; return how it went."""
        await self.leaders()
        first, second, _ = self.cluster.servers
        for server in (first, second):
            await self.lose(server, "killed")
        began = await self.scene.strike("struck", 0)
        await asyncio.sleep(10.0)
        bystanding = [done.at for done in self.scene.iterations if done.task == "beside" and done.at > began]
        healed, back = self.scene.said(Regrouped, "struck", began), time.time()
        await self.bring_back(first, "killed")
        after = await self.scene.whole("struck", back, WORKERS)
        await self.bring_back(second, "killed")
        return {
            "trains_without_s": max(bystanding, default=began) - began,
            "healed_without_a_majority": len(healed),
            "heal_after_return_s": after,
        }

    async def all(self, strikes: int) -> Figures:
        """Do all rounds, and have both tasks end."""
        root = self.cluster.root
        for name in TASKS:
            env = {"OUT": str(root / f"{name}.pt"), "HURRY": str(root / "hurry"), "PACE": "0.1"}
            more = {"microbatches": MICROBATCHES, "iterations": TOTAL, "env": env, **shrinking(WORKERS)}
            await self.scene.client.submit(task(name, TRAINED, WORKERS, **more))
        for name in TASKS:
            await self.scene.reached(name, 3)
        for number in range(max(1, strikes // 10)):
            await self.strike(number, "", "not lost", "before")
        kinds = itertools.product(STEPS, self.manners, self.cluster.servers)
        for number, (step, manner, server) in enumerate(itertools.islice(itertools.cycle(kinds), strikes)):
            await self.strike(number, server, manner, step)
        found = await self.two_lost()
        (root / "hurry").touch()
        for name in TASKS:
            if (state := await self.scene.until_ended(name)) != TaskState.FINISHED:
                raise SystemExit(f"{name} is {state}")
        await self.leaders()
        return found


def differs(root: Path, name: str) -> float:
    """Return the largest difference of a task's parameters from those of one process that nothing struck."""
    plain = root / "plain.pt"
    env = {"OUT": str(plain), "PACE": "0", "UNICRON_ITERATIONS": str(TOTAL), "UNICRON_MICROBATCHES": str(MICROBATCHES)}
    if not plain.exists():
        subprocess.run([sys.executable, *TRAINED], check=True, env=os.environ | ONE_THREAD | env, stdout=sys.stderr)
    ours, theirs = (torch.load(path, weights_only=True) for path in (root / f"{name}.pt", plain))
    return max(float((ours[key].double() - theirs[key].double()).abs().max()) for key in theirs)


async def run(root: Path, strikes: int, addresses: dict[str, str]) -> Result:
    """Run everything in `root`."""
    servers = [Server(each.name, each.port, each.routes, addresses.get(each.name, each.host)) for each in several()]
    cluster = Cluster(root, nodes=3, slots=2, servers=servers)
    cluster.keys.admit(PROBER)
    os.environ["UNICRON_ATTEMPTS"] = "1000"  # on one node more fail than on any that is not to be taken out of use
    async with (
        started(cluster) as scene,
        connected(cluster.settings(PROBER), PROBER) as prober,
        connected(cluster.settings(), "ha") as bus,
    ):
        bystander, rounds = Bystander(prober, bus), Rounds(scene, bus, MANNERS if addresses else MANNERS[:-1])
        async with background(bystander.read()):
            async with background(bystander.write()):
                two = await rounds.all(strikes)
            await asyncio.sleep(3.0)
            stored = [entry async for entry in entries(bus)]
        apart = [await asyncio.to_thread(differs, root, name) for name in TASKS]
    return summed_up(rounds, bystander, stored, two | {"differs": max(apart)})


async def entries(bus: NatsBus) -> Any:
    """Yield all that the journal holds."""
    end = await bus.tail()
    async for entry in bus.follow(subjects.JOURNAL, 0):
        yield entry
        if entry.sequence >= end:
            return


def summed_up(rounds: Rounds, bystander: Bystander, stored: list[Any], more: Figures) -> Result:
    """Return all figures."""
    ids: Counter[str] = Counter()
    for entry in stored:
        with contextlib.suppress(UnicronError):
            ids[codec.decode_message(entry.data).id] += 1
    made = Counter((done.task, done.iteration) for done in rounds.scene.iterations)
    unstored = [number for number in bystander.stored if f"probe-{number}" not in ids]
    ungiven = [entry.sequence for entry in stored if entry.sequence not in bystander.given]
    heals = {f"heal_with_leader_{manner.replace(' ', '_')}": manner for manner in rounds.manners}
    times = {
        name: [each["heal_s"] for each in rounds.rounds if each["manner"] == manner and each["leads"]]
        for name, manner in heals.items()
    }
    counted = (ids, bystander.given, made)
    figures = {
        "strikes": sum(bool(each["server"]) for each in rounds.rounds),
        **{f"{name}_s": median(found) for name, found in times.items()},
        **{f"{name}_max_s": max(found, default=None) for name, found in times.items()},
        "gap_p99_s": round(quantile(bystander.took, 0.99), 3),
        "gap_max_s": round(max(bystander.took), 3),
        "lost_facts": len(unstored) + len(ungiven),
        "twice": sum(count - 1 for counter in counted for count in counter.values()),
        **{name: round(value, 6) for name, value in more.items()},
    }
    undisturbed = [each["heal_s"] for each in rounds.rounds if not each["server"]]
    details = {"facts": len(bystander.stored), "entries": len(stored), "rounds": rounds.rounds}
    details["stored_p50_s"] = round(statistics.median(bystander.took), 4)
    return Result(figures, {"no server lost": {"heal_s": median(undisturbed)}}, details)


def measure(options: Options, folder: Path) -> Result:
    """Strike, in networks of their own where we may make them."""
    if os.geteuid() == 0 and not options.apart:
        folder.rmdir()
        os.execvp("unshare", ["unshare", "--net", sys.executable, "-m", "benchmarks.ha", *sys.argv[1:], "--apart"])
    with contextlib.ExitStack() as stack:
        addresses = stack.enter_context(networks([each.name for each in several()])) if options.apart else {}
        if addresses:
            in_networks(folder)
        return asyncio.run(run(folder, options.strikes, addresses))


if __name__ == "__main__":
    main(
        measure,
        option("--strikes", default=48, help="servers to lose"),
        option("--apart", action="store_true", help=argparse.SUPPRESS),
    )
