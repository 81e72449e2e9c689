"""Running work that is left alone: plans that change running tasks with and without the error of estimates.

Each set of tasks goes through the same failures twice for each way of knowing their curves: exactly, and as estimates
that are off by a normal error of 5 % for each task. What they earn is by the true curves. The baseline is a planner
with `UNICRON_ESTIMATE_ERROR=0`, in the same run.

- changing: plans that change the size of a task that ran and lost nothing; growth into free slots is among them.
- taking: those of them that take workers from such a task; evicting: all that it has.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace
from unicron_planner.estimates import PlannerOptions
from unicron_simulator.policies import experiments, parameters, traces
from unicron_simulator.policies.economy import tariffs
from unicron_simulator.policies.policies import Unicron

from benchmarks.harness.command import Figures, Options, Result, main, option
from benchmarks.simulator import mixed
from unicron.contracts.plans import Plan
from unicron.contracts.tasks import TaskSpec

TRACES = ("trace-a", "trace-b", "llama3", "meta-rsc", "opt", "bloom")
NODES, GPUS = 16, 8
ERROR = 0.05


def alike() -> list[TaskSpec]:
    """Return twenty tasks that earn the same within 3 %, each worker a little less than the one before."""
    draw = random.Random(1)
    speeds = [1e14 * draw.uniform(0.97, 1.03) for _ in range(20)]
    return [
        TaskSpec(
            name=f"task-{number}",
            command=["train"],
            max_workers=16,
            throughput={size: speed * size**0.85 for size in range(1, 17)},
            flops_per_iteration=1e16,
        )
        for number, speed in enumerate(speeds)
    ]


SETS: dict[str, Callable[[], list[TaskSpec]]] = {
    "case5": experiments.case_5,
    "case5_as_planned": lambda: experiments.case_5(all_run=False),
    "mixed": lambda: mixed(8, ("1.3B", "7B"), 64),
    "alike": alike,
}


def run(tasks: Sequence[TaskSpec], seeds: int, believed_error: float, error: float) -> Figures:
    """Return what came of one set of tasks on all traces.

    Args:
        tasks: as they are.
        seeds: of each trace.
        believed_error: by how much the planner's estimates are off.
        error: by how much it takes them to be off.
    """
    counts, earned, ideal = dict.fromkeys(("plans", "changing", "taking", "evicting"), 0), 0.0, 0.0
    costs = parameters.load()[0]["unicron"]
    for name in TRACES:
        for seed in range(1, seeds + 1):
            tariff = tariffs(tasks, NODES * GPUS)
            draw = random.Random(seed)
            for one in tariff.values():  # the ledger goes by `waf`, the planner by `spec`
                sizes, flops = one.sizes[1:].tolist(), (one.waf[1:] / one.spec.weight).tolist()
                factor = draw.gauss(1, believed_error)
                off = {size: factor * each for size, each in zip(sizes, flops, strict=True)}
                one.spec = replace(one.spec, throughput=off)
            options = PlannerOptions(transition_s=costs.recover["sev1"], estimate_error=error)
            cluster = Unicron(traces.generate(name, seed, NODES), GPUS, tariff, costs, options=options)
            result = cluster.run(name)
            earned, ideal = earned + result.earned, ideal + result.ideal
            for plan, hit in zip(cluster.plans, cluster.hits, strict=True):
                counts = {kind: count + (kind in kinds(plan, hit)) for kind, count in counts.items()}
    return {**counts, "earned_pct": 100 * earned / ideal}


def kinds(plan: Plan, hit: set[str]) -> set[str]:
    """Return what a plan does to tasks that ran and lost nothing: changes, takes from, or evicts them."""
    found = {"plans"}
    for share in plan.shares:
        size = len(share.slots)
        if share.before and share.task not in hit and size != share.before:
            found |= {"changing"} | ({"taking"} if size < share.before else set()) | (set() if size else {"evicting"})
    return found


def measure(options: Options, _: Path) -> Result:
    """Return the figures of all sets with the default, and as baseline those of a planner that takes any gain."""
    figures: dict[str, Figures] = {"kept": {}, "any gain": {}}
    for name, tasks in SETS.items():
        for believed, suffix in ((0.0, "exact"), (ERROR, "off")):
            for system, error in (("kept", PlannerOptions().estimate_error), ("any gain", 0.0)):
                found = run(tasks(), options.seeds, believed, error)
                figures[system] |= {f"{name}_{suffix}_{kind}": round(value, 4) for kind, value in found.items()}
    return Result(figures["kept"], {"any gain": figures["any gain"]})


if __name__ == "__main__":
    main(measure, option("--seeds", default=3, help="traces of each kind"))
