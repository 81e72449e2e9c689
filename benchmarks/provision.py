"""Nodes that are lost and replaced: how long that takes by each provider, and whether a provider's moods do harm.

    python -m benchmarks.provision --repeat 10 --json

A task of two workers, which can also train with one, trains on a cluster whose nodes come by a pool.
A node with one of its workers is killed, again and again, each time the task is whole:

- `PROVIDER_healed_s`: from the kill to the first iteration since, here with one worker (median),
- `PROVIDER_replaced_p50_s`, `_worst_s`: to the first with two, the other of them on the machine that has replaced it,
- `PROVIDER_wrongly_replaced`: machines that were asked for in place of none that was killed,
- `PROVIDER_doubled`: machines beyond one that were given for one that was lost, or did work under one id.

`local_spare` is `local` with a node to spare: there `healed` counts with one or two workers, and `whole_s` is to the
first iteration with two. `moods` is a program whose mood changes when a node is killed, and back once the node was
replaced or after 5 s (`benchmarks.provision_moods`); what came of each is in the details. `docker` needs an engine with
the image unicron-node (`docker build --target node`), `slurm` commands of a Slurm with three nodes to itself on the
PATH; what is not there is named under `skipped`. The baseline is a cluster without a pool, where the node stays lost.
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from unicron_deploy.embedded import Cluster
from unicron_deploy.nats_server import free_port

from benchmarks.harness import stats
from benchmarks.harness.cluster import TRAINED, Scene, running, shrinking, started, task, until
from benchmarks.harness.command import ROOT, Figures, Options, Result, main, names, option, say
from benchmarks.provision_moods import MOODS, POOL, TWIN, end_twins
from unicron.contracts.base import Message
from unicron.contracts.events import (
    Alert,
    MachineAsked,
    MachineDelivered,
    MachineRefused,
    MachineReleased,
    MachineRetired,
    NodeAdmitted,
    NodeGone,
    Regrouped,
    ReplacementDelayed,
)
from unicron.contracts.pools import Stage

TASK, WORKERS, MOST = "t", 2, 3
COUNTED: dict[str, type[Message]] = {
    "asked": MachineAsked,
    "delivered": MachineDelivered,
    "released": MachineReleased,
    "alerts": Alert,
}
TOLD: tuple[type[Message], ...] = (*COUNTED.values(), MachineRefused, MachineRetired, ReplacementDelayed)
HEARD: tuple[type[Message], ...] = (*TOLD, NodeAdmitted, NodeGone, Regrouped)
MOOD_S = 5.0
JOBS_S = 60.0
SURPLUS = {"late", "twice"}
"""Moods in which a machine comes that nobody needs: its node leaves, unless it was given back before it joined."""

IMAGE_USER = 10001
KEYED = 12
"""Nodes that get keys: those that are given back are named anew."""


Kill = Callable[[Scene, str, str], Awaitable[None]]
"""Kills a machine, given its id and its node."""


@dataclass
class Way:
    """How a pool gets its machines.

    Attributes:
        provider: the name of it in a file of pools, and the table with its options.
        kill: kills one of its machines.
        rules: of the pool, besides.
        missing: why it can't be tried here; empty where it can.
        end: ends what machines are left at the end.
    """

    provider: str
    table: str
    kill: Kill
    rules: str = ""
    missing: str = ""
    end: Callable[[], None] | None = None


async def by_agent(scene: Scene, _: str, node: str) -> None:
    """Have an agent kill itself and all that it has started."""
    await scene.client.inject(node, "kill-node")


def readable(keys: Path) -> None:
    """Have the user of the image read the keys of its node."""
    for path in keys.glob(f"{POOL}-*/**/*"):
        shutil.chown(path, IMAGE_USER, IMAGE_USER)
        shutil.chown(path.parent, IMAGE_USER, IMAGE_USER)


def remove_containers() -> None:
    """Remove the containers of the pool: no cluster that is stopped does."""
    if left := called("docker", "ps", "-aq", "--filter", f"label=unicron.pool={POOL}").split():
        called("docker", "rm", "--force", *left)


def cancel_jobs() -> None:
    """End the jobs of the pool, and wait until Slurm has none of them any more.

    Their agents find no cluster to hand anything over to, so nobody waits for them.
    """
    end = time.monotonic() + JOBS_S
    while left := jobs_left():
        if time.monotonic() > end:
            raise TimeoutError(f"jobs {', '.join(left)} have not ended {JOBS_S:g} s after scancel; see `squeue`")
        called("scancel", "--full", "--signal=KILL", *left)
        called("scancel", *left)
        time.sleep(0.5)


def jobs_left() -> list[str]:
    """Return the jobs of the pool that have not ended."""
    rows = called("squeue", "--noheader", "-o", "%j %A")
    return [row.split()[1] for row in rows.splitlines() if row.startswith(f"{POOL}-")]


async def by_engine(_: Scene, machine: str, __: str) -> None:
    """Kill the container of a machine."""
    await asyncio.to_thread(called, "docker", "kill", f"unicron-{machine}")


async def by_slurm(_: Scene, machine: str, __: str) -> None:
    """Kill all processes of a machine's job."""
    await asyncio.to_thread(called, "scancel", "--full", "--signal=KILL", "--name", machine)


