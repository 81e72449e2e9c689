"""Scripts that know nothing of Unicron: how long a lost rank costs, beside what else starts such scripts.

    python -m benchmarks.scripts --repeat 5 --vs torchrun --json

The same DDP script (0.87 M parameters, 4 ranks on 2 nodes, its own checkpoint after every fifth iteration) runs under
each. Rank 2 is struck in the twelfth iteration or later: `killed` by SIGKILL, or an exception is `raised` there. For
each way and fault, medians of all runs:

- `WAY_FAULT_s`: from the strike to the end of the first iteration that all ranks have done since,
- `WAY_FAULT_beyond_s`: the same without what was left of the iteration at hand: the time to where it would have ended,
  had nobody been struck, by the median of the iterations before,
- `WAY_FAULT_redone`: iterations that were done again.

`restart` is `heal: restart`, `in_place` is `heal: in-place`, `watched` that with `unicron.train.watch`. `session` is
the script with a `Session`, whose other ranks go on meanwhile: there it is until these have done an iteration since.
The baseline is `torchrun`, one launcher a node with c10d's rendezvous. What torchft does with replicas of one rank is
measured by `benchmarks.parallel --layouts dp4 --vs torchft`.
"""

import asyncio
import contextlib
import json
import os
import signal
import statistics
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from unicron_deploy.nats_server import free_port

from benchmarks.harness import stats
from benchmarks.harness.cluster import running, task, until
from benchmarks.harness.command import Figures, Options, Result, main, names, option, say
from benchmarks.harness.processes import TORCHRUN, ended, start
from benchmarks.peers.runs import OWN_STORE
from unicron.contracts.tasks import UNCOUNTED, Healing, ParallelLayout

NODES, SLOTS, STRUCK, SURVIVOR, SETTLED = 2, 2, 2, 0, 11
WORLD = NODES * SLOTS
FAULTS = ("killed", "raised")
OWN, PEERS = ("restart", "in_place", "watched", "session"), ("torchrun",)
GOES_ON = {"session"}  # ways whose other ranks go on meanwhile without the one that was struck
PATIENCE_S = 120.0
SCRIPTS = "benchmarks.peers"

Notes = list[dict[str, Any]]


def noted(folder: Path) -> Notes:
    """Return what all ranks have noted, in the order of time."""
    lines = [line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines(keepends=True)]
    return sorted((json.loads(line) for line in lines if line.endswith("\n")), key=lambda note: float(note["at"]))


@contextlib.asynccontextmanager
async def on_cluster(heal: Healing, folder: Path, **more: str) -> AsyncIterator[None]:
    """Have the script run on a cluster."""
    async with running(folder / "cluster", NODES, SLOTS) as scene:
        script = "train_session" if heal is Healing.SESSION else "train_plain"
        spec = task(
            "plain",
            ["-m", f"{SCRIPTS}.{script}"],
            WORLD,
            min_workers=1 if heal is Healing.SESSION else WORLD,
            iterations=UNCOUNTED,
            microbatches=WORLD,
            heal=heal,
            layout=ParallelLayout(shard=WORLD if heal is Healing.IN_PLACE else 1),
            drill=False,
            env={"NOTES": str(folder), **more},
        )
        await scene.client.submit(spec)
        yield


@contextlib.asynccontextmanager
async def torchrun(folder: Path) -> AsyncIterator[None]:
    """Have the script run under a launcher a node."""
    words = ["--max-restarts", "10", "--nnodes", str(NODES), "--nproc-per-node", str(SLOTS), "--rdzv-backend", "c10d"]
    words += ["--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-id", "plain", "-m", f"{SCRIPTS}.train_plain"]
    environment = {"NOTES": str(folder), **OWN_STORE}
    logs = [folder / f"torchrun-{node}.log" for node in range(NODES)]
    with ended([start([*TORCHRUN, *words], log, **environment) for log in logs]):
        yield


WAYS: dict[str, Callable[[Path], contextlib.AbstractAsyncContextManager[None]]] = {
    "restart": partial(on_cluster, Healing.RESTART),
    "in_place": partial(on_cluster, Healing.IN_PLACE),
    "watched": partial(on_cluster, Healing.IN_PLACE, WATCHED="1"),
    "session": partial(on_cluster, Healing.SESSION),
    "torchrun": torchrun,
}


