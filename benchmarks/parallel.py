"""Models spread over several workers: how fast a task heals in each layout, wherever in an iteration it is struck.

    python -m benchmarks.parallel --json
    python -m benchmarks.parallel --layouts dp2_tp2 --faults killed stopped
    python -m benchmarks.parallel --layouts dp4 dp2_fsdp2 --vs torchft,torchrun

A real cluster for each layout (NATS, services, an agent for each rank and one to spare) and tasks of
examples/parallel/train.py on it, one after the other; "mcore" in a layout's name stands for megatron-core's model, of
examples/megatron. In each task one rank is struck in the forward pass, in the backward pass, before the reduce and
before the update (`benchmarks.struck`), healed in between: its process is killed, raises, or is stopped. `node` takes a
whole node away instead, with a rank of one replica, somewhere in an iteration. A task of the same seed that nothing
strikes runs beside them on the same cluster: final parameters are compared with its. Microbatches mostly wait, so that
all ranks get by with a few cores.

With `--vs torchft,torchrun` the same model has the same faults in the same layouts under these peers, one after the
other on the same machine (`benchmarks.peers`): as `baselines`, under the same names, with the microbatches that they
`dropped`. What a peer can't do is left out with its reason: torchft other layouts than replicas and shards, both the
loss of a node, and one that is not installed anything.

Figures are by layout and fault, and what they mean is told in `benchmarks.healing`: the median over phases and
repetitions, and for `beyond` the worst; `over_goal` is that beyond what the fault's detection may take: three
microbatches, at least 0.7 s, of a stopped rank, and the grace of a node.
"""

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from unicron_cli.demo import max_rel_diff
from unicron_deploy.embedded import Cluster
from unicron_deploy.nats_server import free_port

from benchmarks import healing
from benchmarks.output import as_json
from benchmarks.peers import runs as peers
from benchmarks.strikes import (
    APART,
    FAULTS,
    FIRST,
    LAYOUTS,
    MEGATRON,
    MICROBATCH_S,
    MICROBATCHES,
    NODE,
    PHASES,
    ROOT,
    middle,
    named,
    pace_s,
    points,
    say,
    sizes,
    worst,
)
from benchmarks.struck import VARIABLE, Note, Orders, Point, Struck
from unicron.bootstrap import connected_client
from unicron.client import Client
from unicron.contracts.base import Message
from unicron.contracts.events import FailureDetected, IterationFinished, Regrouped, TaskStateChanged
from unicron.contracts.tasks import TaskSpec, TaskState

GRACE_S, LEAST_STALL_S = 1.0, 0.7
PATIENCE_S = 180.0


class Scene:
    """A running cluster, and all that it tells."""

    def __init__(self, cluster: Cluster, client: Client) -> None:
        self.cluster, self.client = cluster, client
        self.journal: list[Message] = []
        self.iterations: list[IterationFinished] = []

    async def follow(self) -> None:
        """Note what goes into the journal."""
        async for _, message in self.client.follow():
            self.journal.append(message)

    async def listen(self) -> None:
        """Note which iterations end."""
        async for message in self.client.telemetry(IterationFinished):
            if isinstance(message, IterationFinished):
                self.iterations.append(message)

    def told(self, kind: type[Message], task: str) -> list[Any]:
        """Return the facts of a kind about a task."""
        return [
            message for message in self.journal if isinstance(message, kind) and getattr(message, "task", "") == task
        ]

    async def until_ended(self, task: str, patience_s: float = PATIENCE_S) -> str:
        """Wait for the end of a task; return its state, "hangs" if it has none in time."""
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            changes = self.told(TaskStateChanged, task)
            if changes and changes[-1].state.ended:
                await asyncio.sleep(0.3)  # workers leave, and what they said is on its way
                return str(changes[-1].state)
            await asyncio.sleep(0.05)
        return "hangs"

    async def reached(self, task: str, iteration: int) -> None:
        """Wait until a task has ended an iteration, or itself."""
        deadline = time.monotonic() + PATIENCE_S
        while not any(told.task == task and told.iteration >= iteration for told in self.iterations):
            changes = self.told(TaskStateChanged, task)
            if time.monotonic() > deadline or (changes and changes[-1].state.ended):
                return
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def running(root: Path, nodes: int) -> AsyncIterator[Scene]:
    """Have a cluster of nodes with one slot each: places of a replica are on different nodes."""
    cluster = Cluster(root, nodes=nodes, slots=1, port=free_port())
    await asyncio.to_thread(cluster.start)
    try:
        await cluster.wait_until_ready(PATIENCE_S)
        async with connected_client(cluster.settings(), "benchmark") as client:
            scene = Scene(cluster, client)
            jobs = [asyncio.create_task(scene.follow()), asyncio.create_task(scene.listen())]
            await asyncio.sleep(0.3)
            try:
                yield scene
            finally:
                for job in jobs:
                    job.cancel()
                await asyncio.gather(*jobs, return_exceptions=True)
    finally:
        cluster.stop()  # not in a thread: one that has not begun yet can be cancelled


