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
from typing import Any

from msgspec.structs import replace
from unicron_simulator import comparison, experiments, parameters, plots, traces
from unicron_simulator.economy import Result
from unicron_simulator.parameters import Costs
from unicron_simulator.traces import Trace

from benchmarks import figures
from benchmarks.figures import Spread, spread
from benchmarks.output import as_json
from unicron.contracts.tasks import TaskSpec

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "evaluation.md"

OTHERS = ("megatron", "oobleck", "varuna", "bamboo")
TRACES = ("trace-a", "trace-b")
SEEDS = 20
RACK = 4
PAPER = {
    "trace-a": {"megatron": 1.2, "oobleck": 3.7, "varuna": 4.8, "bamboo": 4.6},
    "trace-b": {"megatron": 1.9, "oobleck": 3.8, "varuna": 5.8, "bamboo": 4.8},
}
"""Unicron over each, in accumulated WAF (section 7.5)."""

Runs = list[dict[str, Result]]


def runs(
    name: str,
    tasks: Sequence[TaskSpec],
    policies: Sequence[str],
    costs: dict[str, Costs],
    seeds: int,
    change: Callable[[Trace], Trace] = lambda trace: trace,
) -> Runs:
    """Return what came out for each seed, with each trace changed beforehand."""
    drawn = [change(traces.generate(name, seed)) for seed in range(1, seeds + 1)]
    return [comparison.compare(trace, tasks, policies, costs=costs) for trace in drawn]


def _slower(trace: Trace) -> Trace:
    return trace._replace(faults=tuple(fault._replace(repair_s=2 * fault.repair_s) for fault in trace.faults))


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
    changes: dict[str, Callable[[Trace], Trace]] = {
        "repairs take twice as long": _slower,
        "as many nodes are lost, but four at once, of one rack": lambda trace: traces.by_rack(trace, RACK),
    }
    rows = {}
    for way in (*ways, *changes):
        changed, tasks = ways.get(way, ways["as assumed"])
        row: dict[str, Spread] = {}
        for name in TRACES:
            policies, change = ("unicron", "megatron", "oracle"), changes.get(way, lambda trace: trace)
            found = runs(name, tasks, policies, known | changed, seeds, change)
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


# --- output ----------------------------------------------------------------------------------------------------------


def tables(found: dict[str, Any], seeds: int) -> str:
    """Return the tables of the page as markdown."""
    eleven = found["figure_11"]
    lines = [f"Median of {seeds} seeds, least and most in brackets.", ""]
    lines += [*_leads(found), *_shares(eleven), *_losses(eleven), *_sensitivity(found)]
    for head, rows in figures.rows(found):
        lines += _table(head, rows)
    return "\n".join(lines).strip()


def _leads(found: dict[str, Any]) -> list[str]:
    eleven = found["figure_11"]
    return _table(
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


def _shares(eleven: dict[str, Any]) -> list[str]:
    return _table(
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


def _losses(eleven: dict[str, Any]) -> list[str]:
    causes: dict[str, Callable[[Result], float]] = {
        "detection": lambda result: result.detection / result.ideal,
        "transition": lambda result: result.transition / result.ideal,
        "sub-healthy": lambda result: result.sub_healthy / result.ideal,
    }
    return _table(
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


def _sensitivity(found: dict[str, Any]) -> list[str]:
    return _table(
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


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)] + [""]


def write(found: dict[str, Any], text: str) -> None:
    """Make the pictures and the tables of the page anew."""
    for name in TRACES:
        results = {policy: found["figure_11"][name][0][policy] for policy in comparison.POLICIES}
        plots.draw(results, f"Figure 11, {name}, seed 1, every task runs", DOCS / f"evaluation-{name}.svg")
    figures.draw_3b(found["figure_3b"], DOCS / "evaluation-figure-3b.svg")
    figures.draw_9(found["figure_9"], DOCS / "evaluation-figure-9.svg")
    figures.draw_10(found["figure_10"], DOCS / "evaluation-figure-10.svg")
    page = PAGE.read_text(encoding="utf-8")
    marked = re.compile(r"(<!-- made by benchmarks.evaluation -->\n).*?(<!-- end -->)", re.DOTALL)
    PAGE.write_text(marked.sub(lambda match: f"{match[1]}\n{text}\n\n{match[2]}", page), encoding="utf-8")


def main() -> None:
    """Print all figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="traces of each kind; few skip figure 9's large ones")
    parser.add_argument("--write", action="store_true", help="make the pictures and tables of docs/evaluation.md anew")
    given = parser.parse_args()
    found: dict[str, Any] = {
        "figure_11": figure_11(given.seeds),
        "circular": circular(given.seeds),
        "sensitivity": sensitivity(given.seeds),
        "figure_3b": figures.figure_3b(given.seeds),
        "figure_9": figures.figure_9(figures.FIGURE_9_GPUS, min(given.seeds, figures.FIGURE_9_MOMENTS)),
        "figure_10": figures.figure_10(),
    }
    if given.seeds >= SEEDS:
        found["figure_9"] |= figures.figure_9(figures.FIGURE_9_MORE, 1)
    numbers, text = flat(found), tables(found, given.seeds)
    if given.write:
        write(found, text)
    if given.json:
        details = {name: value for name, value in found.items() if name != "figure_11"}
        details["figure_9"] = {gpus: bar.played._asdict() | bar.others for gpus, bar in found["figure_9"].items()}
        print(as_json("evaluation", numbers, details=details | {"seeds": given.seeds}))
    else:
        print(text)


def flat(found: dict[str, Any]) -> dict[str, float]:
    """Return the figures of figures 11 and 9, flat."""
    numbers: dict[str, float] = {}
    for name, ran in found["figure_11"].items():
        head, planned = name.removesuffix("-as-planned").replace("-", "_"), name.endswith("-as-planned")
        tail = "_as_planned" if planned else ""
        every = {f"{head}_over_{other}{tail}": lead(ran, other) for other in OTHERS}
        every[f"{head}_share_of_oracle{tail}"] = share(ran)
        for each, one in every.items():
            numbers |= {each: one.median, f"{each}_least": one.least, f"{each}_most": one.most}
    for gpus, bar in found["figure_9"].items():
        numbers |= {f"transition_{gpus}_gpus_s": bar.unicron.median, f"messages_{gpus}_gpus": bar.played.messages}
    return numbers


if __name__ == "__main__":
    main()