def called(*words: str) -> str:
    """Run a command; return what it prints, or why it failed after a `!`."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        return f"!{error}"
    return f"!{(done.stderr.strip().splitlines() or ['it failed'])[-1]}" if done.returncode else done.stdout


def reason(said: str) -> str:
    """Return why a command that `called` ran has failed, empty where it has not."""
    return said[1:] if said.startswith("!") else ""


def ways(folder: Path) -> dict[str, Way]:
    """Return all ways, those that can't be tried here with the reason."""
    image, slurm = called("docker", "image", "inspect", "unicron-node"), called("sinfo", "--noheader")
    local = 'env = {UNICRON_CHAOS = "true"}'
    # what trains is here
    docker = f'image = "unicron-node"\nvolumes = ["{ROOT}:{ROOT}:ro"]\nkeys = "{folder}/cluster/keys"'
    program = folder / "give"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m benchmarks.provision_moods {folder}/cluster "$@"\n')
    program.chmod(0o700)
    moody = "join_s = 10\ndeadline_s = 6\n"
    return {
        "local": Way("local", local, by_agent),
        "local_spare": Way("local", local, by_agent, "spares = 1\n"),
        "moods": Way("command", f'program = ["{program}"]', by_agent, moody),
        "docker": Way("docker", docker, by_engine, missing=reason(image), end=remove_containers),
        "slurm": Way("slurm", 'partition = "all"', by_slurm, missing=reason(slurm), end=cancel_jobs),
    }


class Strike(NamedTuple):
    """The outcome for a node that was killed; times in seconds from then.

    Attributes:
        machine: that it was.
        healed: to the first iteration since.
        whole: to the first of all workers; None where there was none.
        replaced: until another machine had joined in its place, and it or another computed; None where none did.
    """

    machine: str
    healed: float
    whole: float | None = None
    replaced: float | None = None


