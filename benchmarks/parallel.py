"""Models spread over several workers: how fast a task heals in each layout, wherever in an iteration it is struck.

    python -m benchmarks.parallel --json
    python -m benchmarks.parallel --layouts dp2_tp2 --faults killed stopped
    python -m benchmarks.parallel --layouts dp4 dp2_fsdp2 --vs torchft,torchrun

A real cluster for each layout (an agent for each rank and one to spare), and tasks of examples/parallel/train.py on it;
"mcore" stands for megatron-core's model, of examples/megatron. In each task one rank is struck in the forward pass, in
the backward pass, before the reduce and before the update (`benchmarks.struck`), healed in between: its process is
killed, raises, or is stopped. `node` takes a whole node away, somewhere in an iteration. Final parameters are compared
with those of a task that nothing strikes. Microbatches mostly wait, so that all ranks get by with a few cores.

With `--vs` the same model has the same faults under these peers, one after the other on the same machine
(`benchmarks.peers`): as baselines, under the same names. What a peer can't do is left out with its reason.

Figures are by layout and fault, and `benchmarks.harness.healing` explains them: medians over phases and
repetitions, and for `beyond` the worst; `over_goal` is that beyond what the fault's detection may take: three
microbatches, at least 0.7 s, of a stopped rank, and the grace of a node.
"""

import asyncio
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from unicron_cli.demo import max_rel_diff

from benchmarks.harness import healing, stats
from benchmarks.harness.cluster import PATIENCE_S, Scene, running, task
from benchmarks.harness.command import Figures, Options, Result, main, names, option, say
from benchmarks.harness.strikes import (
    APART,
    FAULTS,
    FIRST,
    LAYOUTS,
    MEGATRON,
    MICROBATCH_S,
    MICROBATCHES,
    NODE,
    PHASES,
    VARIABLE,
    Orders,
    Point,
    Struck,
    made_in,
    marker,
    notes_in,
    pace_s,
    points,
    sizes,
)  # fmt: skip
from benchmarks.peers import runs as peers
from unicron.contracts.events import FailureDetected, Regrouped, TaskStateChanged
from unicron.contracts.tasks import TaskState

GRACE_S, LEAST_STALL_S = 1.0, 0.7
MEDIANS = ("first_s", "beyond_s", "waiting_s", "loss_s", "join_s", "whole_s")


