"""The paper's evaluation made anew in virtual time: figures 3b, 9, 10 and 11.

With --write, the pictures and the tables of docs/reference are made anew. Each ratio is the median over seeds,
which differ in when and where failures strike.

Figures ending in `_as_planned` begin with the plan that the objective of the paper gives; the others with one in which
every task runs, which is better for all other systems.
"""

import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from unicron_simulator.policies import comparison, economy, experiments, parameters, plots, traces
from unicron_simulator.policies.parameters import Costs
from unicron_simulator.policies.traces import FailureTrace

from benchmarks import figures
from benchmarks.figures import Spread, Table, spread
from benchmarks.harness.command import ROOT, Figures, Options, Result, main, option
from unicron.contracts.tasks import TaskSpec

DOCS = ROOT / "docs" / "reference"
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

Runs = list[dict[str, economy.Result]]
Case = tuple[dict[str, Costs], Sequence[TaskSpec], Callable[[FailureTrace], FailureTrace]]
"""Costs that are changed, tasks, and what is done to each trace."""


def runs(name: str, case: Case, policies: Sequence[str], seeds: int) -> Runs:
    """Return what came out for each seed."""
    costs, tasks, change = case
    drawn = [change(traces.generate(name, seed)) for seed in range(1, seeds + 1)]
    return [comparison.compare(trace, tasks, policies, costs=costs) for trace in drawn]


def _same(trace: FailureTrace) -> FailureTrace:
    return trace


def _slower(trace: FailureTrace) -> FailureTrace:
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
        f"{name}{suffix}": runs(name, (known, experiments.case_5(all_run=all_run), _same), policies, seeds)
        for name in TRACES
        for all_run, suffix in ((True, ""), (False, "-as-planned"))
    }


def sensitivity(seeds: int) -> dict[str, dict[str, Spread]]:
    """Return Unicron over Megatron, and its share of the oracle, with one assumption changed each time."""
    known, usual = parameters.load()[0], experiments.case_5()
    unicron, megatron = known["unicron"], known["megatron"]
    slow = replace(unicron, recover={kind: 5 * seconds for kind, seconds in unicron.recover.items()})
    quick = replace(megatron, detect=unicron.detect, detect_iterations=unicron.detect_iterations)
    late = replace(megatron, recover=megatron.recover | {"sev1": 2280.0 + 7200.0})
    equal = [experiments.gpt3(f"7B-{number}", "7B", most=32) for number in range(6)]
    ways: dict[str, Case] = {
        "as assumed": ({}, usual, _same),
        "Unicron's transitions take 5 minutes": ({"unicron": slow}, usual, _same),
        "Megatron detects as fast as Unicron": ({"megatron": quick}, usual, _same),
        "Megatron's node is given back 2 hours late": ({"megatron": late}, usual, _same),
        "six equal tasks (case 1)": ({}, equal, _same),
        "one task of 7B": ({}, [experiments.gpt3("7B", "7B")], _same),
        "global batch of 1,536, so more sizes": ({}, experiments.case_5(batch=1536), _same),
        "repairs take twice as long": ({}, usual, _slower),
        "as many nodes are lost, but four at once, of one rack": ({}, usual, lambda trace: traces.by_rack(trace, RACK)),
    }
    rows = {}
    for way, (changed, tasks, change) in ways.items():
        row: dict[str, Spread] = {}
        for name in TRACES:
            case = (known | changed, tasks, change)
            found = runs(name, case, ("unicron", "megatron", "oracle"), seeds)
            row |= {f"{name} over": lead(found, "megatron"), f"{name} share": share(found)}
        rows[way] = row
    return rows


def circular(seeds: int) -> dict[str, dict[str, Spread]]:
    """Return the leads with the efficiencies that figure 11 itself gives."""
    case, policies = (comparison.circular(), experiments.case_5(), _same), ("unicron", *OTHERS[1:])
    found = {name: runs(name, case, policies, seeds) for name in TRACES}
    return {name: {other: lead(each, other) for other in OTHERS[1:]} for name, each in found.items()}