class Trial:
    """A task, nodes of it that are killed, and what the journal says of that."""

    def __init__(self, scene: Scene, kill: Kill) -> None:
        self.scene, self.kill = scene, kill
        self.strikes: list[Strike] = []
        self.began = 0.0

    async def train(self) -> None:
        """Have the task begin, and wait until it has all workers."""
        fields: dict[str, Any] = {"microbatches": 4, "env": {"PACE": "0.02"}, **shrinking(WORKERS)}
        await self.scene.client.submit(task(TASK, TRAINED, WORKERS, **fields))
        await self._iteration(0, WORKERS)
        self.began = time.time()

    async def _iteration(self, epoch: int, workers: int = 0) -> float:
        """Wait for the end of an iteration of a later membership, or of one with so many workers; return when."""

        def found() -> list[float]:
            ended = self.scene.iterations
            return [one.at for one in ended if one.epoch >= epoch and workers in {0, one.world_size}]

        return float((await until(found, f"an iteration of {workers or 'some'} workers"))[0])

    def machine_of(self, node: str, at: float) -> str:
        """Return the machine that a node was at a Unix second; names of nodes are used again."""
        joined = [fact for fact in self.scene.said(NodeAdmitted) if fact.node == node and fact.at <= at]
        return str(joined[-1].machine) if joined else ""

    async def strike(self, number: int, *, comes_back: bool) -> Strike:
        """Kill a node on which a worker is; return what came of it."""
        regrouped = self.scene.said(Regrouped, TASK)
        epoch = max(fact.epoch for fact in regrouped)
        members = sorted({fact.node for fact in regrouped if fact.epoch == epoch})
        node = members[number % len(members)]
        at = time.time()
        machine = self.machine_of(node, at)
        await self.kill(self.scene, machine, node)
        healed = await self._iteration(epoch + 1) - at
        if not comes_back:
            found = Strike(machine, healed)
        else:
            whole = await self._iteration(epoch + 1, WORKERS) - at
            joined = await until(lambda: self._given(machine), f"{machine} is replaced")
            found = Strike(machine, healed, whole, max(joined - at, whole))
        self.strikes.append(found)
        return found

    def _given(self, machine: str) -> float:
        given = [fact.at for fact in self.scene.said(MachineDelivered) if fact.replaces == machine]
        return min(given, default=0.0)

    async def settled(self) -> None:
        """Wait until no machine comes or goes any more, and the task is whole."""
        while True:
            [pool] = (await self.scene.client.pools()).pools
            if pool.have >= pool.wanted and all(each.stage is Stage.UP for each in pool.machines):
                return
            await asyncio.sleep(0.1)

    def wrongly_replaced(self) -> int:
        """Return how many machines were asked for since the first strike in place of none that was struck."""
        struck = {strike.machine for strike in self.strikes}
        return sum(fact.replaces not in struck for fact in self.scene.said(MachineAsked, since=self.began))

    def doubled(self) -> int:
        """Return how many machines beyond one were given for one that was struck, or did work under one id."""
        given = [
            sum(fact.replaces == each.machine for fact in self.scene.said(MachineDelivered)) for each in self.strikes
        ]
        nodes: dict[str, set[str]] = {}
        for fact in self.scene.said(Regrouped):
            nodes.setdefault(self.machine_of(fact.node, fact.at), set()).add(fact.node)
        return sum(max(0, count - 1) for count in (*given, *map(len, nodes.values())))

    def counts(self) -> Figures:
        """Return what must not be."""
        return {"wrongly_replaced": self.wrongly_replaced(), "doubled": self.doubled()}


def cluster(way: Way, folder: Path) -> Cluster:
    """Return a cluster that begins without nodes, and has a pool of them."""
    file = folder / "pools.toml"
    head = f'[pool.{POOL}]\nprovider = "{way.provider}"\nmax = {MOST}\nidle_s = 2\nreplacements = 10000\n'
    file.write_text(f"{head}{way.rules}[pool.{POOL}.{way.provider}]\n{way.table}\n")
    root, port = folder / "cluster", free_port()
    root.mkdir()
    (root / "url").write_text(f"nats://127.0.0.1:{port}")
    (root / "mood").write_text("")
    machines = [f"{name}-{number}" for name in (POOL, TWIN) for number in range(1, KEYED + 1)]
    return Cluster(root, nodes=0, slots=1, port=port, pools=str(file), machines=machines)


async def with_pool(way: Way, folder: Path, repeat: int) -> tuple[Figures, dict[str, Any]]:
    """Kill nodes of a pool; return figures, and the seconds of each."""
    async with started(cluster(way, folder), *HEARD) as scene:
        if way.provider == "docker":
            readable(folder / "cluster" / "keys")
        trial = Trial(scene, way.kill)
        await trial.train()
        for number in range(repeat):
            await trial.settled()
            say(f"{way.provider}: {await trial.strike(number, comes_back=True)}")
        await trial.settled()
        replaced = [strike.replaced for strike in trial.strikes]
        return {
            "healed_s": stats.median(strike.healed for strike in trial.strikes),
            "whole_s": stats.median(strike.whole for strike in trial.strikes),
            "replaced_p50_s": stats.median(replaced),
            "replaced_worst_s": stats.worst(replaced),
            **trial.counts(),
        }, {str(number): strike._asdict() for number, strike in enumerate(trial.strikes)}