class Layout:
    """The tasks of one layout on one cluster."""

    def __init__(self, name: str, scene: Scene, root: Path, phases: Sequence[str]) -> None:
        self._shape, self._scene, self._root, self._phases = LAYOUTS[name], scene, root, phases
        self._name, self._example = name, "megatron" if name.startswith(MEGATRON) else "parallel"
        self._world = self._shape.workers
        self._twin: Path | None = None

    async def strike(self, fault: str, turn: int) -> dict[str, Any]:
        """Run a task that is struck; return what came of it."""
        if self._twin is None:
            self._twin, state = await self._run("twin", 0.0, [], lose_node=False)
            if state != TaskState.FINISHED:
                why = self._scene.said(TaskStateChanged, "twin")[-1].reason
                raise SystemExit(f"{self._name}: without a fault the task is {state}: {why}")
        name, wanted = f"{fault}-{turn}", [] if fault == NODE else points(self._shape, fault, self._phases)
        folder, state = await self._run(name, pace_s(self._shape), wanted, lose_node=fault == NODE)
        notes, made, size = notes_in(folder), made_in(folder), self._shape.replica_workers
        usually = healing.usual(notes, made, self._world)
        regrouped = self._scene.said(Regrouped, name)
        rows = [
            healing.healed(notes, one, usually)
            | healing.regroups(regrouped, one, self._world, size)
            | {"whole_s": self._scene.regrouped_s(name, one.at, self._world)}
            for one in made
        ]
        stages = sorted(path.name for path in self._twin.glob("*.pt"))
        whole = state == TaskState.FINISHED
        return {
            "state": state,
            "strikes": rows,
            "strikes_wanted": 1 if fault == NODE else len(wanted),
            "allowed_s": {"stopped": max(3 * usually.microbatch_s, LEAST_STALL_S), NODE: GRACE_S}.get(fault, 0.0),
            "microbatch_s": usually.microbatch_s,
            "tail_s": usually.tail_s,
            "rel_diff": max(max_rel_diff(folder / each, self._twin / each) for each in stages) if whole else None,
            "redone": healing.redone(notes),
            "wasted": healing.wasted(notes, size, MICROBATCHES),
            "found": [f"{each.severity} {each.status}" for each in self._scene.said(FailureDetected, name)],
        }

    async def _run(self, name: str, pace: float, struck: list[Point], *, lose_node: bool) -> tuple[Path, str]:
        """Run a task to its end; return the folder with what it left, and its state."""
        folder = self._root / "out" / name
        folder.mkdir(parents=True)
        module = "benchmarks.struck_megatron" if self._example == "megatron" else "benchmarks.struck"
        orders = Orders(self._example, str(folder), pace, self._world, struck)
        spec = task(
            name,
            ["-m", module, *sizes(self._example), "--out", str(folder)],
            self._world,
            env={VARIABLE: msgspec.json.encode(orders).decode()},
            min_workers=self._shape.replica_workers,
            microbatches=MICROBATCHES,
            iterations=FIRST + APART * len(self._phases) + 1,
            layout=msgspec.structs.replace(self._shape, replicas=1),
        )
        await self._scene.client.submit(spec)
        if lose_node:
            await self._lose_node(name, folder)
        state = await self._scene.until_ended(name)
        if state == "hangs":
            await self._scene.client.remove(name)
        return folder, state

    async def _lose_node(self, name: str, folder: Path) -> None:
        """Take the node of the last replica's first rank away in an iteration, and bring it back when all is over."""
        await self._scene.reached(name, FIRST - 1)
        await asyncio.sleep(MICROBATCH_S * 1.5)
        change = [each for each in self._scene.said(TaskStateChanged, name) if each.members][-1]
        replica = self._shape.replicas - 1
        node = change.members[replica * self._shape.replica_workers].node
        struck = Struck(time.time(), FIRST, change.epoch, replica, "forward")
        await asyncio.to_thread(self._scene.cluster.kill_node, node)
        marker(folder, 0).write_bytes(msgspec.json.encode(struck))
        await self._scene.until_ended(name)
        await asyncio.to_thread(self._scene.cluster.start_process, node)
        await self._scene.cluster.wait_until_ready(PATIENCE_S)


def figures_of(layout: str, fault: str, runs: Sequence[dict[str, Any]]) -> Figures:
    """Return the figures of all runs of a layout and a fault."""
    over = [
        None if row["beyond_s"] is None else row["beyond_s"] - run["allowed_s"]
        for run in runs
        for row in run["strikes"]
    ]
    return {f"{layout}_{fault}_over_goal_worst_s": stats.worst(over)} | healing.summary(layout, fault, runs, MEDIANS)


async def heal(name: str, options: Options, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Strike the tasks of one layout; return the runs by fault."""
    found: dict[str, list[dict[str, Any]]] = {}
    async with running(folder / "cluster", LAYOUTS[name].workers + 1) as scene:
        layout = Layout(name, scene, folder, options.phases)
        for fault in options.faults:
            for turn in range(options.repeat):
                found.setdefault(fault, []).append(await layout.strike(fault, turn))
                say(f"{name} {fault}: {json.dumps(found[fault][-1])}")
    return found


def measure(options: Options, root: Path) -> Result:
    """Strike all layouts, and then the peers'."""
    result = Result({}, {system: {} for system in options.vs})
    for name in options.layouts:
        for fault, runs in asyncio.run(heal(name, options, root / name)).items():
            result.figures |= figures_of(name, fault, runs)
            result.details[f"{name}_{fault}"] = runs
        for system in options.vs:
            found, details = peers.measure(
                system, name, options.faults, options.phases, options.repeat, root / system / name
            )
            result.baselines[system] |= found
            result.details |= details
    if options.keep:
        shutil.copytree(root, options.keep, dirs_exist_ok=True, ignore=shutil.ignore_patterns("jetstream"))
    return result


if __name__ == "__main__":
    main(
        measure,
        option("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS)),
        option("--faults", nargs="+", choices=FAULTS, default=list(FAULTS)),
        option("--phases", nargs="+", choices=PHASES, default=list(PHASES)),
        option("--vs", type=names(peers.SYSTEMS), default=[], metavar="PEER,PEER", help=f"of {peers.SYSTEMS}"),
        option("--repeat", default=1, help="tasks of each layout and fault"),
        option("--keep", type=Path, help="folder that gets logs and notes"),
    )
