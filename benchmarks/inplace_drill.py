"""The price of the drill of a script that is healed in place: processor time, and how long it holds up an iteration.

    python -m benchmarks.inplace_drill --repeat 5 --json

The script of `benchmarks.scripts` (2 ranks on one node) runs for so many iterations, with its drills and, as the
baseline, without, in turns. Medians of all runs:

- `iteration_ms`, `longest_ms`: of the first rank's iterations, the median and the longest,
- `delay_ms`: by how much the longest is above the median,
- `drills`: that were made; `ghosts_s`: processor seconds of the processes on trial, a drill.

The first iterations, in which torch sets itself up, do not count.
"""

import asyncio
import contextlib
import os
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.harness import stats
from benchmarks.harness.cluster import Scene, running, task, until
from benchmarks.harness.command import Figures, Options, Result, main, option, say
from benchmarks.scripts import SCRIPTS, noted
from unicron.contracts.events import ScriptDrilled
from unicron.contracts.tasks import UNCOUNTED, Healing, ParallelLayout

RANKS, SET_UP, LOOK_S = 2, 2, 0.02


async def processor_s(root: Path, used: dict[int, float]) -> None:
    """Keep how much processor time each process on trial has used, as only those run when nobody else wants to.

    Args:
        root: folder of the cluster, in which they have files open.
        used: by process, in seconds.
    """
    while True:
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.sched_getscheduler(int(process.name)) == os.SCHED_IDLE and any(
                    str(each.readlink()).startswith(str(root)) for each in (process / "fd").iterdir()
                ):
                    ticks = (process / "stat").read_text().rpartition(")")[2].split()[11:13]
                    used[int(process.name)] = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
        await asyncio.sleep(LOOK_S)


async def run(scene: Scene, folder: Path, iterations: int, *, drill: bool) -> dict[str, Any]:
    """Run the script once; return what its iterations and its drills took."""
    folder.mkdir(parents=True)
    fields = {"iterations": UNCOUNTED, "heal": Healing.IN_PLACE, "layout": ParallelLayout(shard=RANKS)}
    await scene.client.submit(
        task(folder.name, ["-m", f"{SCRIPTS}.train_plain"], RANKS, drill=drill, env={"NOTES": str(folder)}, **fields)
    )
    used = dict[int, float]()
    watching = asyncio.create_task(processor_s(scene.cluster.root, used))
    await until(lambda: any(note["iteration"] >= iterations for note in noted(folder)), f"it trains; see {folder}")
    watching.cancel()
    drills = [each for each in scene.said(ScriptDrilled, folder.name) if not (each.problem or each.unproven)]
    await scene.client.remove(folder.name)
    ends = [note["at"] for note in noted(folder) if note["rank"] == 0 and note["iteration"] >= SET_UP]
    took = [1e3 * (end - begin) for begin, end in pairwise(ends[: iterations - SET_UP])]
    return {"median": statistics.median(took), "longest": max(took), "drills": len(drills), "used": sum(used.values())}


def figures(runs: Sequence[dict[str, Any]]) -> Figures:
    """Return the medians of runs."""
    return {
        "iteration_ms": stats.median(each["median"] for each in runs),
        "longest_ms": stats.median(each["longest"] for each in runs),
        "delay_ms": stats.median(each["longest"] - each["median"] for each in runs),
        "delay_worst_ms": stats.worst(each["longest"] - each["median"] for each in runs),
        "drills": statistics.median(each["drills"] for each in runs),
        "ghosts_s": stats.median(each["used"] / max(1, each["drills"]) for each in runs),
    }


async def measure(options: Options, root: Path) -> Result:
    """Run it with drills and without, in turns."""
    found: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    async with running(root / "cluster", 1, RANKS) as scene:
        for number in range(2 * options.repeat):
            drill = number % 2 == 0
            found[drill].append(await run(scene, root / f"t{number}", options.iterations, drill=drill))
            say(f"{'with' if drill else 'without'} drills: {found[drill][-1]}")
    return Result(figures(found[True]), {"without": figures(found[False])})


if __name__ == "__main__":
    main(
        measure,
        option("--repeat", default=5, help="runs of each kind"),
        option("--iterations", default=80, help="of a run"),
    )
