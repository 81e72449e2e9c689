"""Stragglers live: how true the estimated slowdown of a real job is, and what recording costs it.

A real cluster of two nodes and a task of four workers, as the study checked itself: rank 0 computes 1.2, 1.4 and 2
times as long in some blocks of iterations and as long as the others in the blocks between. Measured is the mean
iteration time of a slow block over that of the healthy blocks beside it; estimated, by the straggler service from a
tenth of the iterations, what the task would gain without its cause: `worst_error_percent` is how far the two are apart.
The study's S is in the details: its ideal is the mean over all workers, the slow one included, so among four it must be
lower.

Workers wait instead of computing, so that four of them get by with two cores. Then recording is switched between all
and none of the iterations, block by block in the same run; a tenth of what each recorded iteration costs is the price
of the default, `recording_cost_percent`. How long one record takes to make is measured beside it, without a cluster.
"""

import itertools
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.harness.cluster import Scene, background, running, task, until
from benchmarks.harness.command import Options, Result, main
from benchmarks.harness.processes import timed
from unicron.contracts.answers import StragglerWindow
from unicron.contracts.events import IterationFinished, StepTimed
from unicron.contracts.frames import frame
from unicron.contracts.timings import DEFAULT_SHARE
from unicron.train.worker.timing import BACKWARD, FORWARD, OPTIMIZER, REDUCE, Recorder

WORKERS, MICROBATCHES = 4, 12
LEVELS = (1.2, 1.4, 2.0)
BLOCK = 100  # iterations of a block: ten recorded ones, a window of the service
FIRST = 10  # iteration at which the blocks begin: the first one, in which workers join, is not recorded
SWITCHES, SWITCHED = 24, 25  # blocks with and without recording, and the iterations of each
SCRIPT = f"""
import time
import torch
from unicron.train import Session

LEVELS, BLOCK, FIRST = {LEVELS}, {BLOCK}, {FIRST}

class Wait(torch.autograd.Function):
    @staticmethod
    def forward(context, x, seconds):
        context.seconds = 2 * seconds
        time.sleep(seconds)
        return x

    @staticmethod
    def backward(context, gradient):
        time.sleep(context.seconds)
        return gradient, None

model = torch.nn.Linear(4, 1)
session = Session()
session.protect(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
for iteration in session.iterations():
    block = (iteration - FIRST) // BLOCK
    slow = LEVELS[block // 2] if block >= 0 and block % 2 and block // 2 < len(LEVELS) else 1.0
    for microbatch in session.microbatches():
        seconds = 0.01 * (slow if session.rank == 0 else 1.0)
        session.backward(Wait.apply(model(torch.randn(2, 4)), seconds).square().mean())
    session.step()
"""


@dataclass
class Heard:
    """Facts about the task that were received, and the number and the bytes of iterations' records."""

    scene: Scene
    records: int = 0
    bytes: int = 0

    async def listen(self) -> None:
        """Count records as they come."""
        async for message in self.scene.client.telemetry(StepTimed):
            self.records += 1
            self.bytes += len(msgspec.msgpack.encode(message))

    @property
    def finished(self) -> dict[int, IterationFinished]:
        """All iterations that have ended."""
        return {done.iteration: done for done in self.scene.iterations}

    async def reach(self, iteration: int) -> None:
        """Wait until an iteration is over."""
        done = self.scene.iterations
        await until(lambda: done and done[-1].iteration >= iteration, f"iteration {iteration}", 120.0 + iteration)

    def mean_s(self, first: int) -> float:
        """Return the mean iteration time of the block that begins at `first`; its first iteration may be half slow."""
        finished = self.finished
        return statistics.fmean(finished[n].seconds for n in range(first + 1, first + BLOCK) if n in finished)

    def period_s(self, first: int, last: int) -> float:
        """Return the median time from the end of one iteration to that of the next."""
        finished = self.finished
        ends = [finished[n].at for n in range(first, last) if n in finished]
        return statistics.median(after - before for before, after in itertools.pairwise(ends))


async def fidelity(heard: Heard) -> list[dict[str, Any]]:
    """Let the blocks go by; return for each level what was measured and what was estimated."""
    found = []
    for number, level in enumerate(LEVELS):
        first = FIRST + (2 * number + 1) * BLOCK
        await heard.reach(first + BLOCK)
        window = _window((await heard.scene.client.straggler("job")).history, first)  # which forgets older ones soon
        await heard.reach(first + 2 * BLOCK)
        measured = 2 * heard.mean_s(first) / (heard.mean_s(first - BLOCK) + heard.mean_s(first + BLOCK))
        row = {"level": level, "measured": measured, "estimated": window.gain, "study_s": window.slowdown}
        found.append(row | {"error_percent": 100 * abs(window.gain / measured - 1), "found": window.diagnosis})
    return found


def _window(windows: Sequence[StragglerWindow], first: int) -> StragglerWindow:
    inside = [window for window in windows if window.first >= first and window.last < first + BLOCK]
    if not inside:
        raise SystemExit(f"no window lies in the block from {first}: {[(each.first, each.last) for each in windows]}")
    return inside[0]


async def cost(heard: Heard) -> tuple[list[float], float]:
    """Switch recording off and on; return what a record costs by each pair of blocks, and the usual time, in s."""
    periods: list[float] = []
    for number in range(SWITCHES):
        await heard.scene.client.record("job", float(number % 2))
        begins = max(heard.finished) + 3  # the order is on its way
        await heard.reach(begins + SWITCHED)
        periods.append(heard.period_s(begins, begins + SWITCHED))
    pairs = zip(periods[::2], periods[1::2], strict=True)
    return [on - off for off, on in pairs], statistics.median(periods[::2])


def one_record_us(microbatches: int) -> float:
    """Return the microseconds that recording one iteration takes a worker: all marks, and the message made."""
    recorder = Recorder(torch.device("cpu"))

    def once() -> None:
        recorder.begin(0, 1)
        for microbatch in range(microbatches):
            recorder.start(FORWARD, microbatch)
            recorder.start(BACKWARD, microbatch)
            recorder.stop()
        recorder.start(REDUCE)
        recorder.start(OPTIMIZER)
        recorder.stop()
        if (record := recorder.end(0, 0, 0, 1)) is not None:
            frame(record)

    return 1e6 * min(timed(once, 300))


async def measure(_: Options, root: Path) -> Result:
    """Run the cluster and the task."""
    os.environ["UNICRON_STRAGGLER_THRESHOLD"] = "1.05"  # also the least level is to be explained
    (root / "script.py").write_text(SCRIPT)
    async with running(root / "cluster", 2, 2) as scene:
        heard = Heard(scene)
        async with background(heard.listen()):
            await scene.client.submit(task("job", [str(root / "script.py")], WORKERS, microbatches=MICROBATCHES))
            levels = await fidelity(heard)
            size = heard.bytes / heard.records
            costs, usual = await cost(heard)
    share = 100 * DEFAULT_SHARE / usual
    figures = {
        "worst_error_percent": max(row["error_percent"] for row in levels),
        "recording_cost_percent": share * statistics.fmean(costs),
        "recording_cost_error_percent": share * statistics.stdev(costs) / len(costs) ** 0.5,
        "one_record_32_microbatches_us": one_record_us(32),
        "record_bytes": size,
    }
    details = {"levels": {str(row.pop("level")): row for row in levels}, "iteration_ms": 1e3 * usual}
    details["record_costs_ms"] = [round(1e3 * each, 3) for each in costs]
    return Result(figures, details=details)


if __name__ == "__main__":
    main(measure)
