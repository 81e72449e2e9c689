"""Runs a peer on this machine: its launchers, one strike to a run, and what came of it.

- `torchrun`: one launcher for all ranks, which starts all of them anew when one ends, from the last checkpoint.
- `torchft`: one lighthouse, and a launcher for each replica, which starts that replica anew; the others go on without.

Both as documented, but for two things without which they would not recover on gloo, or not in any time worth waiting
for: every restart gets a store of its own (else it meets the addresses of the dead), and a collective is given up after
`benchmarks.peers.worker.TIMEOUT`. torchft 0.2.0 runs, but its DDP has the survivors of a lost replica raise too, so
that all begin anew; the nightly builds go on.
"""

import contextlib
import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
from unicron_cli.demo import max_rel_diff
from unicron_deploy.nats_server import free_port

from benchmarks.harness import healing, stats
from benchmarks.harness.command import say
from benchmarks.harness.processes import ONE_THREAD, TORCHRUN, ended, start
from benchmarks.harness.strikes import (
    FIRST,
    LAYOUTS,
    MEGATRON,
    MICROBATCHES,
    VARIABLE,
    Note,
    Orders,
    Point,
    Struck,
    made_in,
    notes_in,
    pace_s,
    points,
    sizes,
)  # fmt: skip
from unicron.contracts.tasks import ParallelLayout

SYSTEMS = ("torchft", "torchrun")
FAULTS = ("killed", "raised", "stopped")
MEDIANS = ("first_s", "beyond_s", "whole_s")
KEPT = FIRST + 4  # after so many iterations parameters are compared with those of an undisturbed run
START_S, RECOVERY_S = 120.0, 90.0  # how long a run may take to be struck, and to recover
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **ONE_THREAD}


def refusal(system: str, layout: str) -> str | None:
    """Return why a peer can't run a layout here; None if it can."""
    shape = LAYOUTS[layout]
    if layout.startswith(MEGATRON):
        return "is measured with torch's own layouts only"
    if system == "torchft" and (shape.tensor > 1 or shape.pipeline > 1):
        return "averages replicas of DDP and of FSDP2 only"
    if system == "torchft" and importlib.util.find_spec("torchft") is None:
        return "not installed; pip install torchft-nightly"
    return None


@dataclasses.dataclass(frozen=True)
class Job:
    """A training of a peer."""

    system: str
    shape: ParallelLayout
    folder: Path  # that gets notes, logs and checkpoints
    point: Point | None  # where it is struck; none of the undisturbed one, which does not wait either

    def environment(self) -> dict[str, str]:
        """Return what the workers find in the environment."""
        struck = [self.point] if self.point else []
        pace = pace_s(self.shape) if self.point else 0.0
        orders = Orders("parallel", str(self.folder), pace, self.shape.workers, struck)
        numbers = {"KEPT": KEPT, "MICROBATCHES": MICROBATCHES, "NUM_REPLICA_GROUPS": self.shape.replicas}
        numbers |= {"REPLICATE": self.shape.replicas, "PIPELINE": self.shape.pipeline}
        numbers |= {"SHARD": self.shape.shard, "TENSOR": self.shape.tensor}
        own = {VARIABLE: msgspec.json.encode(orders).decode(), **OWN_STORE}
        return own | {name: str(value) for name, value in numbers.items()}

    def start(self, name: str, ranks: int, **more: str) -> subprocess.Popen[bytes]:
        """Start a launcher of so many ranks."""
        words = ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "10"]
        words += ["-m", f"benchmarks.peers.train_{self.system}", *sizes("parallel")]
        words += ["--iterations", "100000" if self.point else str(KEPT)]
        return start([*TORCHRUN, *words], self.folder / f"{name}.log", **self.environment(), **more)


