"""The paper's evaluation made anew in virtual time: figures 3b, 9, 10 and 11.

`python -m benchmarks.evaluation [--json] [--seeds N] [--write]`. With --write, the pictures and the tables of
docs/evaluation.md are made anew. Each ratio is the median over seeds, which differ in when and where failures strike.

Figures ending in `_as_planned` begin with the plan that the objective of the paper gives; the others with one in which
every task runs, which is better for all other systems.
"""

import argparse
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace
from unicron_simulator import comparison, experiments, parameters, plots, traces
from unicron_simulator.economy import Result, tariffs
from unicron_simulator.parameters import Costs
from unicron_simulator.traces import Trace

from benchmarks.output import as_json
from unicron.contracts.tasks import TaskSpec
from unicron.megatron import catalogue

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "evaluation.md"

OTHERS = ("megatron", "oobleck", "varuna", "bamboo")
TRACES = ("trace-a", "trace-b")
PAPER = {
    "trace-a": {"megatron": 1.2, "oobleck": 3.7, "varuna": 4.8, "bamboo": 4.6},
    "trace-b": {"megatron": 1.9, "oobleck": 3.8, "varuna": 5.8, "bamboo": 4.8},
}
"""Unicron over each, in accumulated WAF (section 7.5)."""

FIGURE_3B_REPAIR_S = 0.02 * 8 * 7 * 86400 / 10
"""Ten faults on 8 nodes in 7 days are "a mere 2 % downtime" if a node is away for so long."""

FIGURE_4_BATCH = 1536
"""With it 7B runs on 48 GPUs and not on 56, as in figure 4."""

FIGURE_10_GPUS = (8, 16, 32, 48, 64, 96, 128)
FIGURE_10_SIZES = ("1.3B", "7B", "13B", "70B", "175B")


