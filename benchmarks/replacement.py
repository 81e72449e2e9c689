"""The worth of replacing lost nodes, and of spare ones: eight weeks of trace-a in virtual time.

Six tasks on 16 nodes of eight GPUs, as in the evaluation; each figure is the median over seeds of the goodput, the
part of the WAF of a cluster without failures that was earned. Without a pool a lost node is back after its repair, in 1
to 7 days. With one, the provisioner's core asks for another machine at once, and that has joined after 10 minutes, an
hour or a day. `spare`: there is one node more than tasks need, which does not fail by itself.
"""

import statistics
from pathlib import Path

from unicron_simulator.policies import comparison, experiments, traces

from benchmarks.harness.command import Figures, Options, Result, main, option

TRACE, SEEDS, SPARES = "trace-a", 20, 1
POLICIES = ("unicron", "megatron")
DELIVERIES = {"repair": None, "10_min": 600.0, "1_h": 3600.0, "1_d": 86400.0}
"""Seconds until another machine has joined, None for the node itself after its repair."""


def goodput(seed: int, spares: int, delivery_s: float | None) -> Figures:
    """Return what each policy earned of what there was to be earned."""
    drawn = traces.generate(TRACE, seed)
    found = comparison.compare(drawn, experiments.case_5(), POLICIES, spares=spares, delivery_s=delivery_s)
    return {policy: result.earned / result.ideal for policy, result in found.items()}


def measure(options: Options, _: Path) -> Result:
    """Run all ways through all traces."""
    figures: dict[str, Figures] = {policy: {} for policy in POLICIES}
    details = {}
    for spares in (0, SPARES):
        for name, delivery_s in DELIVERIES.items():
            runs = [goodput(seed, spares, delivery_s) for seed in range(1, options.seeds + 1)]
            way = f"{'spare_' if spares else ''}{name}"
            spread = {policy: sorted(run[policy] for run in runs) for policy in POLICIES}
            for policy, parts in spread.items():
                figures[policy][f"{way}_goodput"] = round(statistics.median(parts), 5)
            details[way] = {f"{policy}_least": round(parts[0], 5) for policy, parts in spread.items()}
    return Result(figures["unicron"], {"megatron": figures["megatron"]}, {"least": details})


if __name__ == "__main__":
    main(measure, option("--seeds", default=SEEDS, help="traces, which differ in when and where failures strike"))
