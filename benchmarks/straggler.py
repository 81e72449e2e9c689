"""How fast the analysis of stragglers is.

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
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from unicron_simulator import synthetic
from unicron_simulator.planting import Shape, SlowedWorker
from unicron_straggler.analysis import measures, reader, tensors
from unicron_straggler.analysis.simulate import Scenario, step_times

from benchmarks.harness import stats
from benchmarks.harness.command import Figures, Options, Result, main, option
from benchmarks.harness.processes import result_of, timed

DATA = Path(os.environ.get("UNICRON_DATA") or Path(__file__).parents[2] / "shared/data") / "straggler"
REFERENCE_S = {"AR": 2.43, "SE": 2.18}
LARGE = Shape(dp=1024, pp=8, microbatches=32, steps=50)
RUNS = 7


def process_s(name: str, compiled: Path) -> tuple[float, float]:
    """Return the seconds that the command takes for a trace of the study, and those of processors it uses.

    Bytecode is kept in a folder, as it is of what was installed.
    """
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(compiled)
    command = [sys.executable, "-m", "unicron_cli", "straggler", "analyze", "--json"]
    began, before = time.perf_counter(), processors_s()
    command.append(str(DATA / f"trace-{name}.parquet"))
    subprocess.run(command, stdout=subprocess.DEVNULL, env=environment, check=True)
    return time.perf_counter() - began, processors_s() - before


def processors_s() -> float:
    """Return the seconds of processors that ended children have used."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


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


def large() -> Figures:
    """Analyze the large trace in this process."""
    began = time.perf_counter()
    trace = synthetic.make(LARGE, seed=1, plants=[SlowedWorker(dp_rank=17, stage=3, factor=1.5)])
    made = time.perf_counter()
    analysis = measures.analyze(trace)
    return {
        "operations": len(trace),
        "making_s": made - began,
        "seconds": time.perf_counter() - made,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "slowdown": analysis.slowdown,
    }


def measure(options: Options, folder: Path) -> Result:
    """Time the command, the analysis of a trace in memory, and that of the large one."""
    if options.large_here:
        return Result(large())
    processes: dict[str, list[tuple[float, float]]] = {name: [] for name in REFERENCE_S}
    process_s("AR", folder)
    for _ in range(RUNS):
        for name, seconds in processes.items():
            seconds.append(process_s(name, folder))
    trace = reader.read(DATA / "trace-AR.parquet", reader.read_meta(DATA / "meta-AR.yaml"))
    analysis_s = timed(lambda: measures.analyze(trace), RUNS)
    job = tensors.job(trace)
    simulated = functools.partial(step_times, job.graph, job.durations, measures.ideals(job).chosen, [Scenario()])
    ours_s, loop_s = timed(simulated, 3), timed(lambda: plain_loop(job), 3)
    np.testing.assert_allclose(simulated()[0], plain_loop(job), rtol=1e-9)
    most = result_of(["-m", "benchmarks.straggler", "--json", "--large-here"])["figures"]
    figures = {
        **{f"{name.lower()}_process_s": stats.median(wall for wall, _ in found) for name, found in processes.items()},
        "ar_analysis_ms": stats.median((1e3 * each for each in analysis_s), 1),
        "large_s": round(most["seconds"], 1),
        "large_memory_mb": round(most["peak_mb"]),
        "one_scenario_ms": stats.median((1e3 * each for each in ours_s), 2),
    }
    baselines: dict[str, Figures] = {
        "reference": {f"{name.lower()}_process_s": seconds for name, seconds in REFERENCE_S.items()},
        "plain_loop": {"one_scenario_ms": stats.median((1e3 * each for each in loop_s), 2)},
    }
    return Result(figures, baselines, {"wall_and_cpu_s": processes, "analysis_s": analysis_s, "large": most})


if __name__ == "__main__":
    main(measure, option("--large-here", action="store_true", help=argparse.SUPPRESS))
