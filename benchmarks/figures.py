"""Figures 3b, 9 and 10 of the paper made anew: numbers and pictures; `benchmarks.evaluation` prints them."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from msgspec.structs import replace
from unicron_simulator import transitions
from unicron_simulator.policies import comparison, experiments, parameters, plots, traces
from unicron_simulator.policies.economy import tariffs
from unicron_simulator.transitions import Transition

from unicron.costmodel import catalogue

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIGURE_3B_REPAIR_S = 0.02 * 8 * 7 * 86400 / 10
"""Ten faults on 8 nodes in 7 days are "a mere 2 % downtime" if a node is away for so long."""

FIGURE_4_BATCH = 1536  # with it 7B runs on 48 GPUs and not on 56, as in figure 4
FIGURE_9_GPUS = (16, 32, 64)
FIGURE_9_MORE = (256, 1024)  # sizes of the paper, and larger ones, which are played once
FIGURE_9_MOMENTS = 5  # moments of an iteration at which the node is lost
FIGURE_10_GPUS = (8, 16, 32, 48, 64, 96, 128)
FIGURE_10_SIZES = ("1.3B", "7B", "13B", "70B", "175B")


Table = tuple[list[str], list[list[str]]]  # head and rows


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


# --- numbers ---------------------------------------------------------------------------------------------------------


def figure_3b(seeds: int) -> dict[str, Spread]:
    """Return the lost part of FLOP/s of each policy: 7B, 64 GPUs, 7 days, 10 node faults."""
    lost: dict[str, list[float]] = {}
    for seed in range(1, seeds + 1):
        drawn = traces.generate("trace-b", seed, nodes=8, days=7)
        at = np.sort(np.random.default_rng(seed).uniform(0, drawn.duration_s, 10))
        nodes = np.random.default_rng(seed + 1000).integers(0, 8, 10)
        faults = tuple(
            traces.Failure(float(when), drawn.nodes[node], "sev1", FIGURE_3B_REPAIR_S)
            for when, node in zip(at, nodes, strict=True)
        )
        trace = traces.Trace("figure-3b", drawn.nodes, drawn.duration_s, faults)
        found = comparison.compare(trace, [experiments.gpt3("7B", "7B", most=64, batch=FIGURE_4_BATCH)])
        for policy, result in found.items():
            lost.setdefault(policy, []).append(1 - result.earned / result.ideal)
    return {policy: spread(values) for policy, values in lost.items()}


class Bar(NamedTuple):
    """Figure 9 at one cluster size; seconds."""

    played: Transition  # by the services, at the moment whose seconds are the median
    unicron: Spread  # over all moments
    others: dict[str, float]  # by policy


def figure_9(sizes: Sequence[int], moments: int) -> dict[int, Bar]:
    """Return the transition of each policy when a node is lost under 7B, by cluster size."""
    known, costs = parameters.phases(), parameters.load()[0]
    bars = {}
    for gpus in sizes:
        task = experiments.gpt3("7B", "7B", most=gpus, batch=FIGURE_4_BATCH)
        task = replace(task, microbatches=FIGURE_4_BATCH)
        found = [transitions.unicron(task, gpus, seed) for seed in range(1, moments + 1)]
        found.sort(key=lambda each: each.seconds)
        others = {
            "megatron": transitions.restart_s(task, gpus, known),
            "varuna": transitions.restart_s(task, gpus - transitions.SLOTS, known),
            "oobleck": costs["oobleck"].recover["sev1"],
            "bamboo": costs["bamboo"].recover["sev1"],
        }
        bars[gpus] = Bar(found[len(found) // 2], spread([each.seconds for each in found]), others)
    return bars


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


# --- pictures --------------------------------------------------------------------------------------------------------


def _panels(inches: tuple[float, float], columns: int = 1) -> tuple["Figure", Any]:
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra

    figure = Figure(figsize=inches, layout="constrained")
    return figure, figure.subplots(1, columns)


def draw_3b(lost: Mapping[str, Spread], path: Path) -> None:
    """Draw what each policy lost, and how much of the hardware was away."""
    figure, axes = _panels((6, 2.6))
    names = list(lost)
    middle, low, high = (np.array([100 * one[part] for one in lost.values()]) for part in range(3))
    colours = [plots.COLOURS[name] for name in names]
    axes.barh(names, middle, xerr=[middle - low, high - middle], color=colours, error_kw={"linewidth": 1})
    axes.axvline(2, color="black", linestyle="--", linewidth=1, label="hardware that is away")
    axes.legend(fontsize="small", loc="lower right")
    axes.invert_yaxis()
    axes.set_xlabel("lost FLOP/s, % of the same system without failures")
    axes.set_title("Figure 3b: 7B, 64 GPUs, 7 days, 10 node faults", fontsize="medium")
    plots.save(figure, path)


def draw_9(bars: Mapping[int, Bar], path: Path) -> None:
    """Draw seconds by policy, and what goes over the bus, by cluster size."""
    figure, (left, right) = _panels((9, 3.2), 2)
    sizes = list(bars)
    lines = {"unicron": "o-", "megatron": "s-", "varuna": "x--", "oobleck": ":", "bamboo": ":"}
    for policy, line in lines.items():
        seconds = [bar.unicron.median if policy == "unicron" else bar.others[policy] for bar in bars.values()]
        left.plot(sizes, seconds, line, color=plots.COLOURS[policy], label=policy)
    left.set_title("Figure 9: seconds from the verdict until all is made good", fontsize="medium")
    left.set_ylabel("seconds")
    traffic = {"messages": ("messages", "o", "tab:red"), "commands": ("of them commands", "s", "salmon")}
    for name, (label, marker, colour) in (traffic | {"kilobytes": ("kilobytes", "^", "gray")}).items():
        values = [getattr(bar.played, name) for bar in bars.values()]
        right.plot(sizes, values, marker=marker, color=colour, label=label)
    right.set_title("on the bus for one transition of Unicron", fontsize="medium")
    for axes in (left, right):
        _log_axes(axes, sizes)
    left.legend(fontsize="small", ncols=2, loc=(0.28, 0.48))
    right.legend(fontsize="small")
    plots.save(figure, path)


def _log_axes(axes: "Axes", sizes: Sequence[int]) -> None:
    axes.set(xscale="log", yscale="log", xlabel="GPUs")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def draw_10(found: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Draw throughput by GPUs (a) and the share of the peak by model (b)."""
    samples, ratio = found.values()
    figure, (left, right) = _panels((9, 3), 2)
    left.plot([int(gpus) for gpus in samples], list(samples.values()), marker="o", color=plots.COLOURS["unicron"])
    left.set(xlabel="GPUs", ylabel="samples/s", xticks=[int(gpus) for gpus in samples if int(gpus) >= 32])
    left.set_ylim(bottom=0)
    left.set_title("Figure 10a: 7B, Unicron and Megatron", fontsize="medium")
    right.bar(list(ratio), list(ratio.values()), color=plots.COLOURS["unicron"], width=0.6)
    right.axhline(0.5, color="black", linestyle="--", linewidth=1)
    right.set(ylabel="FLOP/s over the peak")
    right.set_title("Figure 10b: 64 A800, Unicron and Megatron", fontsize="medium")
    for axes in (left, right):
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    plots.save(figure, path)