@contextlib.contextmanager
def lighthouse(folder: Path) -> Iterator[str]:
    """Have torchft's lighthouse; its address."""
    port = free_port()
    words = [str(Path(sys.executable).with_name("torchft_lighthouse"))]
    words += ["--bind", f"[::]:{port}", "--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]
    with (folder / "lighthouse.log").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield f"http://localhost:{port}"
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def running(job: Job) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Have a job's launchers, and nothing of it afterwards."""
    job.folder.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        if job.system == "torchrun":
            launchers = [job.start("torchrun", job.shape.workers)]
        else:
            address = stack.enter_context(lighthouse(job.folder))
            launchers = [
                job.start(
                    f"replica-{replica}",
                    job.shape.replica_workers,
                    TORCHFT_LIGHTHOUSE=address,
                    REPLICA_GROUP_ID=str(replica),
                )
                for replica in range(job.shape.replicas)
            ]
        stack.enter_context(ended(launchers))
        stack.callback(resume, job.folder)  # a launcher waits half a minute for a stopped one to go
        yield launchers


def resume(folder: Path) -> None:
    """Let stopped ranks go on."""
    for path in folder.glob("[0-9]*.jsonl"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(path.stem), signal.SIGCONT)


def recovery(job: Job, strike: Struck, notes: Sequence[Note]) -> tuple[dict[str, Any], healing.Usual]:
    """Return the figures of a strike, and what is usual where nothing strikes."""
    before = [note for note in notes if note.at < strike.at]  # afterwards a peer may begin at its first iteration again
    usually = healing.usual(before, [strike], job.shape.workers)
    share = MICROBATCHES // job.shape.replicas
    return healing.recovered(notes, strike, usually, share, job.shape.workers), usually


def over(job: Job, strike: Struck) -> bool:
    """Return whether a struck job has all its ranks again, and has gone on with them."""
    if len(list(job.folder.glob("stage-*.pt"))) < job.shape.pipeline:
        return False
    notes, world = notes_in(job.folder), job.shape.workers
    found, _ = recovery(job, strike, notes)
    if found["first_s"] is None or found["whole_s"] is None:
        return False
    whole: float = strike.at + max(found["first_s"], found["whole_s"])
    return len([1 for note in notes if note.what == "updated" and note.world == world and note.at > whole]) >= 2 * world


def follow(job: Job) -> str:
    """Run a job to its end; return what became of it."""
    with running(job) as launchers:
        deadline, strike = time.monotonic() + START_S, cast(Struck | None, None)
        while time.monotonic() < deadline:
            time.sleep(0.2)
            if all(launcher.poll() is not None for launcher in launchers):
                return "finished" if all(launcher.returncode == 0 for launcher in launchers) else "failed"
            if strike is None and (made := made_in(job.folder)):
                strike = made[0]
                deadline = time.monotonic() + RECOVERY_S
            if strike and over(job, strike):
                return "recovered"
        return "stays smaller" if strike else "hangs"


def strike(system: str, layout: str, fault: str, phases: Sequence[str], folder: Path) -> dict[str, Any]:
    """Strike a peer once in each phase, in a run of its own; return what came of it."""
    shape = LAYOUTS[layout]
    twin = Job(system, shape, folder / "twin", None)
    if not twin.folder.exists() and (state := follow(twin)) != "finished":
        raise SystemExit(f"{system} {layout}: without a fault it is {state}; see {twin.folder}")
    rows, states, found = list[dict[str, Any]](), list[str](), list[float | None]()
    sums = {"redone": 0, "wasted": 0, "dropped": 0}
    for point in points(shape, fault, phases):
        here = folder / f"{fault}-{point.phase}-{time.time_ns()}"
        job = Job(system, shape, here, msgspec.structs.replace(point, iteration=FIRST))
        states.append(follow(job))
        notes, made = notes_in(here), made_in(here)
        if not made:
            continue
        row, usually = recovery(job, made[0], notes)
        rows.append(row | {"microbatch_s": usually.microbatch_s, "tail_s": usually.tail_s})
        stages = sorted(path.name for path in twin.folder.glob("stage-*.pt"))
        there = all((here / name).exists() for name in stages)
        found.append(max(max_rel_diff(here / name, twin.folder / name) for name in stages) if there else None)
        sums["redone"] += healing.redone(notes)
        lost = healing.dropped(notes, shape.workers, MICROBATCHES)
        sums["dropped"] += lost
        sums["wasted"] += healing.wasted(notes, shape.replica_workers, MICROBATCHES, lost)
    return {"states": states, "strikes": rows, "rel_diff": stats.worst(found, 12), **sums}


def measure(system: str, layout: str, faults: Sequence[str], phases: Sequence[str], repeat: int, folder: Path) -> Any:
    """Return figures and details of a peer in one layout; a node is not taken away from it."""
    figures: dict[str, Any] = {}
    details: dict[str, Any] = {}
    if reason := refusal(system, layout):
        say(f"{system} {layout}: {reason}")
        return figures, {f"{system}_{layout}": reason}
    for fault in [fault for fault in faults if fault in FAULTS]:
        try:
            runs = [strike(system, layout, fault, phases, folder) for _ in range(repeat)]
        except SystemExit as reason:  # what one peer can't do costs nobody else's figures
            say(f"{system} {layout} {fault}: {reason}")
            details[f"{system}_{layout}_{fault}"] = str(reason)
            continue
        say(f"{system} {layout} {fault}: {json.dumps(runs)}")
        figures |= healing.summary(layout, fault, runs, MEDIANS)
        details[f"{system}_{layout}_{fault}"] = runs
    return figures, details
