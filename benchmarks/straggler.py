"""How fast the analysis of stragglers is.

`python -m benchmarks.straggler [--json]`:

- ar_process_s, se_process_s: `unicron straggler analyze --json` on the two traces of the study, from the start of the
  process to its end, with the diagnosis. The authors' analyzer, which has none, takes 2.43 s and 2.18 s (the README
  beside the traces); five times as fast is 0.486 s and 0.436 s.
- ar_analysis_ms: the analysis alone, of a trace in memory.
- large_s, large_memory_mb: a synthetic trace of 1,024 dp x 8 pp x 32 microbatches x 50 steps, from its rows in memory
  to all measures, and the most memory that process had, with what made the trace up.

Medians; runs of the processes alternate. The baseline is the same dependency model of AR, one operation of one worker
after the other in plain Python, against one scenario of the simulator; both give the same step times.
"""

import argparse
import functools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from unicron_straggler.analysis import measures, reader, tensors
from unicron_straggler.analysis.simulate import Scenario, step_times

from benchmarks import synthetic
from benchmarks.output import as_json
from benchmarks.planting import Shape, SlowWorker

DATA = Path(os.environ.get("UNICRON_DATA") or Path(__file__).parents[2] / "shared/data") / "straggler"
REFERENCE_S = {"AR": 2.43, "SE": 2.18}
LARGE = Shape(dp=1024, pp=8, microbatches=32, steps=50)
RUNS = 7


def process_s(name: str, compiled: Path) -> tuple[float, float]:
    """Return the seconds that the command takes for a trace of the study, and those of processors it uses.

    Args:
        name: of the trace.
        compiled: where bytecode is kept, as it is of whatever was installed.
    """
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(compiled)
    command = [sys.executable, "-m", "unicron_cli", "straggler", "analyze", "--json"]
    began, before = time.perf_counter(), processors_s()
    command.append(str(DATA / f"trace-{name}.parquet"))
    subprocess.run(command, stdout=subprocess.DEVNULL, env=environment, check=True)
    return time.perf_counter() - began, processors_s() - before


def processes_s() -> dict[str, list[tuple[float, float]]]:
    """Return what each run of the command takes, by trace."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in REFERENCE_S}
    with tempfile.TemporaryDirectory() as folder:
        process_s("AR", Path(folder))
        for _ in range(RUNS):
            for name, seconds in found.items():
                seconds.append(process_s(name, Path(folder)))
    return found


def processors_s() -> float:
    """Return the seconds of processors that ended children have used."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def timed(function: Callable[[], Any], runs: int) -> list[float]:
    """Return the seconds of each run, after one that does not count."""
    function()
    found = []
    for _ in range(runs):
        began = time.perf_counter()
        function()
        found.append(time.perf_counter() - began)
    return found


def plain_loop(job: tensors.Job) -> list[float]:
    """Return the seconds of each step, simulated one operation of one worker after the other."""
    durations = {code: each.tolist() for code, each in job.durations.items()}
    dp_size = len(job.dp_ranks)
    found = []
    for step in range(len(job.steps)):
        ends: dict[tuple[int, int], float] = {}
        for wave in job.graph.waves:
            starts = [max((ends[wait, dp] for wait in wave.waits), default=0.0) for dp in range(dp_size)]
            for dp in range(dp_size):
                start = max(starts) if wave.synchronous else starts[dp]
                for place in wave.members:
                    code, seq, stage = job.graph.keys[place]
                    ends[place, dp] = start + durations[code][step][seq][stage][dp]
        found.append(max(ends.values()))
    return found


def large() -> dict[str, float]:
    """Analyze the large trace in this process."""
    began = time.perf_counter()
    trace = synthetic.make(LARGE, seed=1, plants=[SlowWorker(dp_rank=17, stage=3, factor=1.5)])
    made = time.perf_counter()
    analysis = measures.analyze(trace)
    ended = time.perf_counter()
    return {
        "operations": len(trace),
        "making_s": made - began,
        "seconds": ended - made,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "slowdown": analysis.slowdown,
    }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--large-here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.large_here:
        print(json.dumps(large()))
        return
    processes = processes_s()
    trace = reader.read(DATA / "trace-AR.parquet", reader.read_meta(DATA / "meta-AR.yaml"))
    analysis_s = timed(lambda: measures.analyze(trace), RUNS)
    job = tensors.job(trace)
    simulated = functools.partial(step_times, job.graph, job.durations, measures.ideals(job).chosen, [Scenario()])
    ours_s, loop_s = timed(simulated, 3), timed(lambda: plain_loop(job), 3)
    np.testing.assert_allclose(simulated()[0], plain_loop(job), rtol=1e-9)
    command = [sys.executable, "-m", "benchmarks.straggler", "--large-here"]
    most = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    figures = {
        "ar_process_s": round(statistics.median(wall for wall, _ in processes["AR"]), 3),
        "se_process_s": round(statistics.median(wall for wall, _ in processes["SE"]), 3),
        "ar_analysis_ms": round(1000 * statistics.median(analysis_s), 1),
        "large_s": round(most["seconds"], 1),
        "large_memory_mb": round(most["peak_mb"]),
        "one_scenario_ms": round(1000 * statistics.median(ours_s), 2),
    }
    baselines = {
        "reference": {f"{name.lower()}_process_s": seconds for name, seconds in REFERENCE_S.items()},
        "plain_loop": {"one_scenario_ms": round(1000 * statistics.median(loop_s), 2)},
    }
    if given.json:
        print(
            as_json(
                "straggler",
                figures,
                baselines,
                {"processes_wall_and_cpu_s": processes, "analysis_s": analysis_s, "large": most},
            )
        )
        return
    for figure, value in figures.items():
        print(f"{figure:20}{value:>10}")


if __name__ == "__main__":
    main()
