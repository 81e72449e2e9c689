"""Stragglers live: how true the estimated slowdown of a real job is, and what recording costs it.

    python -m benchmarks.straggler_live --json

A real cluster (NATS, services, two agents) and a task of four workers, as the study checked itself: rank 0 computes
1.2, 1.4 and 2 times as long in some blocks of iterations and as long as the others in the blocks between. Measured is
the mean iteration time of a slow block over that of the healthy blocks beside it; estimated, by the straggler service
from a tenth of the iterations, what the task would gain without its cause. The study's S is reported too: its ideal is
the mean over all workers, the slow one included, so among four it must be lower.

Workers wait instead of computing, so that four of them get by with two cores. Then recording is switched between all
and none of the iterations, block by block in the same run; a tenth of what each recorded iteration costs is the price
of the default. How long one record takes to make is measured beside it, without a cluster.
"""

import argparse
import asyncio
import itertools
import os
import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from unicron_deploy.embedded import Cluster
from unicron_deploy.nats_server import free_port

from benchmarks.output import as_json
from unicron.bootstrap import connected_client
from unicron.client import Client
from unicron.contracts.events import IterationFinished, StepTimed
from unicron.contracts.queries import StragglerWindow
from unicron.contracts.tasks import TaskSpec
from unicron.contracts.timings import DEFAULT_SHARE
from unicron.contracts.worker import frame
from unicron.train.timing import BACKWARD, FORWARD, OPTIMIZER, REDUCE, Recorder

WORKERS, MICROBATCHES = 4, 12
LEVELS = (1.2, 1.4, 2.0)
BLOCK = 100
"""Iterations of a block: ten recorded ones, a window of the service."""

FIRST = 10
"""Iteration at which the blocks begin: the first one, in which workers join, is not recorded."""

SWITCHES, SWITCHED = 24, 25
"""Blocks with and without recording, and the iterations of each."""

PATIENCE_S = 120.0

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
class Run:
    """What was heard of the task.

    Attributes:
        finished: each iteration's seconds, and Unix seconds at which it ended.
        messages: records that came.
        bytes: of all of them.
    """

    finished: dict[int, tuple[float, float]] = field(default_factory=dict)
    messages: int = 0
    bytes: int = 0

    async def listen(self, client: Client) -> None:
        """Note iterations and records as they come."""
        async for message in client.telemetry(IterationFinished, StepTimed):
            if isinstance(message, IterationFinished):
                self.finished[message.iteration] = (message.seconds, message.at)
            else:
                self.messages += 1
                self.bytes += len(msgspec.msgpack.encode(message))

    async def reach(self, iteration: int) -> None:
        """Wait until `iteration` is over."""
        deadline = time.monotonic() + PATIENCE_S + iteration
        while max(self.finished, default=-1) < iteration:
            if time.monotonic() > deadline:
                raise SystemExit(f"the task does not come to iteration {iteration}; its latest: {max(self.finished)}")
            await asyncio.sleep(0.05)

    def mean_s(self, first: int) -> float:
        """Return the mean iteration time of the block that begins at `first`; its first iteration may be half slow."""
        return statistics.fmean(self.finished[n][0] for n in range(first + 1, first + BLOCK) if n in self.finished)

    def period_s(self, first: int, last: int) -> float:
        """Return the median time from the end of one iteration to that of the next."""
        ends = [self.finished[n][1] for n in range(first, last) if n in self.finished]
        return statistics.median(after - before for before, after in itertools.pairwise(ends))


async def fidelity(client: Client, run: Run) -> list[dict[str, Any]]:
    """Let the blocks go by; return for each level what was measured and what was estimated."""
    await run.reach(FIRST + (2 * len(LEVELS) + 1) * BLOCK)
    windows = (await client.straggler("job")).history
    found = []
    for number, level in enumerate(LEVELS):
        first = FIRST + (2 * number + 1) * BLOCK
        healthy = (run.mean_s(first - BLOCK) + run.mean_s(first + BLOCK)) / 2
        measured = run.mean_s(first) / healthy
        window = _window(windows, first)
        row = {"level": level, "measured": measured, "estimated": window.gain, "study_s": window.slowdown}
        found.append(row | {"error_percent": 100 * abs(window.gain / measured - 1), "found": window.diagnosis})
    return found


def _window(windows: Sequence[StragglerWindow], first: int) -> StragglerWindow:
    inside = [window for window in windows if window.first >= first and window.last < first + BLOCK]
    if not inside:
        raise SystemExit(f"no window lies in the block from {first}: {[(each.first, each.last) for each in windows]}")
    return inside[0]


async def cost(client: Client, run: Run) -> tuple[list[float], float]:
    """Switch recording off and on; return what a record costs by each pair of blocks, and the usual time, in s."""
    periods: list[float] = []
    for number in range(SWITCHES):
        await client.record("job", float(number % 2))
        begins = max(run.finished) + 3  # the order is on its way
        await run.reach(begins + SWITCHED)
        periods.append(run.period_s(begins, begins + SWITCHED))
    pairs = zip(periods[::2], periods[1::2], strict=True)
    return [on - off for off, on in pairs], statistics.median(periods[::2])


def one_record_us(microbatches: int, rounds: int = 300) -> float:
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
        timed = recorder.end(0, 0, 0, 1)
        if timed is not None:
            frame(timed)

    return 1e6 * min(_seconds(once) for _ in range(rounds))


def _seconds(job: Callable[[], None]) -> float:
    began = time.perf_counter()
    job()
    return time.perf_counter() - began


async def measure(root: Path) -> tuple[dict[str, float], dict[str, object]]:
    """Run the cluster and the task; return figures and details."""
    script = root / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    cluster = Cluster(root / "cluster", nodes=2, slots=2, port=free_port())
    await asyncio.to_thread(cluster.start)
    try:
        await cluster.wait_until_ready(PATIENCE_S)
        async with connected_client(cluster.settings(), "benchmark") as client:
            run = Run()
            listening = asyncio.create_task(run.listen(client))
            spec = TaskSpec(
                name="job",
                command=["python", str(script)],
                workdir=str(root),
                min_workers=WORKERS,
                max_workers=WORKERS,
                microbatches=MICROBATCHES,
                iterations=10**6,
            )
            await client.submit(spec)
            levels = await fidelity(client, run)
            size = run.bytes / run.messages
            costs, usual = await cost(client, run)
            listening.cancel()
    finally:
        await asyncio.to_thread(cluster.stop)
    each = statistics.fmean(costs)
    error = statistics.stdev(costs) / len(costs) ** 0.5
    figures = {
        "worst_error_percent": max(row["error_percent"] for row in levels),
        "recording_cost_percent": 100 * DEFAULT_SHARE * each / usual,
        "recording_cost_error_percent": 100 * DEFAULT_SHARE * error / usual,
        "one_record_32_microbatches_us": one_record_us(32),
        "record_bytes": size,
    }
    details: dict[str, object] = {
        "levels": levels,
        "iteration_ms": 1e3 * usual,
        "record_costs_ms": [round(1e3 * each, 3) for each in costs],
        "microbatches_of_a_rank": MICROBATCHES // WORKERS,
    }
    return figures, details


def main() -> int:
    """Print the figures; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    arguments = parser.parse_args()
    os.environ["UNICRON_STRAGGLER_THRESHOLD"] = "1.05"  # also the least level is to be explained
    with tempfile.TemporaryDirectory() as folder:
        figures, details = asyncio.run(measure(Path(folder)))
    if arguments.json:
        print(as_json("straggler_live", figures, details=details))
    else:
        for name, value in {**figures, **details}.items():
            print(f"{name}: {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