async def in_moods(way: Way, folder: Path) -> tuple[Figures, dict[str, Any]]:
    """Kill a node in each mood of the provider; return figures, and what came of each."""
    rows: dict[str, Any] = {}
    async with started(cluster(way, folder), *HEARD) as scene:
        trial, mood = Trial(scene, way.kill), folder / "cluster" / "mood"
        await trial.train()
        for number, name in enumerate(MOODS):
            await trial.settled()
            at = time.time()
            mood.write_text(name)
            calm = asyncio.get_running_loop().call_later(MOOD_S, mood.write_text, "")
            strike = await trial.strike(number, comes_back=True)
            calm.cancel()
            mood.write_text("")
            if name in SURPLUS:
                await until(partial(surplus_is_gone, scene, at), "the surplus is gone")
            await trial.settled()
            rows[name] = {**_seconds(strike), **_came(scene, at, folder / "cluster" / "calls.jsonl"), "is": MOODS[name]}
            say(f"{name}: {rows[name]}")
    end_twins(folder / "cluster")
    return trial.counts(), rows


def surplus_is_gone(scene: Scene, at: float) -> bool:
    """Return whether a node has left since, or a machine was given back beside the killed one and the one given up."""
    return bool(scene.said(NodeGone, since=at)) or len(scene.said(MachineReleased, since=at)) > 2


def _seconds(strike: Strike) -> Figures:
    return {"healed_s": round(strike.healed, 3), "replaced_s": stats.worst([strike.replaced])}


def _came(scene: Scene, at: float, calls: Path) -> Figures:
    """Return what was asked of the provider since, and what the journal says of machines."""
    made = [json.loads(line) for line in calls.read_text().splitlines()]
    said = sorted((fact for kind in TOLD for fact in scene.said(kind, since=at)), key=lambda fact: fact.at)
    return {
        "calls": sum(call["at"] > at and call["verb"] == "ask" for call in made),
        **{name: len(scene.said(kind, since=at)) for name, kind in COUNTED.items()},
        "says": [f"+{fact.at - at:.1f} s {fact}" for fact in said],
    }


async def without(folder: Path, repeat: int) -> tuple[Figures, dict[str, Any]]:
    """Kill nodes of a cluster without a pool; each is started again by hand for the next strike."""
    async with running(folder / "cluster", WORKERS) as scene:
        trial = Trial(scene, by_agent)
        await trial.train()
        for number in range(repeat):
            strike = await trial.strike(number, comes_back=False)
            say(f"without a pool: {strike}")
            await asyncio.sleep(5.0)  # as long as another would have come
            back, dead = time.time(), set(scene.cluster.nodes) - set(scene.cluster.alive())
            for node in dead:
                await asyncio.to_thread(scene.cluster.start_process, node)
            await scene.whole(TASK, back, WORKERS)
        returned = [strike for strike in trial.strikes if strike.replaced is not None]
    healed = stats.median(strike.healed for strike in trial.strikes)
    return {"local_healed_s": healed, "local_replaced": len(returned)}, {}


def measure(options: Options, root: Path) -> Result:
    """Kill nodes by each way, and without a pool."""
    os.environ |= {
        "UNICRON_CHAOS": "true",
        "UNICRON_ATTEMPTS": "100000",
    }  # on one node more fail than on any that is not to be given up
    result = Result({}, {}, {"skipped": {}})
    for name in options.ways:
        folder = root / name
        folder.mkdir()
        way = ways(folder)[name]
        if way.missing:
            result.details["skipped"][name] = {"reason": way.missing}
            continue
        run = in_moods(way, folder) if name == "moods" else with_pool(way, folder, options.repeat)
        try:
            figures, result.details[name] = asyncio.run(run)
        finally:
            if way.end:
                way.end()
        result.figures |= {f"{name}_{figure}": value for figure, value in figures.items()}
        replaced = sum(
            each.get("replaced", each.get("replaced_s")) is not None for each in result.details[name].values()
        )
        result.figures[f"{name}_replaced"] = replaced
    folder = root / "without"
    folder.mkdir()
    result.baselines["without a pool"], _ = asyncio.run(without(folder, options.repeat))
    return result


WAYS = ("local", "local_spare", "moods", "docker", "slurm")

if __name__ == "__main__":
    main(
        measure,
        option("--repeat", default=10, help="nodes to kill by each way"),
        option("--ways", type=names(WAYS), default=list(WAYS), help=f"with commas, of {', '.join(WAYS)}"),
    )
