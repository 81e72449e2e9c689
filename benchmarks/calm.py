"""Healthy training on a machine that is too small for it, and what is wrongly said of it.

A real cluster, four nodes of two slots, trains a task of eight workers, while other processes, twice as many as there
are cores, keep these busy, 15 s each. Nothing is broken, so each `FailureDetected`, `NodeSuspected`, `WorkerStalled`
and `TaskBroken` is one of the `false_alarms`; `slowdowns` are counted apart, for iterations do take longer meanwhile.
The baseline is the same task for a tenth of the time without load.
"""

import asyncio
import multiprocessing
import os
import time
from collections import Counter
from pathlib import Path

from benchmarks.harness import stats
from benchmarks.harness.cluster import TRAINED, Scene, running, task
from benchmarks.harness.command import Figures, Options, Result, main, option
from unicron.contracts.events import FailureDetected, NodeSuspected, TaskBroken, WorkerStalled
from unicron.contracts.slowdowns import SlowdownDetected

NODES, SLOTS = 4, 2
ALARMS = (FailureDetected, NodeSuspected, TaskBroken, WorkerStalled)
PHASE_S = 15.0


def burn(until: float) -> None:
    """Keep a core busy, and let go of it, in turns."""
    while time.time() < until:
        end = time.time() + PHASE_S
        while time.time() < end:
            sum(range(10_000))
        time.sleep(PHASE_S)


async def train(scene: Scene, minutes: float, load: int) -> Figures:
    """Let the task train for so long under so many busy processes; return what was said, and how long things took."""
    began, until = time.time(), time.time() + 60 * minutes
    context = multiprocessing.get_context("spawn")
    busy = [context.Process(target=burn, args=(until,), daemon=True) for _ in range(load)]
    for each in busy:
        each.start()
    await asyncio.sleep(until - time.time())
    for each in busy:
        each.kill()
    alarms = Counter({kind.__name__: len(scene.said(kind, since=began)) for kind in ALARMS})
    seconds = [each.seconds for each in scene.iterations if each.at > began]
    return {
        "false_alarms": alarms.total(),
        "alarms": dict(alarms),
        "slowdowns": len(scene.said(SlowdownDetected, since=began)),
        "iterations": len(seconds),
        "iteration_p50_s": stats.median(seconds, 4),
        "iteration_max_s": stats.worst(seconds),
    }


async def measure(options: Options, folder: Path) -> Result:
    """Train without load and with it."""
    async with running(folder, NODES, SLOTS) as scene:
        env = {"WIDTH": "256", "BATCH": "256", "PACE": "0"}
        await scene.client.submit(task("calm", TRAINED, NODES * SLOTS, microbatches=16, env=env))
        alone = await train(scene, options.minutes / 10, 0)
        return Result(await train(scene, options.minutes, 2 * (os.cpu_count() or 1)), {"without_load": alone})


if __name__ == "__main__":
    main(measure, option("--minutes", default=30.0, help="of training under load"))
