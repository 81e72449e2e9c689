"""Draws the curve of a task into a file, with matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from unicron.contracts.answers import Curve, CurvePoint
from unicron.errors import InvalidInputError, UnicronError
from unicron_cli.planviews import weighted, worth

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg")
"""Suffixes of the file that can be written."""

MARKS = {
    "measured": ("o", "tab:green"),
    "table": ("s", "tab:blue"),
    "model": ("^", "tab:orange"),
    "linear": (".", "gray"),
}
"""Marker and colour of each source of T(t, x)."""

WITHOUT = "needs matplotlib, which is not installed: pip install '.[plot]'"


def check_path(path: Path) -> None:
    """Check that a picture can be written to `path`, before anything else is done.

    Raises:
        InvalidInputError: the name has another ending than .png or .svg, or the folder isn't there.
        UnicronError: matplotlib is not installed.
    """
    if path.suffix.lower() not in FORMATS:
        raise InvalidInputError(f"--plot {path}: the name has to end in {' or '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise InvalidInputError(f"--plot {path}: there is no folder {path.parent}; make it first")
    try:
        import matplotlib as mpl  # noqa: PLC0415 - an extra, and slow to import
    except ImportError as error:
        raise UnicronError(f"--plot {WITHOUT}") from error
    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "unicron"  # the same curve gives the same file


def draw_curve(curve: Curve, path: Path) -> None:
    """Write T(t, x) and F(t, x), and below them FLOP/s per worker, over x to `path` (PNG or SVG).

    Raises:
        InvalidInputError: there is nothing to draw, or `path` can't be written.
        UnicronError: matplotlib is not installed.
    """
    check_path(path)
    points = [point for point in curve.points if point.workers > 0]
    if not points:
        raise InvalidInputError(f"{curve.task}: no size is feasible, so there is nothing to draw")
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(8, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    if weighted(curve):
        xs = [point.workers for point in points]
        upper.plot(xs, [point.waf for point in points], color="tab:purple", linestyle="--", label="F(t, x), weighted")
    _fill(upper, curve, points, [point.flops for point in points])
    _fill(lower, curve, points, [point.flops / point.workers for point in points])
    unit = "FLOP/s" if worth(curve) else "throughput, unit unknown"
    upper.set(title=f"{curve.task}: throughput over workers", ylabel=f"T(t, x), {unit}")
    lower.set(xlabel="workers x", ylabel=f"{unit} per worker")
    upper.legend(fontsize="small")
    try:
        figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    except OSError as error:
        raise InvalidInputError(f"--plot {path}: can't be written ({error.strerror})") from error


def _fill(axes: "Axes", curve: Curve, points: Sequence[CurvePoint], values: Sequence[float]) -> None:
    """Draw `values` over the sizes of `points`, marked by source, with a line at the held size."""
    from matplotlib.ticker import EngFormatter, MaxNLocator  # noqa: PLC0415

    axes.plot([point.workers for point in points], values, color="lightgray", zorder=1)
    for source, (marker, colour) in MARKS.items():
        own = [(point.workers, value) for point, value in zip(points, values, strict=True) if point.source == source]
        if own:
            xs, ys = zip(*own, strict=True)
            axes.scatter(xs, ys, s=24, marker=marker, color=colour, zorder=2, label=source)
    if curve.held:
        axes.axvline(curve.held, color="tab:red", linewidth=1, linestyle=":", label=f"holds {curve.held}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(EngFormatter())
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