async def strike(way: str, fault: str, folder: Path) -> tuple[float, float, int]:
    """Strike once.

    Returns:
        Seconds until all ranks have done an iteration again; of these, seconds of work that was left in any case; and
        how many iterations were done again.
    """
    folder.mkdir(parents=True)
    async with WAYS[way](folder):
        settled = lambda: len([1 for note in noted(folder) if note["iteration"] >= SETTLED]) >= WORLD  # noqa: E731
        await until(settled, f"the script trains; see {folder}", PATIENCE_S)
        before, at = noted(folder), time.time()
        if fault == "killed":
            os.kill(next(note["pid"] for note in reversed(before) if note["rank"] == STRUCK), signal.SIGKILL)
        else:
            (folder / f"raise-{STRUCK}").touch()
        first = await until(lambda: gone_on(way, noted(folder), at), f"all go on; see {folder}", PATIENCE_S)
        notes = noted(folder)
        done = max(note["iteration"] for note in notes if note["at"] < at)
        redone = max(0, done + 1 - min(note["iteration"] for note in first.values()))
        return max(note["at"] for note in first.values()) - at, work_left(notes, at), redone


def work_left(notes: Notes, at: float) -> float:
    """Return the seconds that the iteration at hand would have taken from then on, were nobody struck."""
    ends = [float(note["at"]) for note in notes if note["rank"] == SURVIVOR and note["at"] < at]
    return max(0.0, ends[-1] + statistics.median(end - begin for begin, end in pairwise(ends)) - at)


def gone_on(way: str, notes: Notes, at: float) -> dict[int, dict[str, Any]]:
    """Return each rank's note of the iteration with which it went on; empty before all have."""
    if way in GOES_ON and len(found := others_since(notes, at)) == WORLD - 1:
        return found
    return found if len(found := since(notes, at)) == WORLD else {}  # in some places all ranks begin again


def since(notes: Notes, at: float) -> dict[int, dict[str, Any]]:
    """Return each rank's note of the first iteration that the struck rank's new process has done, as far as they are.

    A rank that lives on in its process has done none that it had done before.
    """
    old = {note["pid"] for note in notes if note["at"] < at}
    struck = next((note for note in notes if note["rank"] == STRUCK and note["pid"] not in old), None)
    if struck is None:
        return {}
    before = {note["rank"]: note["iteration"] for note in notes if note["at"] < at}
    return {
        note["rank"]: note
        for note in reversed(notes)
        if note["at"] >= at
        and note["iteration"] >= struck["iteration"]
        and (note["pid"] not in old or note["iteration"] > before[note["rank"]])
    }


def others_since(notes: Notes, at: float) -> dict[int, dict[str, Any]]:
    """Return the notes of the first iteration that was done since by all others, by process."""
    before = {note["pid"]: note["iteration"] for note in notes if note["at"] < at and note["rank"] != STRUCK}
    return {
        note["pid"]: note
        for note in reversed(notes)
        if note["at"] >= at and note["pid"] in before and note["iteration"] > max(before.values())
    }


def measure(options: Options, root: Path) -> Result:
    """Strike the script under each of our ways, and under the peers that were asked for."""
    result = Result({}, {peer: {} for peer in options.vs})
    for way in (*OWN, *result.baselines):
        figures: Figures = result.baselines.get(way, result.figures)
        for fault in FAULTS:
            folders = [root / f"{way}-{fault}-{number}" for number in range(options.repeat)]
            runs = [asyncio.run(strike(way, fault, folder)) for folder in folders]
            say(f"{way} {fault}: {runs}")
            for name, took in (("", [run[0] for run in runs]), ("beyond_", [run[0] - run[1] for run in runs])):
                figures[f"{way}_{fault}_{name}s"] = stats.median(took)
                figures[f"{way}_{fault}_{name}worst_s"] = stats.worst(took)
            figures[f"{way}_{fault}_redone"] = statistics.median(redone for _, _, redone in runs)
            result.details[f"{way}_{fault}"] = runs
    return result


if __name__ == "__main__":
    main(
        measure,
        option("--repeat", default=5, help="strikes of each kind"),
        option("--vs", type=names(PEERS), default=[], help=f"peers to measure too, with commas, of {PEERS}"),
    )
