"""Pictures of a comparison: available GPUs, WAF and accumulated WAF over time, and where the rest went."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from unicron.errors import InvalidInputError
from unicron_simulator.policies.economy import Result
from unicron_simulator.policies.traces import DAY

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "unicron": "tab:red",
    "unicron-measured": "salmon",
    "megatron": "tab:blue",
    "oobleck": "tab:green",
    "varuna": "tab:purple",
    "bamboo": "tab:orange",
    "oracle": "black",
}
PETA = 1e15


def draw(results: Mapping[str, Result], title: str, path: Path) -> None:
    """Draw all policies into a PNG or SVG file.

    Raises:
        InvalidInputError: the file can't be written.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra

    figure = Figure(figsize=(9, 9), layout="constrained")
    axes = figure.subplots(4, 1, height_ratios=[1, 2, 2, 1.5])
    first = next(iter(results.values()))
    _steps(axes[0], first, [sample.gpus for sample in first.samples], "gray", "")
    for policy, result in results.items():
        colour = COLOURS.get(policy, "gray")
        _steps(axes[1], result, [sample.waf / PETA for sample in result.samples], colour, policy)
        days = [sample.at / DAY for sample in result.samples]
        axes[2].plot(days, [each / PETA / DAY for each in accumulated(result)], color=colour, label=policy)
    axes[0].set(title=title, ylabel="GPUs")
    axes[1].set(ylabel="WAF, PFLOP/s")
    axes[2].set(ylabel="accumulated WAF,\nPFLOP/s x days", xlabel="days")
    axes[2].legend(fontsize="small", ncols=3)
    _bars(axes[3], results)
    for each in axes[:3]:
        each.set_ylim(bottom=0)
        each.grid(alpha=0.3)
    save(figure, path)


def accumulated(result: Result) -> list[float]:
    """Return the weighted FLOP earned until each sample."""
    sums = [0.0]
    for sample, following in zip(result.samples, result.samples[1:], strict=False):
        sums.append(sums[-1] + sample.waf * (following.at - sample.at))
    return sums


def save(figure: "Figure", path: Path) -> None:
    """Write a figure; the same figure gives the same file.

    Raises:
        InvalidInputError: the file can't be written.
    """
    import matplotlib as mpl  # noqa: PLC0415

    mpl.rcParams |= {"svg.hashsalt": "unicron", "svg.fonttype": "none"}
    try:
        figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    except OSError as error:
        raise InvalidInputError(f"{path}: can't be written ({error.strerror})") from error


def _steps(axes: "Axes", result: Result, values: Sequence[float], colour: str, label: str) -> None:
    days = [sample.at / DAY for sample in result.samples]
    axes.step(days, values, where="post", color=colour, linewidth=1, label=label)


def _bars(axes: "Axes", results: Mapping[str, Result]) -> None:
    """Draw what each policy lost, by cause, as a part of what it would have earned without failures."""
    names = [name for name in results if name != "oracle"]
    left = [0.0] * len(names)
    for cause, colour in (("detection", "#3182bd"), ("transition", "#9ecae1"), ("sub_healthy", "lightcoral")):
        widths = [100 * getattr(results[name], cause) / results[name].ideal for name in names]
        axes.barh(names, widths, left=left, color=colour, label=cause.replace("_", "-"))
        left = [done + more for done, more in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("lost to failures, % of the same policy without any")
    axes.legend(fontsize="small")
