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
The peers, as baselines: `torchrun`, one launcher a node with c10d's rendezvous, each restart with a store of its own
(TORCH_DISABLE_SHARE_RDZV_TCP_STORE; without that it meets the dead one's addresses); `torchft` (its nightly build), a
launcher a rank and its lighthouse, the script changed for it.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from unicron_deploy.embedded import Cluster
from unicron_deploy.nats_server import free_port

from benchmarks.output import as_json
from benchmarks.peers.runs import lighthouse
from benchmarks.strikes import ROOT, say
from unicron.bootstrap import connected_client
from unicron.contracts.tasks import UNCOUNTED, Healing, ParallelLayout, TaskSpec

NODES, SLOTS, STRUCK, SURVIVOR, SETTLED = 2, 2, 2, 0, 11
WORLD = NODES * SLOTS
FAULTS = ("killed", "raised")
OWN, PEERS = ("restart", "in_place", "watched", "session"), ("torchrun", "torchft")
GOES_ON = {"session"}
"""Ways whose other ranks go on meanwhile without the one that was struck."""
PATIENCE_S = 120.0
SCRIPTS = "benchmarks.peers"


def noted(folder: Path) -> list[dict[str, Any]]:
    """Return what all ranks have noted, in the order of time."""
    lines = [line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines(keepends=True)]
    return sorted((json.loads(line) for line in lines if line.endswith("\n")), key=lambda note: float(note["at"]))


def told(folder: Path) -> dict[str, str]:
    """Return what the ranks find in their environment."""
    return {"NOTES": str(folder), "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}


@contextlib.asynccontextmanager
async def on_cluster(heal: Healing, folder: Path, **more: str) -> AsyncIterator[None]:
    """Have the script run on a cluster."""
    cluster = Cluster(folder / "cluster", NODES, SLOTS, free_port())
    await asyncio.to_thread(cluster.start)
    try:
        await cluster.wait_until_ready(PATIENCE_S)
        async with connected_client(cluster.settings(), "benchmark") as client:
            spec = TaskSpec(
                name="plain",
                command=["python", "-m", f"{SCRIPTS}.{'train_session' if heal is Healing.SESSION else 'train_plain'}"],
                workdir=str(ROOT),
                min_workers=1 if heal is Healing.SESSION else WORLD,
                max_workers=WORLD,
                iterations=UNCOUNTED,
                microbatches=WORLD,
                heal=heal,
                layout=ParallelLayout(shard=WORLD if heal is Healing.IN_PLACE else 1),
                drill=False,
                env=told(folder) | more,
            )
            await client.submit(spec)
            yield
    finally:
        await asyncio.to_thread(cluster.stop)


def launcher(folder: Path, name: str, words: Sequence[str], **more: str) -> subprocess.Popen[bytes]:
    """Return one of torchrun's."""
    environment = {**os.environ, **told(folder), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **more}
    command = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "10", *words]
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)


@contextlib.asynccontextmanager
async def torchrun(folder: Path) -> AsyncIterator[None]:
    """Have the script run under a launcher a node."""
    words = ["--nnodes", str(NODES), "--nproc-per-node", str(SLOTS), "--rdzv-backend", "c10d"]
    words += ["--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-id", "plain", "-m", f"{SCRIPTS}.train_plain"]
    async with ended([launcher(folder, f"torchrun-{node}", words) for node in range(NODES)]):
        yield


@contextlib.asynccontextmanager
async def torchft(folder: Path) -> AsyncIterator[None]:
    """Have the script that was changed for it run under a launcher a replica, each of one rank."""
    words = ["--standalone", "--nproc-per-node", "1", "-m", f"{SCRIPTS}.train_torchft_plain"]
    more = {"NUM_REPLICA_GROUPS": str(WORLD)}
    with lighthouse(folder) as address:
        more["TORCHFT_LIGHTHOUSE"] = address
        launchers = [
            launcher(folder, f"replica-{rank}", words, REPLICA_GROUP_ID=str(rank), **more) for rank in range(WORLD)
        ]
        async with ended(launchers):
            yield


@contextlib.asynccontextmanager
async def ended(launchers: Sequence[subprocess.Popen[bytes]]) -> AsyncIterator[None]:
    """Have launchers, and none of them afterwards."""
    try:
        yield
    finally:
        for launcher in launchers:
            launcher.terminate()
        for launcher in launchers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(launcher.wait, 10.0)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)


WAYS: dict[str, Callable[[Path], contextlib.AbstractAsyncContextManager[None]]] = {
    "restart": partial(on_cluster, Healing.RESTART),
    "in_place": partial(on_cluster, Healing.IN_PLACE),
    "watched": partial(on_cluster, Healing.IN_PLACE, WATCHED="1"),
    "session": partial(on_cluster, Healing.SESSION),
    "torchrun": torchrun,
    "torchft": torchft,
}


