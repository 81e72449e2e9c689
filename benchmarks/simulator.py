"""How fast the simulator is, and how much memory it takes.

`python -m benchmarks.simulator [--json] [--only NAME]`. Each case runs in a process of its own:

- trace_a: eight weeks of 128 GPUs, six tasks, all policies and the oracle.
- llama3_16384: 54 days of 16,384 GPUs with the 419 failures of Llama 3, sixteen tasks, Unicron and Megatron.
- week_131072: one week of 131,072 GPUs at the same rate of failures, 256 tasks, Unicron.

The first two make a new lookup table after each event, as the planner does. On 131,072 GPUs plans are computed when
they are needed: a table for 256 tasks takes a minute there, and a week has 500 events.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

from unicron_simulator import comparison, experiments, traces

from benchmarks.output import as_json
from unicron.contracts.tasks import TaskSpec

CASES = ("trace_a", "llama3_16384", "week_131072")
NEVER = float("inf")


def run(case: str) -> dict[str, Any]:
    """Run one case in this process."""
    began = time.perf_counter()
    if case == "trace_a":
        found = comparison.compare(traces.generate("trace-a", 1), experiments.case_5())
    elif case == "llama3_16384":
        tasks = mixed(16, ("175B", "70B"), 2048, 2048)
        trace = traces.generate("llama3", 1)
        found = comparison.compare(trace, tasks, ("unicron", "megatron"))
    else:
        tasks = mixed(256, ("7B", "13B", "70B", "175B"), 1024, 1024)
        trace = traces.generate("llama3", 1, nodes=16384, days=7)
        found = comparison.compare(trace, tasks, ("unicron",), refresh_every_s=NEVER)
    return {
        "seconds": time.perf_counter() - began,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "shares": {policy: result.earned / result.ideal for policy, result in found.items()},
    }


def mixed(count: int, sizes: tuple[str, ...], most: int, batch: int) -> list[TaskSpec]:
    """Return tasks of several sizes, whose weights rise from 0.5 to 2."""
    return [
        experiments.gpt3(
            f"task-{number}",
            sizes[number % len(sizes)],
            weight=0.5 + 1.5 * number / (count - 1),
            most=most,
            batch=batch,
        )
        for number in range(count)
    ]


def main() -> None:
    """Print how long each case took, and the largest memory of all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--only", choices=CASES, help="run this case alone")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here:
        print(json.dumps(run(given.only)))
        return
    found = {}
    for case in [given.only] if given.only else CASES:
        command = [sys.executable, "-m", "benchmarks.simulator", "--only", case, "--here"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found[case] = json.loads(done.stdout)
    figures = {f"{case}_s": round(one["seconds"], 2) for case, one in found.items()}
    figures["peak_memory_mb"] = round(max(one["peak_mb"] for one in found.values()))
    if given.json:
        print(as_json("simulator", figures, details=found))
    else:
        for name, value in figures.items():
            print(f"{name:20}{value:>10}")


if __name__ == "__main__":
    main()
