"""Healthy training on a machine that is too small for it, and what is wrongly said of it.

    python -m benchmarks.calm --minutes 30 --json

A real cluster of this machine, four nodes of two slots, trains a task of eight workers, while another program keeps all
cores busy with twice as many processes as there are cores. Nothing is broken, so each `FailureDetected`,
`NodeSuspected`, `WorkerStalled` and `TaskBroken` is a false alarm. `slowdowns` are told apart: the load comes and goes,
15 s each, and iterations do take longer meanwhile. The baseline is the same task for a tenth of the time without load.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from unicron_deploy.embedded import Cluster
from unicron_deploy.nats_server import free_port

from benchmarks.output import as_json
from unicron import codec, subjects
from unicron.bootstrap import connected
from unicron.bus.nats import NatsBus
from unicron.client import Client
from unicron.contracts.base import Message
from unicron.contracts.events import FailureDetected, IterationFinished, NodeSuspected, TaskBroken, WorkerStalled
from unicron.contracts.slowdowns import SlowdownDetected
from unicron.contracts.tasks import TaskSpec
from unicron.errors import UnicronError

NODES, SLOTS = 4, 2
ALARMS = (FailureDetected, NodeSuspected, TaskBroken, WorkerStalled)
PHASE_S = 15.0

SCRIPT = """
import torch
from unicron.train import Session

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
session = Session(seed=1, iterations=10**7, microbatches=16)
session.protect(model=model, optimizer=optimizer)
for iteration in session.iterations():
    for microbatch in session.microbatches():
        x = torch.randn(256, 256)
        session.backward((model(x) - x.sum(1, keepdim=True)).square().mean())
    session.step()
"""


def burn(until: float) -> None:
    """Keep a core busy, and let go of it, in turns."""
    while time.time() < until:
        end = time.time() + PHASE_S
        while time.time() < end:
            sum(range(10_000))
        time.sleep(PHASE_S)


async def listen(bus: NatsBus, said: list[Message]) -> None:
    """Follow what would be alarms, and slowdowns."""
    async for entry in bus.follow(subjects.events(*ALARMS, SlowdownDetected), 0):
        with contextlib.suppress(UnicronError):
            said.append(codec.decode_message(entry.data))
            print(f"{type(said[-1]).__name__}: {said[-1]}", file=sys.stderr, flush=True)


async def time_iterations(bus: NatsBus, seconds: list[float]) -> None:
    """Keep how long iterations take."""
    async for heard in bus.hear(subjects.events(IterationFinished)):
        with contextlib.suppress(UnicronError):
            seconds.append(codec.decode_message(heard.data).seconds)  # type: ignore[attr-defined]


async def train(bus: NatsBus, minutes: float, load: int) -> dict[str, Any]:
    """Let the task train for so long under so many busy processes; return what was said and how long things took."""
    said: list[Message] = []
    seconds: list[float] = []
    jobs = [asyncio.create_task(listen(bus, said)), asyncio.create_task(time_iterations(bus, seconds))]
    context = multiprocessing.get_context("spawn")
    busy = [context.Process(target=burn, args=(time.time() + 60 * minutes,), daemon=True) for _ in range(load)]
    for each in busy:
        each.start()
    await asyncio.sleep(60 * minutes)
    for job in jobs:
        job.cancel()
    for each in busy:
        each.terminate()
        await asyncio.to_thread(each.join)
    counts = Counter(type(each).__name__ for each in said)
    return {
        "false_alarms": sum(counts[kind.__name__] for kind in ALARMS),
        "alarms": {kind.__name__: counts[kind.__name__] for kind in ALARMS},
        "slowdowns": counts[SlowdownDetected.__name__],
        "iterations": len(seconds),
        "iteration_p50_s": round(statistics.median(seconds), 4) if seconds else None,
        "iteration_max_s": round(max(seconds), 3) if seconds else None,
    }


async def run(folder: Path, minutes: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train without load and with it."""
    (folder / "script.py").write_text(SCRIPT)
    cluster = Cluster(folder / "cluster", nodes=NODES, slots=SLOTS, port=free_port())
    await asyncio.to_thread(cluster.start)
    try:
        await cluster.wait_until_ready(120.0)
        async with connected(cluster.settings(), "calm") as bus:
            workers = NODES * SLOTS
            spec = TaskSpec(
                name="calm",
                command=["python", str(folder / "script.py")],
                workdir=str(folder),
                min_workers=workers,
                max_workers=workers,
                microbatches=16,
                iterations=10**7,
                env={"OMP_NUM_THREADS": "1"},
            )
            await Client(bus).submit(spec)
            alone = await train(bus, minutes / 10, 0)
            return alone, await train(bus, minutes, 2 * (os.cpu_count() or 1))
    finally:
        await asyncio.to_thread(cluster.stop)


def main() -> None:
    """Train under load, and print what was wrongly said."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="of training under load")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="unicron-calm-") as folder:
        alone, loaded = asyncio.run(run(Path(folder), options.minutes))
    if options.json:
        print(as_json("calm", loaded, {"without_load": alone}))
    else:
        for name, value in loaded.items():
            print(f"{name:20} {value}   without load: {alone[name]}")


if __name__ == "__main__":
    main()