async def strike(way: str, fault: str, folder: Path) -> tuple[float, float, int]:
    """Strike once.

    Returns:
        Seconds until all ranks have done an iteration again; of these, seconds of work that was left in any case; and
        how many iterations were done again.
    """
    folder.mkdir(parents=True)
    async with WAYS[way](folder):
        before = await until(folder, lambda notes: len([1 for note in notes if note["iteration"] >= SETTLED]) >= WORLD)
        at = time.time()
        if fault == "killed":
            os.kill(next(note["pid"] for note in reversed(before) if note["rank"] == STRUCK), signal.SIGKILL)
        else:
            (folder / f"raise-{STRUCK}").touch()
        notes = await until(folder, lambda notes: gone_on(way, notes, at))
        first = gone_on(way, notes, at)
        done = max(note["iteration"] for note in notes if note["at"] < at)
        redone = max(0, done + 1 - min(note["iteration"] for note in first.values()))
        return max(note["at"] for note in first.values()) - at, work_left(notes, at), redone


def work_left(notes: list[dict[str, Any]], at: float) -> float:
    """Return the seconds that the iteration at hand would have taken from then on, were nobody struck."""
    # of one that is not struck: with torchft, not all do all iterations
    ends = [float(note["at"]) for note in notes if note["rank"] == SURVIVOR and note["at"] < at]
    return max(0.0, ends[-1] + statistics.median(end - begin for begin, end in pairwise(ends)) - at)


def gone_on(way: str, notes: list[dict[str, Any]], at: float) -> dict[int, dict[str, Any]]:
    """Return each rank's note of the iteration with which it went on; empty before all have."""
    if way in GOES_ON and len(found := others_since(notes, at)) == WORLD - 1:
        return found
    return found if len(found := since(notes, at)) == WORLD else {}  # in some places all ranks begin again


def since(notes: list[dict[str, Any]], at: float) -> dict[int, dict[str, Any]]:
    """Return each rank's note of the first iteration that the struck rank's new process has done, as far as they are.

    Who lives on in its process has done none that it had done before.
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


def others_since(notes: list[dict[str, Any]], at: float) -> dict[int, dict[str, Any]]:
    """Return the notes of the first iteration that was done since by all others, by process."""
    before = {note["pid"]: note["iteration"] for note in notes if note["at"] < at and note["rank"] != STRUCK}
    return {
        note["pid"]: note
        for note in reversed(notes)
        if note["at"] >= at and note["pid"] in before and note["iteration"] > max(before.values())
    }


async def until(folder: Path, holds: Any) -> list[dict[str, Any]]:
    """Wait until what was noted is as wanted, and return it."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        notes = noted(folder)
        if holds(notes):
            return notes
        await asyncio.sleep(0.02)
    raise SystemExit(f"not within {PATIENCE_S:g} s; see {folder}")


def measure(way: str, repeat: int, root: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the figures of a way, and each run."""
    figures, details = dict[str, Any](), dict[str, Any]()
    for fault in FAULTS:
        runs = [asyncio.run(strike(way, fault, root / f"{way}-{fault}-{number}")) for number in range(repeat)]
        say(f"{way} {fault}: {runs}")
        for name, took in (("", [run[0] for run in runs]), ("beyond_", [run[0] - run[1] for run in runs])):
            figures[f"{way}_{fault}_{name}s"] = round(statistics.median(took), 3)
            figures[f"{way}_{fault}_{name}worst_s"] = round(max(took), 3)
        figures[f"{way}_{fault}_redone"] = statistics.median(redone for _, _, redone in runs)
        details[f"{way}_{fault}"] = runs
    return figures, details


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeat", type=int, default=5, help="strikes of each kind")
    parser.add_argument("--vs", default="", help=f"peers to measure too, with commas: {', '.join(PEERS)}")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    peers = [peer for peer in options.vs.split(",") if peer]
    if unknown := set(peers) - set(PEERS):
        parser.error(f"--vs {','.join(unknown)}: there are {', '.join(PEERS)}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as root:
        figures, details = dict[str, Any](), dict[str, Any]()
        baselines = {}
        for way in OWN:
            found, more = measure(way, options.repeat, Path(root))
            figures, details = figures | found, details | more
        for peer in peers:
            baselines[peer], more = measure(peer, options.repeat, Path(root))
            details |= more
    if options.json:
        print(as_json("scripts", figures, baselines, details))
        return
    for name, value in [*figures.items(), *(pair for found in baselines.values() for pair in found.items())]:
        print(f"{name:30} {value}")


if __name__ == "__main__":
    main()
