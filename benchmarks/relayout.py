"""How long a task is away while its layout changes, and whether its state is the same afterwards, bit for bit.

    python -m benchmarks.relayout --layouts tp2 fsdp2

A real cluster of four nodes with a slot each, and a task of examples/parallel/train.py (as `benchmarks.relaid`) whose
state, parameters and both moments, is some 50 MB. With four workers it has the layout under test, with three each
worker holds the whole model. Nodes are drained and used again, and killed and started again where another replica has
the state. For each change:

- `away_s`: from the end of the last iteration in the old layout until all workers of the new one have met with their
  states: nobody computes in between; `leave_s` and `take_s` are what the slowest rank takes to leave or take its part;
- `change_s`: from the plan until then; the iteration at hand is finished in between;
- `equal`: the parts that were left behind make the same whole as those that were taken.

The baseline, `restart_s`, is what a task of the same size takes from its submission until its workers have met:
processes that start, and nothing to hand over.
"""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.cluster import Scene, running, task, until
from benchmarks.harness.command import Figures, Options, Result, main, option, say
from benchmarks.harness.processes import flags
from benchmarks.harness.stats import median, worst
from benchmarks.struck import EXAMPLES, loaded
from unicron.contracts.events import PlanDecided, Regrouped, TaskRecovered, TaskSubmitted
from unicron.contracts.tasks import ParallelLayout
from unicron.train.snapshots.gathering import Gathering
from unicron.train.snapshots.packed import unpack

LAYOUTS = {
    "dp4": ParallelLayout(),
    "tp2": ParallelLayout(tensor=2),
    "pp2": ParallelLayout(pipeline=2),
    "fsdp2": ParallelLayout(shard=2),
    "tp2_pp2": ParallelLayout(tensor=2, pipeline=2),
    "fsdp4": ParallelLayout(shard=4),
}
SIZES = {"width": 288, "layers": 4, "heads": 4, "context": 16, "batch": 12}
NODE = "node-4"


