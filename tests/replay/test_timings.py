"""Iteration times of real jobs through the real cores: of what is healthy nobody may say that it failed."""

import csv
import json
import os
from collections import defaultdict
from pathlib import Path

import pytest
from unicron_agent.workers.workers import StallLimits, Worker
from unicron_detector.window import Windows

from unicron import codec
from unicron.contracts.events import IterationFinished
from unicron.contracts.slowdowns import Computed, ComputeTimed, SlowdownDetected, SlowdownEnded
from unicron.contracts.tasks import WorkerPhase
from unicron.contracts.worker import Iterated, Progress
from unicron.errors import InvalidInputError

DATA = Path(os.environ.get("UNICRON_DATA", "../shared/data")) / "timings"

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason=f"no folder {DATA}; set UNICRON_DATA")

MICROBATCHES = 4
TICK_S = 0.5


class Job:
    """A job of as many workers, whose agents look at them twice a second and whose detector hears of each iteration."""

    def __init__(self, workers):
        self.windows, self.said, self.now, self.iteration = Windows(), [], 0.0, 0
        self.workers = [Worker(worker=f"t-{rank}", task="t", slot=0, ready=True) for rank in range(workers)]

    def wait(self, until, *workers):
        while self.now + TICK_S < until:
            self.now += TICK_S
            for worker in workers:
                worker.heard_at = self.now
                told = worker.long_away("n", StallLimits(), self.now)
                self.said += [*told, *worker.stalled("n", StallLimits(), self.now, stopped=False)]
        self.now = until

    def iterate(self, seconds):
        """Let each worker compute its microbatches in so many seconds, and all wait for the slowest."""
        began = self.now
        for worker, took in zip(self.workers, seconds, strict=True):
            self.now = began
            for done in range(MICROBATCHES + 1):
                self.wait(began + took * done / MICROBATCHES, worker)
                worker.note(Progress(iteration=self.iteration, phase=WorkerPhase.COMPUTE, done=done), self.now)
        self.now = began + max(seconds)
        world = len(self.workers)
        told = {"iteration": self.iteration, "world_size": world, "loss": 1.0, "seconds": max(seconds)}
        for rank, worker in enumerate(self.workers):
            worker.note(Iterated(**told, epoch=0, rank=rank), self.now)
        timed = [
            Computed(worker=f"t-{rank}", rank=rank, place=0, seconds=took / MICROBATCHES)
            for rank, took in enumerate(seconds)
        ]
        self.windows.timed(ComputeTimed(node="n", task="t", epoch=0, iteration=self.iteration, workers=timed))
        place = {"node": "n", "slot": 0, "task": "t", "worker": "t-0"}
        self.said += self.windows.finished(IterationFinished(**place, **told, epoch=0))
        self.iteration += 1


def run_mlperf(job, slower):
    """Let a job go through the run, its evaluations included; `slower` says how much longer a step takes."""
    evaluating = 0.0
    for line in (DATA / "mlperf-v5.1-llama31-405b-2560gpu.log").read_text().splitlines():
        event = json.loads(line[line.index("{") :]) if "MLLOG {" in line else {"key": ""}
        if event["key"] == "tracked_stats" and "train_step_time" in event["value"]:
            job.iterate([slower(job.iteration) * event["value"]["train_step_time"]])
        elif event["key"] == "eval_start":
            evaluating = event["time_ms"] / 1000
        elif event["key"] == "eval_stop":
            job.wait(job.now + event["time_ms"] / 1000 - evaluating, *job.workers)
    assert job.iteration == 343
    return job.said


def test_a_healthy_run_on_2560_gpus_is_passed_over_in_silence():
    assert run_mlperf(Job(1), lambda _: 1.0) == []


def test_the_same_run_with_a_fifth_more_in_its_middle_is_not():
    detected, ended = run_mlperf(Job(1), lambda step: 1.2 if 200 <= step < 240 else 1.0)
    assert 200 <= detected.iteration < 210
    assert 240 <= ended.iteration < 250


def times_of(number):
    """Return what each worker of a job took for each iteration, in hundredths of the trace's unit."""
    series = defaultdict(list)
    with (DATA / f"job_{number}_norm.csv").open() as file:
        for row in csv.DictReader(file):
            series[int(row["worker"])].append(float(row["batch_time_norm"]) / 100)
    return list(zip(*(series[worker] for worker in sorted(series)), strict=False))


@pytest.mark.parametrize(
    ("number", "slow"), [(2, []), (3, [["t-7", "t-6"]]), (4, [[], ["t-5", "t-6"], ["t-5", "t-6", "t-0"]])]
)
def test_of_jobs_of_a_shared_cluster_nothing_is_said_beyond_slowdowns(number, slow):
    job, steps = Job(10), times_of(number)
    for seconds in steps:
        job.iterate(seconds)
    assert job.iteration > 200
    assert {type(each) for each in job.said} <= {SlowdownDetected, SlowdownEnded}
    found = [[each.worker for each in said.workers] for said in job.said if isinstance(said, SlowdownDetected)]
    assert found == slow


@pytest.mark.parametrize("seconds", [float("nan"), -1.0, float("inf")])
def test_what_is_no_duration_is_refused_where_it_is_read(seconds):
    worker = Computed(worker="t-1", rank=0, place=0, seconds=seconds)
    timed = ComputeTimed(id="a", source="n", node="n", task="t", epoch=0, iteration=1, workers=[worker])
    with pytest.raises(InvalidInputError, match=r"`\$\.workers\[0\]\[3\]`"):
        codec.decode_message(codec.encode(timed))