class Layout:
    """The tasks of one layout on one cluster."""

    def __init__(self, name: str, scene: Scene, root: Path, phases: Sequence[str]) -> None:
        self._shape, self._scene, self._root, self._phases = LAYOUTS[name], scene, root, phases
        self._name, self._example = name, "megatron" if name.startswith(MEGATRON) else "parallel"
        self._world = self._shape.workers
        self._iterations = FIRST + APART * len(phases) + 1
        self._twin: Path | None = None

    async def strike(self, fault: str, turn: int) -> dict[str, Any]:
        """Run a task that is struck; return what came of it."""
        if self._twin is None:
            self._twin, state = await self._run("twin", 0.0, [], strikes=False)
            if state != TaskState.FINISHED:
                why = self._scene.told(TaskStateChanged, "twin")[-1].reason
                raise SystemExit(f"{self._name}: without a fault the task is {state}: {why}")
        task = f"{fault}-{turn}"
        struck = [] if fault == NODE else points(self._shape, fault, self._phases)
        folder, state = await self._run(task, pace_s(self._shape), struck, strikes=fault == NODE)
        notes = [
            msgspec.json.decode(line, type=Note)
            for path in folder.glob("[0-9]*.jsonl")
            for line in path.read_bytes().splitlines()
        ]
        marks = sorted(folder.glob("strike-*.json"))
        made = [msgspec.json.decode(path.read_bytes(), type=Struck) for path in marks]
        notes.sort(key=lambda note: note.at)
        usually = healing.usual(notes, made, self._world)
        regrouped = self._scene.told(Regrouped, task)
        rows = [
            healing.healed(notes, one, usually)
            | healing.regroups(regrouped, one, self._world, self._shape.replica_workers)
            | {"whole_s": healing.whole_s(regrouped, one.at, self._world)}
            for one in made
        ]
        allowed = {"stopped": max(3 * usually.microbatch_s, LEAST_STALL_S), NODE: GRACE_S}.get(fault, 0.0)
        return {
            "state": state,
            "strikes": rows,
            "strikes_wanted": 1 if fault == NODE else len(struck),
            "allowed_s": allowed,
            "microbatch_s": usually.microbatch_s,
            "tail_s": usually.tail_s,
            "rel_diff": self._difference(folder) if state == TaskState.FINISHED else None,
            "redone": healing.redone(notes),
            "wasted": healing.wasted(notes, self._shape.replica_workers, MICROBATCHES),
            "found": [f"{each.severity} {each.status}" for each in self._scene.told(FailureDetected, task)],
        }

    def _difference(self, folder: Path) -> float:
        assert self._twin is not None
        stages = sorted(path.name for path in self._twin.glob("*.pt"))
        return max(max_rel_diff(folder / name, self._twin / name) for name in stages)

    async def _run(self, task: str, pace: float, struck: list[Point], *, strikes: bool) -> tuple[Path, str]:
        """Run a task to its end; return the folder with what it left, and its state."""
        folder = self._root / "out" / task
        folder.mkdir(parents=True)
        module = "benchmarks.struck_megatron" if self._example == "megatron" else "benchmarks.struck"
        orders = Orders(self._example, str(folder), pace, self._world, struck)
        spec = TaskSpec(
            name=task,
            command=["python", "-m", module, *sizes(self._example), "--out", str(folder)],
            workdir=str(ROOT),
            env={VARIABLE: msgspec.json.encode(orders).decode(), "OMP_NUM_THREADS": "1"},
            min_workers=self._shape.replica_workers,
            max_workers=self._world,
            microbatches=MICROBATCHES,
            iterations=self._iterations,
            layout=msgspec.structs.replace(self._shape, replicas=1),
        )
        await self._scene.client.submit(spec)
        if strikes:
            await self._lose_node(task, folder)
        state = await self._scene.until_ended(task)
        with (folder / "journal.jsonl").open("wb") as file:
            told = [message for message in self._scene.journal if getattr(message, "task", "") == task]
            file.writelines(msgspec.json.encode(message) + b"\n" for message in told)
        if state == "hangs":
            await self._scene.client.remove(task)
        return folder, state

    async def _lose_node(self, task: str, folder: Path) -> None:
        """Take the node of the last replica's first rank away in an iteration, and bring it back when all is over."""
        await self._scene.reached(task, FIRST - 1)
        await asyncio.sleep(MICROBATCH_S * 1.5)
        change = [each for each in self._scene.told(TaskStateChanged, task) if each.members][-1]
        replica = self._shape.replicas - 1
        node = change.members[replica * self._shape.replica_workers].node
        struck = Struck(time.time(), FIRST, change.epoch, replica, "forward")
        await asyncio.to_thread(self._scene.cluster.kill_node, node)
        (folder / "strike-0.json").write_bytes(msgspec.json.encode(struck))
        await self._scene.until_ended(task)
        await asyncio.to_thread(self._scene.cluster.start_process, node)
        await self._scene.cluster.wait_until_ready(PATIENCE_S)


