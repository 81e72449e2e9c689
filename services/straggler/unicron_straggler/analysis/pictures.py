"""Pictures of an analysis: heat maps of the workers, over all steps and of each, and a step as traced against ideal."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from unicron.errors import InvalidInputError, UnicronError
from unicron_straggler.analysis.measures import Analysis
from unicron_straggler.analysis.trace import CODES, OPTYPES, Floats, Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

FORMATS = ("svg", "png")

MOST_STEPS = 24
"""Steps that have a heat map of their own; of more, the slowest and others evenly chosen."""
MOST_NUMBERED = 64
"""Workers up to which each cell shows its number."""
LEAST_SCALE = 1.1
"""The colours reach up to this slowdown at least, so that noise does not look like a straggler."""

KINDS = {
    "forward": ("forward-compute", "tab:blue"),
    "backward": ("backward-compute", "tab:green"),
    "gather parameters": ("params-all-gather", "tab:purple"),
    "reduce gradients": ("grads-reduce-scatter", "tab:orange"),
    "garbage collection": ("gc", "tab:red"),
    "optimizer": ("optimizer", "tab:brown"),
}
"""Bars of a timeline, op type and colour; transfers between stages would hide the rest."""

Bars = dict[str, list[list[tuple[float, float]]]]
"""For each kind, for each stage: start and length of each operation, in seconds."""


def draw(trace: Trace, analysis: Analysis, folder: Path) -> list[Path]:
    """Write workers, steps and timeline into a folder, each as SVG and PNG; return what was written.

    Raises:
        InvalidInputError: a file can't be written.
        UnicronError: matplotlib is not installed.
    """
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, figure in figures(trace, analysis):
            for suffix in FORMATS:
                written.append(folder / f"{name}.{suffix}")
                figure.savefig(written[-1], metadata={"Date": None} if suffix == "svg" else None, dpi=120)
    except OSError as error:
        raise InvalidInputError(f"{folder}: pictures can't be written there ({error.strerror})") from error
    return written


def figures(trace: Trace, analysis: Analysis) -> "Iterator[tuple[str, Figure]]":
    """Draw all pictures; the same analysis gives the same ones.

    Raises:
        UnicronError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl  # noqa: PLC0415 - an extra, and slow to import
    except ImportError as error:
        raise UnicronError("pictures need matplotlib, which is not installed: pip install '.[plot]'") from error
    mpl.use("Agg")
    mpl.rcParams |= {"svg.hashsalt": "unicron", "svg.fonttype": "none"}
    yield "workers", workers(analysis)
    yield "steps", steps(analysis)
    yield "timeline", timeline(trace, analysis)


