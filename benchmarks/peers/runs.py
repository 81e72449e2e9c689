"""Runs a peer on this machine: its launchers, one strike to a run, and what came of it.

- `torchrun`: one launcher for all ranks, which starts all of them anew when one ends, from the last checkpoint.
- `torchft`: one lighthouse, and a launcher of its own for each replica, which starts that replica anew; the others go
  on without it, and it gets their state.

Both with what their documentation has, but for two things without which they would not recover on gloo, or not in any
time worth waiting for: every restart gets a store of its own (TORCH_DISABLE_SHARE_RDZV_TCP_STORE; else it meets the
addresses of the dead), and a collective is given up after `benchmarks.peers.worker.TIMEOUT`. torchft 0.2.0 runs, but
its DDP has the survivors of a lost replica raise too, so that all begin anew; the nightly builds go on.
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
from typing import Any

import msgspec
from unicron_cli.demo import max_rel_diff
from unicron_deploy.nats_server import free_port

from benchmarks import healing
from benchmarks.peers.recovery import dropped, recovered
from benchmarks.strikes import (
    FIRST,
    LAYOUTS,
    MEGATRON,
    MICROBATCHES,
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
from unicron.contracts.tasks import ParallelLayout

SYSTEMS = ("torchft", "torchrun")
FAULTS = ("killed", "raised", "stopped")
KEPT = FIRST + 4
"""After so many iterations parameters are compared with those of an undisturbed run."""

START_S, RECOVERY_S, END_S = 120.0, 90.0, 15.0
"""How long a run may take to be struck, to recover, and to end."""


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
    """A training of a peer.

    Attributes:
        system: the peer.
        shape: of the model over the ranks.
        folder: that gets notes, logs and checkpoints.
        point: where it is struck; None for the undisturbed one, which does not wait either.
    """

    system: str
    shape: ParallelLayout
    folder: Path
    point: Point | None

    def environment(self) -> dict[str, str]:
        """Return what the workers find in the environment."""
        world, struck = self.shape.workers, [self.point] if self.point else []
        orders = Orders("parallel", str(self.folder), pace_s(self.shape) if self.point else 0.0, world, struck)
        told = {VARIABLE: msgspec.json.encode(orders).decode(), "KEPT": KEPT, "MICROBATCHES": MICROBATCHES}
        told |= {"OMP_NUM_THREADS": 1, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1}
        told |= {"REPLICATE": self.shape.replicas, "NUM_REPLICA_GROUPS": self.shape.replicas}
        told |= {"PIPELINE": self.shape.pipeline, "SHARD": self.shape.shard, "TENSOR": self.shape.tensor}
        return {**os.environ, **{name: str(value) for name, value in told.items()}}

    def start(self, name: str, ranks: int, **more: str) -> subprocess.Popen[bytes]:
        """Start a launcher of so many ranks."""
        words = ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "10"]
        words += ["-m", f"benchmarks.peers.train_{self.system}", *sizes("parallel")]
        words += ["--iterations", "100000" if self.point else str(KEPT)]
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *words],
                cwd=ROOT,
                env=self.environment() | more,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def notes(self) -> list[Note]:
        """Return what the ranks have noted so far, in the order of time."""
        lines = [
            line for path in self.folder.glob("[0-9]*.jsonl") for line in path.read_bytes().splitlines(keepends=True)
        ]
        return sorted(
            (msgspec.json.decode(line, type=Note) for line in lines if line.endswith(b"\n")), key=lambda note: note.at
        )

    def strike(self) -> Struck | None:
        """Return the strike, once it is made."""
        mark = self.folder / "strike-0.json"
        with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):  # not there, or not written yet
            return msgspec.json.decode(mark.read_bytes(), type=Struck)
        return None


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
    launchers: list[subprocess.Popen[bytes]] = []
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: end(job, launchers))
        if job.system == "torchrun":
            launchers.append(job.start("torchrun", job.shape.workers))
        else:
            address = stack.enter_context(lighthouse(job.folder))
            stack.callback(lambda: end(job, launchers))  # before the lighthouse
            for replica in range(job.shape.replicas):
                more = {"TORCHFT_LIGHTHOUSE": address, "REPLICA_GROUP_ID": str(replica)}
                launchers.append(job.start(f"replica-{replica}", job.shape.replica_workers, **more))
        yield launchers


def end(job: Job, launchers: Sequence[subprocess.Popen[bytes]]) -> None:
    """End all processes of a job."""
    workers = {int(path.stem) for path in job.folder.glob("[0-9]*.jsonl")}
    for launcher in launchers:
        with contextlib.suppress(ProcessLookupError):
            launcher.terminate()
    for pid in workers:  # a launcher waits half a minute for a stopped one to go
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    for launcher in launchers:
        try:
            launcher.wait(END_S)
        except subprocess.TimeoutExpired:
            os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()


def recovery(job: Job, strike: Struck, notes: Sequence[Note]) -> tuple[dict[str, Any], healing.Usual]:
    """Return the figures of a strike, and what is usual where nothing strikes."""
    before = [note for note in notes if note.at < strike.at]  # afterwards a peer may begin at its first iteration again
    usually = healing.usual(before, [strike], job.shape.workers)
    share = MICROBATCHES // job.shape.replicas
    return recovered(notes, strike, usually, share, job.shape.workers), usually


def over(job: Job, strike: Struck) -> bool:
    """Return whether a struck job has all its ranks again, and has gone on with them."""
    if len(list(job.folder.glob("stage-*.pt"))) < job.shape.pipeline:
        return False
    notes, world = job.notes(), job.shape.workers
    found, _ = recovery(job, strike, notes)
    if found["first_s"] is None or found["whole_s"] is None:
        return False
    whole: float = strike.at + max(found["first_s"], found["whole_s"])
    return len([1 for note in notes if note.what == "updated" and note.world == world and note.at > whole]) >= 2 * world


def follow(job: Job) -> str:
    """Run a job to its end; return what became of it."""
    with running(job) as launchers:
        deadline, strike = time.monotonic() + START_S, None
        while time.monotonic() < deadline:
            time.sleep(0.2)
            if all(launcher.poll() is not None for launcher in launchers):
                return "finished" if all(launcher.returncode == 0 for launcher in launchers) else "failed"
            if strike is None and (strike := job.strike()):
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
        notes, made = job.notes(), job.strike()
        if made is None:
            continue
        row, usually = recovery(job, made, notes)
        rows.append(row | {"microbatch_s": usually.microbatch_s, "tail_s": usually.tail_s})
        stages = sorted(path.name for path in twin.folder.glob("stage-*.pt"))
        there = all((here / name).exists() for name in stages)
        found.append(max(max_rel_diff(here / name, twin.folder / name) for name in stages) if there else None)
        sums["redone"] += healing.redone(notes)
        lost = dropped(notes, shape.workers, MICROBATCHES)
        sums["dropped"] += lost
        sums["wasted"] += healing.wasted(notes, shape.replica_workers, MICROBATCHES, lost)
    return {"states": states, "strikes": rows, "rel_diff": worst(found), **sums}


def figures_of(layout: str, fault: str, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of all runs of a layout and a fault, named as Unicron's."""
    rows = [row for run in runs for row in run["strikes"]]
    beyond = [row["beyond_s"] for row in rows]
    found = {
        "first_s": middle(row["first_s"] for row in rows),
        "beyond_s": middle(beyond),
        "beyond_worst_s": worst(beyond),
        "whole_s": middle(row["whole_s"] for row in rows),
        "rel_diff": worst(run["rel_diff"] for run in runs),
        **{name: sum(run[name] for run in runs) for name in ("redone", "wasted", "dropped")},
        "strikes": len(rows),
    }
    return named(layout, fault, found)


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
        figures |= figures_of(layout, fault, runs)
        details[f"{system}_{layout}_{fault}"] = runs
    return figures, details
