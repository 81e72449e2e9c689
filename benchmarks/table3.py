"""Table 3 of the paper: six GPT-3 tasks on 128 GPUs, shared out by Unicron and by others (section 7.4, figure 10c).

T(t, x) is the closed-form model of `unicron.costmodel`, strict: only sizes that Megatron can run, on 16 servers of 8
A800. WAF is the sum over all tasks of weight times achieved FLOP/s. The figures are Unicron's over each other policy's.

The objective of the paper lets tasks wait where others earn more with their workers. So the plan comes twice: as the
objective has it ("unicron"), and the best one in which every task runs ("all run"), as it does with the others.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs
from unicron_planner import program
from unicron_planner.policies import Demand, Policy, equally, sized, weighted
from unicron_planner.program import Floats, Ints
from unicron_simulator.policies import plots

from benchmarks.harness.command import Options, Result, main, option
from unicron.contracts.tasks import ModelSpec
from unicron.costmodel import catalogue, formulas, planning

GPUS = 128
ACCELERATOR = "A800"
BATCH = 1024  # sequences of a global batch; the paper names none for this table
MIXED = ("1.3B", "1.3B", "1.3B", "7B", "7B", "13B")
RISING = (0.5, 0.8, 1.1, 1.4, 1.7, 2.0)
CASES = ((("7B",) * 6, (1.0,) * 6), (MIXED, (1.0,) * 6), (("7B",) * 6, RISING), (MIXED, RISING), (MIXED, RISING[::-1]))
"""Model sizes and weights of tasks 1 to 6."""

OTHERS: dict[str, Policy] = {"equally": equally, "weighted": weighted, "sized": sized}
EVEN = 1 - 1e-9
PLAN, ALL_RUN = "unicron", "all run"
RUNNING_S = 7 * 86400 / 3  # d_running; with nothing running yet it has no influence on the plan


class Contender(NamedTuple):
    """A task of the table, and F(t, x) at each size of its demand; it leaves workers idle where it runs faster so."""

    demand: Demand
    waf: Floats


class Share(NamedTuple):
    """How one policy fares in one case."""

    sizes: dict[str, int]
    waf: float


def contenders(models: Sequence[str], weights: Sequence[float]) -> list[Contender]:
    """Return the tasks of a case."""
    found = []
    for number, (name, weight) in enumerate(zip(models, weights, strict=True), start=1):
        sizes, flops, parameters = known(name)
        demand = Demand(f"{number}:{name}", sizes, weight=weight, parameters=parameters)
        found.append(Contender(demand, weight * np.maximum.accumulate(flops)))
    return found


def known(name: str) -> tuple[Ints, Floats, float]:
    """Return the feasible sizes of a model, T(t, x) at each, and its number of parameters."""
    model = ModelSpec(**structs.asdict(catalogue.size(name)), batch=BATCH, accelerator=ACCELERATOR)
    curve = planning.curve(model, GPUS)
    return np.r_[0, curve.sizes], np.r_[0.0, curve.flops], formulas.parameters(model)


def planned(tasks: Sequence[Contender], workers: int, *, all_run: bool = False) -> dict[str, int]:
    """Return the assignment of the planner when all tasks are launched on an empty cluster; no task waits if `all_run`.

    Raises:
        ValueError: not all tasks can run at once.
    """
    demands = [task.demand for task in tasks]
    nothing = [0] * len(tasks)
    packed = program.pack(
        [demand.sizes for demand in demands], [task.waf for task in tasks], nothing, [0.0] * len(tasks)
    )
    scores = program.score(packed, workers, running_s=RUNNING_S, resize_s=0.0, failure_s=0.0)
    sizes = program.solve(scores, np.full(len(tasks), program.LAUNCHED if all_run else 0.0), workers)
    if sizes is None:
        raise ValueError(f"not all of {len(tasks)} tasks can run on {workers} workers")
    return {demand.name: size for demand, size in zip(demands, sizes.tolist(), strict=True)}


def results(tasks: Sequence[Contender], workers: int = GPUS) -> dict[str, Share]:
    """Return how each policy fares."""
    shares = {PLAN: planned(tasks, workers), ALL_RUN: planned(tasks, workers, all_run=True)}
    shares |= {name: policy([task.demand for task in tasks], workers) for name, policy in OTHERS.items()}
    return {name: Share(sizes, waf(tasks, sizes)) for name, sizes in shares.items()}


def waf(tasks: Sequence[Contender], sizes: dict[str, int]) -> float:
    """Return the WAF of an assignment."""
    return float(sum(task.waf[np.searchsorted(task.demand.sizes, sizes[task.demand.name])] for task in tasks))


def ratios(found: dict[str, Share], plan: str = PLAN) -> dict[str, float]:
    """Return how many times the WAF of each other policy that of `plan` is."""
    return {name: found[plan].waf / found[name].waf for name in OTHERS}


def report() -> list[dict[str, Any]]:
    """Return the whole table."""
    rows = []
    for number, (models, weights) in enumerate(CASES, start=1):
        found = results(contenders(models, weights))
        row = {"case": number, "waf_pflops": {name: share.waf / 1e15 for name, share in found.items()}}
        row |= {"ratio": ratios(found), "ratio_all_run": ratios(found, ALL_RUN)}
        rows.append(row | {"workers": {name: list(share.sizes.values()) for name, share in found.items()}})
    return rows


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the WAF of each policy in each case as bars into `path`, with Unicron's lead over the best other."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra

    names, colours = list(rows[0]["waf_pflops"]), ("tab:red", "lightcoral", "#9ecae1", "#6baed6", "#3182bd")
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(names)
    for place, (name, colour) in enumerate(zip(names, colours, strict=True)):
        at = [row["case"] + (place - (len(names) - 1) / 2) * width for row in rows]
        axes.bar(at, [row["waf_pflops"][name] for row in rows], width * 0.92, color=colour, label=name)
    for row in rows:
        top, lead = max(row["waf_pflops"].values()), min(row["ratio"].values())
        axes.annotate(f"{lead:.2f}x", (row["case"], top), (0, 4), textcoords="offset points", ha="center")
    axes.set(xlabel="case of table 3", ylabel="WAF (weighted PFLOP/s)", xticks=[row["case"] for row in rows])
    axes.set_title(f"Six tasks on {GPUS} {ACCELERATOR}; numbers: Unicron over the best other", fontsize="medium")
    axes.set_ylim(top=1.1 * max(max(row["waf_pflops"].values()) for row in rows))
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    figure.legend(ncols=len(names), loc="outside lower center", fontsize="small", frameon=False)
    plots.save(figure, path)


def measure(options: Options, _: Path) -> Result:
    """Return the table; the status is 1 where any other policy beats the plan."""
    rows = report()
    if options.plot:
        draw(rows, options.plot)
    figures = {f"case_{row['case']}_over_{name}": ratio for row in rows for name, ratio in row["ratio"].items()}
    beaten = any(ratio < EVEN for row in rows for kind in ("ratio", "ratio_all_run") for ratio in row[kind].values())
    table = {
        f"{row['case']} {name}": {
            "waf_pflops": value,
            **{f"{kind}_of_it": row[kind].get(name, "") for kind in ("ratio", "ratio_all_run")},
            "workers": row["workers"][name],
        }
        for row in rows
        for name, value in row["waf_pflops"].items()
    }
    return Result(figures, details={"cases": table}, status=int(beaten))


if __name__ == "__main__":
    main(measure, option("--plot", type=Path, metavar="FILE", help="draw the table into FILE (.svg or .png)"))