# --- tables ----------------------------------------------------------------------------------------------------------


def tables(lost: Mapping[str, Spread], bars: Mapping[int, Bar], ten: Mapping[str, Mapping[str, float]]) -> list[Table]:
    """Return head and rows of the table of each figure."""
    policies = list(next(iter(bars.values())).others)
    played = {gpus: bar.played for gpus, bar in bars.items()}
    names = ["detection", "plan", "services", "communicators", "states", "computed again", "iteration"]
    found: list[Table] = [
        (["figure 3b: policy", "lost FLOP/s"], [[name, one.percent()] for name, one in lost.items()]),
        (
            ["figure 9: GPUs, and left", "Unicron, s", *(f"{policy}, s" for policy in policies)],
            [
                [f"{gpus:,}, {bar.played.left:,}", _seconds(bar.unicron), *(f"{bar.others[n]:,.0f}" for n in policies)]
                for gpus, bar in bars.items()
            ],
        ),
        (
            ["Unicron's median, s", *names],
            [[f"{gpus:,}", *(f"{value:.3g}" for value in _parts(one))] for gpus, one in played.items()],
        ),
        (
            ["on the bus, GPUs", "messages", "of them commands", "kB", "values written", "largest value, kB"],
            [[f"{gpus:,}", *(f"{value:,.0f}" for value in _traffic(one))] for gpus, one in played.items()],
        ),
    ]
    for title, row in ten.items():
        found.append(([title, *row], [["Unicron and Megatron", *(f"{value:.3g}" for value in row.values())]]))
    return found


def _seconds(one: Spread) -> str:
    return f"{one.median:.1f}" + (f" ({one.least:.1f} to {one.most:.1f})" if one.least < one.most else "")


def _parts(one: Transition) -> tuple[float, ...]:
    services = one.regroup_s - one.meet_s - one.move_s
    return one.detect_s, one.plan_s, services, one.meet_s, one.move_s, one.recompute_s, one.iteration_s


def _traffic(one: Transition) -> tuple[float, ...]:
    return one.messages, one.commands, one.kilobytes, one.writes, one.largest_kilobytes