def gathered(notes: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return the whole state that noted parts make up, as tensors by name."""
    model = loaded(EXAMPLES / "parallel" / "train.py").Decoder(*list(SIZES.values())[:4])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    gathering = Gathering({"model": model, "optimizer": optimizer})  # what one process alone would protect
    for each in notes:
        path, size = each["path"].with_suffix(".pt"), each["size"]
        gathering.add(unpack(path, size) if size else torch.load(path, weights_only=True, mmap=True))
        path.unlink()
    objects = gathering.result(0)["objects"]
    moments = objects["optimizer"]["state"].items()
    return dict(objects["model"]) | {f"{name} {what}": each for name, kept in moments for what, each in kept.items()}


def compared(parts: dict[str, list[dict[str, Any]]]) -> Figures:
    """Return whether what was taken is what was left, and how large it is."""
    if not all(parts.values()):
        return {"equal": False, "state_mb": 0.0, "parts": {kind: len(each) for kind, each in parts.items()}}
    left, taken = gathered(parts["left"]), gathered(parts["taken"])
    same = left.keys() == taken.keys() and all(torch.equal(left[name], taken[name]) for name in left)
    return {"equal": same, "state_mb": round(sum(each.nbytes for each in left.values()) / 1e6, 1)}


class Task:
    """One task, and the changes of its layout."""

    def __init__(self, name: str, scene: Scene, folder: Path) -> None:
        self._name, self._scene, self._notes = name, scene, folder / "notes"
        self._notes.mkdir(parents=True)
        shape = LAYOUTS[name]
        self.spec = task(
            name,
            ["-m", "benchmarks.relaid", *flags(**SIZES)],
            4,
            env={"UNICRON_NOTES": str(self._notes)},
            min_workers=3,
            microbatches=8,
            throughput={3: 3e9, 4: 4e9},
            # one that is a replica for each worker changes too: three share the model out
            layouts={4: shape, 3: ParallelLayout(shard=3) if shape.replica_workers == 1 else ParallelLayout()},
        )

    async def changes(self, repeat: int) -> dict[str, list[Figures]]:
        """Let nodes go and come; return what each change was like, by its kind."""
        client, cluster = self._scene.client, self._scene.cluster
        found: dict[str, list[Figures]] = {"drained": [], "back": [], "killed": [], "back_from_kill": []}
        await client.submit(self.spec)
        await self._recovered(1, 4)
        for _ in range(repeat):
            found["drained"].append(await self._change(3, client.drain(NODE)))
            found["back"].append(await self._change(4, client.drain(NODE, drain=False)))
            if self.spec.layouts[4].replica_workers < 4:
                found["killed"].append(await self._change(3, asyncio.to_thread(cluster.kill_node, NODE)))
                again = asyncio.to_thread(cluster.start_process, NODE)
                found["back_from_kill"].append(await self._change(4, again))
        [submitted] = self._scene.said(TaskSubmitted, self._name)
        first = max(each.at for each in self._scene.said(Regrouped, self._name) if each.epoch == 0)
        found["restart"] = [{"away_s": first - submitted.at}]
        await client.remove(self._name)
        await self._scene.until_ended(self._name)
        return found

    def _recoveries(self, workers: int) -> list[TaskRecovered]:
        return [each for each in self._scene.said(TaskRecovered, self._name) if each.workers == workers]

    async def _recovered(self, count: int, workers: int) -> TaskRecovered:
        enough: Callable[[], bool] = lambda: len(self._recoveries(workers)) >= count  # noqa: E731
        await until(enough, f"{self._name} has {workers} workers")
        return self._recoveries(workers)[count - 1]

    async def _change(self, workers: int, doing: Any) -> Figures:
        """Have the task change to so many workers; return what that was like."""
        scene, name = self._scene, self._name
        reached = max((each.iteration for each in scene.iterations if each.task == name), default=-1)
        await scene.reached(name, reached + 2)
        before, plans = len(self._recoveries(workers)), len(scene.said(PlanDecided))
        noted = set(self._notes.glob("*.json"))
        await doing
        recovered = await self._recovered(before + 1, workers)
        await scene.reached(name, reached + 3)
        await asyncio.sleep(1.0)  # notes are written, and telemetry has come
        done = [each for each in scene.iterations if each.task == name and each.at < recovered.at]
        met = max(each.at for each in scene.said(Regrouped, name) if each.epoch == recovered.epoch)
        notes = [json.loads(path.read_text()) | {"path": path} for path in set(self._notes.glob("*.json")) - noted]
        parts = {kind: [each for each in notes if each["kind"] == kind] for kind in ("left", "taken")}
        return {
            "away_s": met - max(each.at for each in done if each.epoch < recovered.epoch),
            "change_s": met - scene.said(PlanDecided)[plans].at,
            "leave_s": worst(each["seconds"] for each in parts["left"]),
            "take_s": worst(each["seconds"] for each in parts["taken"]),
            **await asyncio.to_thread(compared, parts),  # a client that does not answer the bus is cut off
        }


def figures_of(layout: str, found: dict[str, list[Figures]]) -> Figures:
    """Return the figures of all changes of a layout."""
    figures: Figures = {}
    for kind, rows in found.items():
        if kind == "restart" or not rows:
            continue
        for name in ("away_s", "change_s", "leave_s", "take_s"):
            figures[f"{layout}_{kind}_{name}"] = median(row[name] for row in rows)
        figures[f"{layout}_{kind}_away_worst_s"] = worst(row["away_s"] for row in rows)
        figures[f"{layout}_{kind}_equal"] = all(row["equal"] for row in rows)
        figures[f"{layout}_{kind}_changes"] = len(rows)
    figures[f"{layout}_state_mb"] = max(row.get("state_mb", 0.0) for rows in found.values() for row in rows)
    return figures


async def measure(options: Options, root: Path) -> Result:
    """Change the layout of one task after the other."""
    result = Result({}, {"restart": {}})
    async with running(root / "cluster", 4) as scene:
        for name in options.layouts:
            found = await Task(name, scene, root / name).changes(options.repeat)
            result.figures |= figures_of(name, found)
            result.baselines["restart"][f"{name}_restart_s"] = round(found["restart"][0]["away_s"], 3)
            result.details[name] = found
            say(f"{name}: {json.dumps(found)}")
    return result


if __name__ == "__main__":
    main(
        measure,
        option("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS)),
        option("--repeat", default=2, help="times that each node goes and comes"),
        folder="/dev/shm",  # as states are: a link to one takes no time
    )
