"""How fast the simulator is, and how much memory it takes; each case in a process of its own.

- trace_a: eight weeks of 128 GPUs, six tasks, all policies and the oracle.
- llama3_16384: 54 days of 16,384 GPUs with the 419 failures of Llama 3, sixteen tasks, Unicron and Megatron.
- week_131072: one week of 131,072 GPUs at the same rate of failures, 256 tasks, Unicron.

The first two make a new lookup table after each event, as the planner does. On 131,072 GPUs plans are computed when
they are needed: a table for 256 tasks takes a minute there, and a week has 500 events.
"""

import argparse
import math
import resource
import time
from pathlib import Path

from unicron_simulator.policies import comparison, experiments, traces

from benchmarks.harness.command import Figures, Options, Result, main, option
from benchmarks.harness.processes import result_of
from unicron.contracts.tasks import TaskSpec

CASES = ("trace_a", "llama3_16384", "week_131072")


def run(case: str) -> Figures:
    """Run one case in this process."""
    began = time.perf_counter()
    if case == "trace_a":
        found = comparison.compare(traces.generate("trace-a", 1), experiments.case_5())
    elif case == "llama3_16384":
        tasks = mixed(16, ("175B", "70B"), 2048)
        found = comparison.compare(traces.generate("llama3", 1), tasks, ("unicron", "megatron"))
    else:
        tasks = mixed(256, ("7B", "13B", "70B", "175B"), 1024)
        trace = traces.generate("llama3", 1, nodes=16384, days=7)
        found = comparison.compare(trace, tasks, ("unicron",), refresh_every_s=math.inf)
    return {
        "seconds": time.perf_counter() - began,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "shares": {policy: result.earned / result.ideal for policy, result in found.items()},
    }


def mixed(count: int, sizes: tuple[str, ...], most: int) -> list[TaskSpec]:
    """Return tasks of several sizes, whose weights rise from 0.5 to 2."""
    weights = (0.5 + 1.5 * number / (count - 1) for number in range(count))
    return [
        experiments.gpt3(f"task-{number}", sizes[number % len(sizes)], weight=weight, most=most, batch=most)
        for number, weight in enumerate(weights)
    ]


def measure(options: Options, _: Path) -> Result:
    """Return how long each case took, and the largest memory of all."""
    if options.here:
        return Result(run(options.only))
    cases = [options.only] if options.only else CASES
    words = ["-m", "benchmarks.simulator", "--json", "--here", "--only"]
    found = {case: result_of([*words, case])["figures"] for case in cases}
    seconds = {f"{case}_s": round(one["seconds"], 2) for case, one in found.items()}
    return Result(seconds | {"peak_memory_mb": round(max(one["peak_mb"] for one in found.values()))}, details=found)


if __name__ == "__main__":
    main(
        measure,
        option("--only", choices=CASES, help="run this case alone"),
        option("--here", action="store_true", help=argparse.SUPPRESS),
    )