def workers(analysis: Analysis) -> "Figure":
    """Draw the slowdown of each worker: data-parallel ranks across, stages down."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    dp, pp = analysis.worker_exact.shape
    width = float(np.clip(0.7 * dp, 6, 16))
    figure = Figure(figsize=(width, float(np.clip(0.6 * pp, 0.8, 8)) + 1.6), layout="constrained")
    axes = figure.subplots()
    image = _heat(axes, analysis.worker_exact, _scale(analysis.worker_exact))
    axes.set(xlabel="data-parallel rank", ylabel="stage")
    axes.set_title(f"{analysis.meta.name}: slowdown with one worker as it is, all others ideal")
    _number(axes, analysis)
    if dp * pp <= MOST_NUMBERED:
        for at in np.ndindex(dp, pp):
            value = analysis.worker_exact[at]
            dark = value > 1 + 0.6 * (image.get_clim()[1] - 1)
            axes.text(
                at[0], at[1], f"{value:.2f}", ha="center", va="center", color="white" if dark else "black", fontsize=8
            )
    figure.colorbar(image, ax=axes, label="slowdown")
    return figure


def steps(analysis: Analysis) -> "Figure":
    """Draw each step's slowdown, and below the workers of up to 24 steps."""
    from matplotlib.figure import Figure  # noqa: PLC0415
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    chosen = choose_steps(analysis)
    columns = min(6, len(chosen))
    rows = -(-len(chosen) // columns)
    figure = Figure(figsize=(12, 2.6 + 1.3 * rows), layout="constrained")
    above, below = np.ravel(figure.subfigures(2, 1, height_ratios=[2.4, 1.3 * rows], squeeze=False))
    axes = above.subplots()
    axes.bar(range(len(analysis.steps)), analysis.step_slowdown - 1, bottom=1, color="lightgray")
    axes.bar(chosen, analysis.step_slowdown[chosen] - 1, bottom=1, color="tab:blue", label="shown below")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(title=f"{analysis.meta.name}: slowdown of each step", xlabel="step, in order", ylabel="slowdown")
    axes.legend(fontsize="small")
    scale = _scale(analysis.step_worker_exact)
    grid = below.subplots(rows, columns, squeeze=False)
    image = None
    for place, each in enumerate(grid.ravel()):
        each.set_axis_off()
        if place < len(chosen):
            step = chosen[place]
            image = _heat(each, analysis.step_worker_exact[step], scale)
            each.set_title(f"step {analysis.steps[step]}: {analysis.step_slowdown[step]:.2f}", fontsize="small")
    if image is not None:
        below.colorbar(image, ax=grid, label="slowdown of a worker")
    return figure


def choose_steps(analysis: Analysis) -> list[int]:
    """Return the places of the steps that are drawn one by one, rising: the slowest is among them."""
    count = len(analysis.steps)
    if count <= MOST_STEPS:
        return list(range(count))
    evenly = np.linspace(0, count - 1, MOST_STEPS - 1).round().astype(int).tolist()
    return sorted({*evenly, int(analysis.step_slowdown.argmax())})


def timeline(trace: Trace, analysis: Analysis) -> "Figure":
    """Draw the stages of the slowest data-parallel rank in the slowest step, as traced and as ideal."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    step = int(analysis.step_slowdown.argmax())
    dp = int(analysis.step_by_dp[step].argmax())
    rank, number, pp = analysis.dp_ranks[dp], analysis.steps[step], analysis.meta.pp_size
    figure = Figure(figsize=(14, 2.4 + 0.9 * pp), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    took, ideal = analysis.step_traced_s[step], analysis.step_ideal_s
    _bars(upper, traced_bars(trace, int(number), int(rank)), pp)
    _bars(lower, ideal_bars(analysis), pp)
    title = f"{analysis.meta.name}, step {number}, data-parallel rank {rank} (the slowest)"
    upper.set_title(f"{title}: as traced, {took:.3g} s")
    lower.set_title(f"ideal: {ideal:.3g} s")
    lower.set(xlabel="seconds", xlim=(0, max(took, ideal)))
    upper.axvline(ideal, color="black", linestyle=":", linewidth=1)
    figure.legend(*lower.get_legend_handles_labels(), ncols=len(KINDS), fontsize="small", loc="outside lower center")
    return figure


def traced_bars(trace: Trace, step: int, dp_rank: int) -> Bars:
    """Return what the stages of a data-parallel rank did in a step."""
    here = (trace.step == step) & (trace.dp_rank == dp_rank)
    optype, stage, start, duration = (
        column[here] for column in (trace.optype, trace.stage, trace.start, trace.duration)
    )
    found: Bars = {}
    for kind, (name, _) in KINDS.items():
        found[kind] = []
        for at in range(trace.meta.pp_size):
            mine = (optype == CODES[name]) & (stage == at)
            found[kind].append(list(zip(start[mine].tolist(), duration[mine].tolist(), strict=True)))
    return found


def ideal_bars(analysis: Analysis) -> Bars:
    """Return what each stage would do in a step in which every operation takes its ideal time."""
    kinds = {name: kind for kind, (name, _) in KINDS.items()}
    found: Bars = {kind: [[] for _ in range(analysis.meta.pp_size)] for kind in KINDS}
    ends: dict[int, float] = {}
    for wave in analysis.graph.waves:
        start = max((ends[wait] for wait in wave.waits), default=0.0)
        for place in wave.members:
            code, _, stage = analysis.graph.keys[place]
            seconds = analysis.ideal_values[OPTYPES[code]]
            ends[place] = start + seconds
            if OPTYPES[code] in kinds:
                found[kinds[OPTYPES[code]]][stage].append((start, seconds))
    return found


def _bars(axes: "Axes", bars: Bars, pp: int) -> None:
    for kind, (_, colour) in KINDS.items():
        for stage, spans in enumerate(bars[kind]):
            label = kind if stage == 0 else None
            axes.broken_barh(spans, (stage - 0.4, 0.8), facecolor=colour, edgecolor="white", linewidth=0.3, label=label)
    axes.set(ylabel="stage", yticks=range(pp), ylim=(pp - 0.5, -0.5))


def _scale(slowdowns: Floats) -> float:
    return max(LEAST_SCALE, float(np.nanmax(slowdowns)))


def _heat(axes: "Axes", slowdowns: Floats, most: float) -> "AxesImage":
    return axes.imshow(slowdowns.T, cmap="OrRd", vmin=1, vmax=most, aspect="auto", interpolation="nearest")


def _number(axes: "Axes", analysis: Analysis) -> None:
    """Number the ticks by rank and stage; every so many where there is no room."""
    dp, pp = analysis.worker_exact.shape
    for axis, count, names in ((axes.xaxis, dp, analysis.dp_ranks), (axes.yaxis, pp, np.arange(pp))):
        places = np.arange(0, count, max(1, -(-count // 32)))
        axis.set_ticks(places, [str(names[place]) for place in places])