class Spread(NamedTuple):
    """Of a figure over all seeds."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.least:.2f} to {self.most:.2f})"

    def percent(self) -> str:
        """Return it in percent."""
        return f"{self.median:.2%} ({self.least:.2%} to {self.most:.2%})"


def spread(values: Sequence[float]) -> Spread:
    """Return median, least and most."""
    return Spread(statistics.median(values), min(values), max(values))


Runs = list[dict[str, Result]]


def runs(
    name: str,
    tasks: Sequence[TaskSpec],
    policies: Sequence[str],
    costs: dict[str, Costs],
    seeds: int,
    repair: float = 1.0,
) -> Runs:
    """Return what came out for each seed, with repairs that take `repair` times as long as the trace has it."""
    drawn = [traces.generate(name, seed) for seed in range(1, seeds + 1)]
    return [comparison.compare(_slower(trace, repair), tasks, policies, costs=costs) for trace in drawn]


def _slower(trace: Trace, repair: float) -> Trace:
    return trace._replace(faults=tuple(fault._replace(repair_s=repair * fault.repair_s) for fault in trace.faults))


def lead(found: Runs, other: str) -> Spread:
    """Return how many times what `other` earned Unicron earned."""
    return spread([one["unicron"].earned / one[other].earned for one in found])


def share(found: Runs, policy: str = "unicron") -> Spread:
    """Return what a policy earned as a part of what the oracle earned."""
    return spread([one[policy].earned / one["oracle"].earned for one in found])


# --- figure 11 and what it depends on --------------------------------------------------------------------------------


def figure_11(seeds: int) -> dict[str, Runs]:
    """Return all runs by trace and initial plan."""
    known, policies = parameters.load()[0], (*comparison.POLICIES, "unicron-measured")
    return {
        f"{name}{suffix}": runs(name, experiments.case_5(all_run=all_run), policies, known, seeds)
        for name in TRACES
        for all_run, suffix in ((True, ""), (False, "-as-planned"))
    }


def sensitivity(seeds: int) -> dict[str, dict[str, Spread]]:
    """Return Unicron over Megatron, and its share of the oracle, with one assumption changed each time."""
    known, _ = parameters.load()
    unicron, megatron = known["unicron"], known["megatron"]

    def slower(times: float) -> Costs:
        return replace(unicron, recover={kind: times * seconds for kind, seconds in unicron.recover.items()})

    ways: dict[str, tuple[dict[str, Costs], Sequence[TaskSpec]]] = {
        "as assumed": ({}, experiments.case_5()),
        "Unicron's transitions take 5 minutes": ({"unicron": slower(5)}, experiments.case_5()),
        "Megatron detects as fast as Unicron": (
            {"megatron": replace(megatron, detect=unicron.detect, detect_iterations=unicron.detect_iterations)},
            experiments.case_5(),
        ),
        "Megatron's node is given back 2 hours late": (
            {"megatron": replace(megatron, recover=megatron.recover | {"sev1": 2280.0 + 7200.0})},
            experiments.case_5(),
        ),
        "six equal tasks (case 1)": ({}, [experiments.gpt3(f"7B-{number}", "7B", most=32) for number in range(6)]),
        "one task of 7B": ({}, [experiments.gpt3("7B", "7B")]),
        "global batch of 1,536, so more sizes": ({}, experiments.case_5(batch=1536)),
    }
    twice = "repairs take twice as long"
    rows = {}
    for way, (changed, tasks) in [*ways.items(), (twice, ways["as assumed"])]:
        row: dict[str, Spread] = {}
        for name in TRACES:
            found = runs(
                name, tasks, ("unicron", "megatron", "oracle"), known | changed, seeds, 2.0 if way == twice else 1.0
            )
            row |= {f"{name} over": lead(found, "megatron"), f"{name} share": share(found)}
        rows[way] = row
    return rows


def circular(seeds: int) -> dict[str, dict[str, Spread]]:
    """Return the leads with the efficiencies that figure 11 itself gives."""
    costs = comparison.circular()
    return {
        name: {
            other: lead(found, other)
            for found in [runs(name, experiments.case_5(), ("unicron", *OTHERS[1:]), costs, seeds)]
            for other in OTHERS[1:]
        }
        for name in TRACES
    }


# --- figures 3b, 9, 10 -----------------------------------------------------------------------------------------------


def figure_3b(seeds: int) -> dict[str, Spread]:
    """Return the lost part of FLOP/s of each policy: 7B, 64 GPUs, 7 days, 10 node faults."""
    lost: dict[str, list[float]] = {}
    for seed in range(1, seeds + 1):
        drawn = traces.generate("trace-b", seed, nodes=8, days=7)
        at = np.sort(np.random.default_rng(seed).uniform(0, drawn.duration_s, 10))
        nodes = np.random.default_rng(seed + 1000).integers(0, 8, 10)
        faults = tuple(
            traces.Fault(float(when), drawn.nodes[node], "sev1", FIGURE_3B_REPAIR_S)
            for when, node in zip(at, nodes, strict=True)
        )
        trace = Trace("figure-3b", drawn.nodes, drawn.duration_s, faults)
        found = comparison.compare(trace, [experiments.gpt3("7B", "7B", most=64, batch=FIGURE_4_BATCH)])
        for policy, result in found.items():
            lost.setdefault(policy, []).append(1 - result.earned / result.ideal)
    return {policy: spread(values) for policy, values in lost.items()}


def figure_10() -> dict[str, dict[str, float]]:
    """Return samples/s of 7B by GPUs, and FLOP/s over the peak by model on 64 GPUs, from the closed-form model."""
    peak = catalogue.accelerator("A800").peak_flops
    samples, ratio = {}, {}
    for gpus in FIGURE_10_GPUS:
        spec = experiments.gpt3("one", "7B", batch=FIGURE_4_BATCH)
        seconds = tariffs([spec], gpus)["one"].iteration_s(gpus)
        samples[str(gpus)] = FIGURE_4_BATCH / seconds
    for size in FIGURE_10_SIZES:
        tariff = tariffs([experiments.gpt3("one", size, batch=FIGURE_4_BATCH)], 64)["one"]
        ratio[size] = tariff.at(64) / (64 * peak)
    return {"7B, samples/s by GPUs": samples, "FLOP/s over peak on 64 GPUs": ratio}


# --- output ----------------------------------------------------------------------------------------------------------


def tables(found: dict[str, Any], seeds: int) -> str:
    """Return the tables of the page as markdown."""
    eleven = found["figure_11"]
    lines = [f"Median of {seeds} seeds, least and most in brackets.", ""]
    lines += _table(
        ["Unicron over", "trace", "paper prints", "every task runs", "as planned", "circular parameters"],
        [
            [
                other,
                name,
                f"{PAPER[name][other]} x",
                str(lead(eleven[name], other)),
                str(lead(eleven[f"{name}-as-planned"], other)),
                str(found["circular"][name][other]) if other != "megatron" else "",
            ]
            for other in OTHERS
            for name in TRACES
        ],
    )
    lines += _table(
        ["share of the oracle", "goal", "every task runs", "as planned", "phases of our own parts, every task runs"],
        [
            [
                name,
                goal,
                share(eleven[name]).percent(),
                share(eleven[f"{name}-as-planned"]).percent(),
                share(eleven[name], "unicron-measured").percent(),
            ]
            for name, goal in zip(TRACES, ("99.5 %", "98 %"), strict=True)
        ],
    )
    causes: dict[str, Callable[[Result], float]] = {
        "detection": lambda result: result.detection / result.ideal,
        "transition": lambda result: result.transition / result.ideal,
        "sub-healthy": lambda result: result.sub_healthy / result.ideal,
    }
    lines += _table(
        ["lost, every task runs", "trace", *causes],
        [
            [
                policy,
                name,
                *(
                    f"{statistics.median([cause(one[policy]) for one in eleven[name]]):.2%}"
                    for cause in causes.values()
                ),
            ]
            for policy in comparison.POLICIES
            for name in TRACES
        ],
    )
    lines += _table(
        [
            "what is changed",
            "trace-a over Megatron",
            "trace-a, of the oracle",
            "trace-b over Megatron",
            "trace-b, of the oracle",
        ],
        [
            [
                way,
                str(row["trace-a over"]),
                row["trace-a share"].percent(),
                str(row["trace-b over"]),
                row["trace-b share"].percent(),
            ]
            for way, row in found["sensitivity"].items()
        ],
    )
    lines += _table(
        ["figure 3b: policy", "lost FLOP/s"], [[name, one.percent()] for name, one in found["figure_3b"].items()]
    )
    for title, row in found["figure_10"].items():
        lines += _table([title, *row], [["Unicron and Megatron", *(f"{value:.3g}" for value in row.values())]])
    return "\n".join(lines).strip()


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)] + [""]


def write(found: dict[str, Any], text: str) -> None:
    """Make the pictures and the tables of the page anew."""
    for name in TRACES:
        results = {policy: found["figure_11"][name][0][policy] for policy in comparison.POLICIES}
        plots.draw(results, f"Figure 11, {name}, seed 1, every task runs", DOCS / f"evaluation-{name}.svg")
    page = PAGE.read_text(encoding="utf-8")
    marked = re.compile(r"(<!-- made by benchmarks.evaluation -->\n).*?(<!-- end -->)", re.DOTALL)
    PAGE.write_text(marked.sub(lambda match: f"{match[1]}\n{text}\n\n{match[2]}", page), encoding="utf-8")


def main() -> None:
    """Print all figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--seeds", type=int, default=20, help="how many traces of each kind")
    parser.add_argument("--write", action="store_true", help="make the pictures and tables of docs/evaluation.md anew")
    given = parser.parse_args()
    found: dict[str, Any] = {
        "figure_11": figure_11(given.seeds),
        "circular": circular(given.seeds),
        "sensitivity": sensitivity(given.seeds),
        "figure_3b": figure_3b(given.seeds),
        "figure_10": figure_10(),
    }
    figures, text = flat(found["figure_11"]), tables(found, given.seeds)
    if given.write:
        write(found, text)
    if given.json:
        details = {name: value for name, value in found.items() if name != "figure_11"}
        print(as_json("evaluation", figures, details=details | {"seeds": given.seeds}))
    else:
        print(text)


def flat(eleven: dict[str, Runs]) -> dict[str, float]:
    """Return the figures of figure 11, flat."""
    figures: dict[str, float] = {}
    for name, found in eleven.items():
        head, planned = name.removesuffix("-as-planned").replace("-", "_"), name.endswith("-as-planned")
        tail = "_as_planned" if planned else ""
        every = {f"{head}_over_{other}{tail}": lead(found, other) for other in OTHERS}
        every[f"{head}_share_of_oracle{tail}"] = share(found)
        for each, one in every.items():
            figures |= {each: one.median, f"{each}_least": one.least, f"{each}_most": one.most}
    return figures


if __name__ == "__main__":
    main()