# --- output ----------------------------------------------------------------------------------------------------------


def tables(found: dict[str, Any], seeds: int) -> str:
    """Return the tables of the page as markdown."""
    made = [_leads(found), _shares(found["figure_11"]), _losses(found["figure_11"]), _sensitivity(found["sensitivity"])]
    lines = [f"Median of {seeds} seeds, least and most in brackets.", ""]
    for head, rows in (*made, *figures.tables(found["figure_3b"], found["figure_9"], found["figure_10"])):
        lines += [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)] + [""]
    return "\n".join(lines).strip()


def _leads(found: dict[str, Any]) -> Table:
    def row(other: str, name: str) -> list[str]:
        runs = [found["figure_11"][f"{name}{plan}"] for plan in ("", "-as-planned")]
        circular = found["circular"][name].get(other, "")
        return [other, name, f"{PAPER[name][other]} x", *(str(lead(each, other)) for each in runs), str(circular)]

    head = ["Unicron over", "trace", "paper prints", "every task runs", "as planned", "circular parameters"]
    return head, [row(other, name) for other in OTHERS for name in TRACES]


def _shares(eleven: dict[str, Any]) -> Table:
    def row(name: str, goal: str) -> list[str]:
        ways = [(name, "unicron"), (f"{name}-as-planned", "unicron"), (name, "unicron-measured")]
        return [name, goal, *(share(eleven[case], policy).percent() for case, policy in ways)]

    head = ["share of the oracle", "goal", "every task runs", "as planned", "phases of our own parts, every task runs"]
    return head, [row(*each) for each in zip(TRACES, ("99.5 %", "98 %"), strict=True)]


def _losses(eleven: dict[str, Any]) -> Table:
    causes = {"detection": "detection", "transition": "transition", "sub-healthy": "sub_healthy"}

    def lost(policy: str, name: str, cause: str) -> str:
        parts = [getattr(one[policy], cause) / one[policy].ideal for one in eleven[name]]
        return f"{statistics.median(parts):.2%}"

    pairs = [(policy, name) for policy in comparison.POLICIES for name in TRACES]
    rows = [[*pair, *(lost(*pair, cause) for cause in causes.values())] for pair in pairs]
    return ["lost, every task runs", "trace", *causes], rows


def _sensitivity(found: dict[str, dict[str, Spread]]) -> Table:
    head = ["what is changed", *(f"{name}{what}" for name in TRACES for what in (" over Megatron", ", of the oracle"))]
    return head, [
        [way, *(cell for name in TRACES for cell in (str(row[f"{name} over"]), row[f"{name} share"].percent()))]
        for way, row in found.items()
    ]


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


def flat(found: dict[str, Any]) -> Figures:
    """Return the figures of figures 11 and 9, flat."""
    numbers: Figures = {}
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


def measure(options: Options, _: Path) -> Result:
    """Make all figures anew."""
    seeds = options.seeds
    found: dict[str, Any] = {"figure_11": figure_11(seeds), "circular": circular(seeds)}
    found |= {"sensitivity": sensitivity(seeds), "figure_3b": figures.figure_3b(seeds)}
    found["figure_9"] = figures.figure_9(figures.FIGURE_9_GPUS, min(seeds, figures.FIGURE_9_MOMENTS))
    found["figure_10"] = figures.figure_10()
    if seeds >= SEEDS:
        found["figure_9"] |= figures.figure_9(figures.FIGURE_9_MORE, 1)
    if options.write:
        write(found, tables(found, seeds))
    details = {name: value for name, value in found.items() if name != "figure_11"} | {"seeds": seeds}
    details["figure_9"] = {gpus: bar.played._asdict() | bar.others for gpus, bar in found["figure_9"].items()}
    return Result(flat(found), details=details)


if __name__ == "__main__":
    main(
        measure,
        option("--seeds", default=SEEDS, help="traces of each kind; few skip figure 9's large ones"),
        option(
            "--write", action="store_true", help="make the pictures and tables of docs/reference/evaluation.md anew"
        ),
    )
