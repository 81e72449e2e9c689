"""How long a task is away while its layout changes, and whether its state is the same afterwards, bit for bit.

    python -m benchmarks.relayout --json
    python -m benchmarks.relayout --layouts tp2 fsdp2

A real cluster of four nodes with a slot each, and a task of examples/parallel/train.py whose state (parameters and both
moments) is some 50 MB. With four workers it has the layout under test, with three each worker holds the whole model.
Nodes are drained and used again, and killed and started again where another replica has the state. For each change:

- `away_s`: from the end of the last iteration in the old layout until all workers of the new one have met with their
  states: nobody computes in between;
- `change_s`: from the plan until then; the iteration at hand is finished in between;
- `equal`: the parts that were left behind make the same whole as those that were taken.

`restart_s` beside them is what a task of the same size takes from its submission until its workers have met: processes
that start, and nothing to hand over.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.output import as_json
from benchmarks.parallel import PATIENCE_S, Scene, running
from benchmarks.strikes import ROOT, middle, say, worst
from unicron.contracts.events import PlanDecided, Regrouped, TaskRecovered, TaskSubmitted
from unicron.contracts.tasks import ParallelLayout, TaskSpec
from unicron.train.gathering import Gathering

LAYOUTS = {
    "dp4": ParallelLayout(),
    "tp2": ParallelLayout(tensor=2),
    "pp2": ParallelLayout(pipeline=2),
    "fsdp2": ParallelLayout(shard=2),
    "tp2_pp2": ParallelLayout(tensor=2, pipeline=2),
    "fsdp4": ParallelLayout(shard=4),
}
WIDTH, BLOCKS, HEADS, CONTEXT = 288, 4, 4, 16
MICROBATCHES = 8
NODE = "node-4"


def whole_model() -> dict[str, Any]:
    """Return what one process alone would protect: what the parts of any layout make together."""
    sys.path.insert(0, str(ROOT / "examples" / "parallel"))
    import train  # type: ignore[import-not-found] # noqa: PLC0415 the example is a script, in a folder of its own

    model = train.Decoder(WIDTH, BLOCKS, HEADS, CONTEXT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return {"model": model, "optimizer": optimizer}


def gathered(paths: Sequence[Path]) -> dict[str, torch.Tensor]:
    """Return the whole state that the parts make up, as tensors by name."""
    gathering = Gathering(whole_model())
    for path in paths:
        gathering.add(torch.load(path, weights_only=True, mmap=True))
    objects = gathering.result(0)["objects"]
    moments = objects["optimizer"]["state"].items()
    found = dict(objects["model"])
    return found | {f"{name} {what}": each for name, kept in moments for what, each in kept.items()}


class Task:
    """One task, and the changes of its layout."""

    def __init__(self, name: str, scene: Scene, folder: Path) -> None:
        self._name, self._scene, self._notes = name, scene, folder / "notes"
        self._notes.mkdir(parents=True)
        shape = LAYOUTS[name]
        sizes = ("--width", WIDTH, "--layers", BLOCKS, "--heads", HEADS, "--context", CONTEXT, "--batch", 12)
        self.spec = TaskSpec(
            name=name,
            command=["python", "-m", "benchmarks.relaid", *map(str, sizes)],
            workdir=str(ROOT),
            env={"UNICRON_NOTES": str(self._notes), "OMP_NUM_THREADS": "1"},
            min_workers=3,
            max_workers=4,
            microbatches=MICROBATCHES,
            iterations=100_000,
            throughput={3: 3e9, 4: 4e9},
            # one that is a replica for each worker changes too: three share the model out
            layouts={4: shape, 3: ParallelLayout(shard=3) if shape.replica_workers == 1 else ParallelLayout()},
        )

    async def changes(self, repeat: int) -> dict[str, list[dict[str, Any]]]:
        """Let nodes go and come; return what each change was like, by its kind."""
        found: dict[str, list[dict[str, Any]]] = {"drained": [], "back": [], "killed": [], "back_from_kill": []}
        await self._scene.client.submit(self.spec)
        await self._recovered(1, 4)
        client, cluster = self._scene.client, self._scene.cluster
        for _ in range(repeat):
            found["drained"].append(await self._change(3, client.drain(NODE)))
            found["back"].append(await self._change(4, client.drain(NODE, drain=False)))
            if self.spec.layouts[4].replica_workers < 4:
                found["killed"].append(await self._change(3, asyncio.to_thread(cluster.kill_node, NODE)))
                again = asyncio.to_thread(cluster.start_process, NODE)
                found["back_from_kill"].append(await self._change(4, again))
        [submitted] = self._scene.told(TaskSubmitted, self._name)
        first = max(each.at for each in self._scene.told(Regrouped, self._name) if each.epoch == 0)
        found["restart"] = [{"away_s": first - submitted.at}]
        await client.remove(self._name)
        await self._scene.until_ended(self._name)
        return found

    async def _recovered(self, count: int, workers: int) -> TaskRecovered:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                told = [each for each in self._scene.told(TaskRecovered, self._name) if each.workers == workers]
                if len(told) >= count:
                    return told[count - 1]  # type: ignore[no-any-return]
                await asyncio.sleep(0.02)

    async def _change(self, workers: int, doing: Any) -> dict[str, Any]:
        """Have the task change to so many workers; return what that was like."""
        reached = max((each.iteration for each in self._scene.iterations if each.task == self._name), default=-1)
        await self._scene.reached(self._name, reached + 2)
        before = len([each for each in self._scene.told(TaskRecovered, self._name) if each.workers == workers])
        plans = len([each for each in self._scene.journal if isinstance(each, PlanDecided)])
        noted = set(self._notes.glob("*.json"))
        await doing
        recovered = await self._recovered(before + 1, workers)
        await self._scene.reached(self._name, reached + 3)
        await asyncio.sleep(1.0)  # notes are written, and telemetry has come
        plan = [each for each in self._scene.journal if isinstance(each, PlanDecided)][plans]
        ended = [
            each.at
            for each in self._scene.iterations
            if each.task == self._name and each.at < recovered.at and each.epoch < recovered.epoch
        ]
        met = max(each.at for each in self._scene.told(Regrouped, self._name) if each.epoch == recovered.epoch)
        notes = [json.loads(path.read_text()) | {"path": path} for path in set(self._notes.glob("*.json")) - noted]
        return {
            "away_s": met - max(ended),
            "change_s": met - plan.at,
            "leave_s": worst(each["seconds"] for each in notes if each["kind"] == "left"),
            "take_s": worst(each["seconds"] for each in notes if each["kind"] == "taken"),
            **await asyncio.to_thread(self._compared, notes),  # a client that does not answer the bus is cut off
        }

    def _compared(self, notes: list[dict[str, Any]]) -> dict[str, Any]:
        """Return whether what was taken is what was left, and how large it is."""
        parts = {
            kind: [each["path"].with_suffix(".pt") for each in notes if each["kind"] == kind]
            for kind in ("left", "taken")
        }
        if not all(parts.values()):
            return {"equal": False, "state_mb": 0.0, "parts": {kind: len(each) for kind, each in parts.items()}}
        left, taken = gathered(parts["left"]), gathered(parts["taken"])
        same = left.keys() == taken.keys() and all(torch.equal(left[name], taken[name]) for name in left)
        size = sum(each.numel() * each.element_size() for each in left.values())
        for each in notes:
            each["path"].with_suffix(".pt").unlink()
        return {"equal": same, "state_mb": round(size / 1e6, 1)}


def figures_of(layout: str, found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the figures of all changes of a layout."""
    figures: dict[str, Any] = {}
    for kind, rows in found.items():
        if kind == "restart" or not rows:
            continue
        for name in ("away_s", "change_s", "leave_s", "take_s"):
            value = middle(row[name] for row in rows)
            figures[f"{layout}_{kind}_{name}"] = None if value is None else round(value, 3)
        figures[f"{layout}_{kind}_away_worst_s"] = round(max(row["away_s"] for row in rows), 3)
        figures[f"{layout}_{kind}_equal"] = all(row["equal"] for row in rows)
        figures[f"{layout}_{kind}_changes"] = len(rows)
    figures[f"{layout}_state_mb"] = max(row.get("state_mb", 0.0) for rows in found.values() for row in rows)
    return figures


async def measure(options: argparse.Namespace, root: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return figures, what starting anew takes, and details."""
    figures: dict[str, Any] = {}
    restarts: dict[str, Any] = {}
    details: dict[str, Any] = {}
    async with running(root / "cluster", 4) as scene:
        for name in options.layouts:
            found = await Task(name, scene, root / name).changes(options.repeat)
            figures |= figures_of(name, found)
            restarts[f"{name}_restart_s"] = round(found["restart"][0]["away_s"], 3)
            details[name] = found
            say(f"{name}: {json.dumps(found)}")
    return figures, restarts, details


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--repeat", type=int, default=2, help="times that each node goes and comes")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: the cluster ends too
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # as states are: a link to one takes no time
        figures, restarts, details = asyncio.run(measure(options, Path(folder)))
    if options.json:
        print(as_json("relayout", figures, {"restart": restarts}, details))
        return
    for name, value in (figures | restarts).items():
        print(f"{name:40} {value if not isinstance(value, float) else f'{value:.3g}'}")


if __name__ == "__main__":
    main()