def figures_of(layout: str, fault: str, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of all runs of a layout and a fault."""
    rows = [row for run in runs for row in run["strikes"]]
    beyond = [row["beyond_s"] for row in rows]
    over = [
        None if row["beyond_s"] is None else row["beyond_s"] - run["allowed_s"]
        for run in runs
        for row in run["strikes"]
    ]
    found = {
        "first_s": middle(row["first_s"] for row in rows),
        "beyond_s": middle(beyond),
        "beyond_worst_s": worst(beyond),
        "waiting_s": middle(row["waiting_s"] for row in rows),
        "loss_s": middle(row["loss_s"] for row in rows),
        "join_s": middle(row["join_s"] for row in rows),
        "over_goal_worst_s": worst(over),
        "whole_s": middle(row["whole_s"] for row in rows),
        "rel_diff": worst(run["rel_diff"] for run in runs),
        "redone": sum(run["redone"] for run in runs),
        "wasted": sum(run["wasted"] for run in runs),
        "strikes": len(rows),
    }
    return named(layout, fault, found)


def measure_peers(options: argparse.Namespace, root: Path) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Return the figures of the peers, by system, and details."""
    baselines: dict[str, dict[str, Any]] = {system: {} for system in options.vs}
    details: dict[str, Any] = {}
    for name in options.layouts:
        for system in options.vs:
            folder = root / system / name
            figures, told = peers.measure(system, name, options.faults, options.phases, options.repeat, folder)
            baselines[system] |= figures
            details |= told
            if options.keep and folder.exists():
                shutil.copytree(folder, options.keep / system / name, dirs_exist_ok=True)
    return baselines, details


def table(figures: dict[str, Any], baselines: dict[str, dict[str, Any]]) -> None:
    """Print figures, and those of the peers beside them."""
    columns = [figures, *baselines.values()]
    if baselines:
        print(f"{'':40}", *(f"{name:>12}" for name in ("unicron", *baselines)))
    for name in dict.fromkeys(name for column in columns for name in column):
        values = (column.get(name, "") for column in columns)
        print(f"{name:40}", *(f"{value:>12.3g}" if isinstance(value, float) else f"{value!s:>12}" for value in values))


def systems(text: str) -> list[str]:
    """Read names of peers with commas between them."""
    names = text.split(",")
    if unknown := set(names) - set(peers.SYSTEMS):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: no such peer; there are {peers.SYSTEMS}")
    return names


async def measure(options: argparse.Namespace, root: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return figures and details."""
    figures: dict[str, Any] = {}
    details: dict[str, Any] = {}
    for name in options.layouts:
        say(f"{name}: starting a cluster")
        folder = root / name
        async with running(folder / "cluster", LAYOUTS[name].workers + 1) as scene:
            layout = Layout(name, scene, folder, options.phases)
            for fault in options.faults:
                runs = []
                for turn in range(options.repeat):
                    runs.append(await layout.strike(fault, turn))
                    say(f"{name} {fault}: {json.dumps(runs[-1])}")
                figures |= figures_of(name, fault, runs)
                details[f"{name}_{fault}"] = runs
        if options.keep:
            shutil.copytree(folder, options.keep / name, dirs_exist_ok=True, ignore=shutil.ignore_patterns("jetstream"))
    return figures, details


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    parser.add_argument("--vs", type=systems, default=[], metavar="PEER,PEER", help="of " + ", ".join(peers.SYSTEMS))
    parser.add_argument("--repeat", type=int, default=1, help="tasks of each layout and fault")
    parser.add_argument("--keep", type=Path, help="folder that gets logs and notes")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: the cluster ends too
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    with tempfile.TemporaryDirectory() as folder:
        figures, details = asyncio.run(measure(options, Path(folder)))
        baselines, told = measure_peers(options, Path(folder))
    if options.json:
        print(as_json("parallel", figures, baselines, details | told))
        return
    table(figures, baselines)


if __name__ == "__main__":
    main()
