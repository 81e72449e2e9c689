"""Draws the pictures of straggler.md: `python docs/straggler.py` writes docs/reference/straggler-*.svg."""

from pathlib import Path

from matplotlib.figure import Figure
from unicron_simulator import synthetic
from unicron_simulator.planting import GarbageCollection, Plant, SequenceLengths, Shape, SlowedWorker, StageImbalance
from unicron_straggler.analysis import pictures
from unicron_straggler.analysis.measures import analyze

HERE = Path(__file__).parent / "reference"
JOB = Shape(dp=16, pp=4, microbatches=8, steps=6)
PATTERNS: dict[str, list[Plant]] = {
    "a slow worker": [SlowedWorker(5, 2, 1.5)],
    "a stage with too much to do": [StageImbalance(1.5)],
    "uneven sequences": [SequenceLengths(0.6)],
    "garbage collection": [GarbageCollection(0.2, 1.0)],
}


def patterns() -> Figure:
    """Draw the workers over all steps, and of three of them, for each of four causes."""
    figure = Figure(figsize=(12, 6), layout="constrained")
    grid = figure.subplots(4, 4, gridspec_kw={"width_ratios": [1.4, 1, 1, 1]})
    for row, (title, plants) in zip(grid, PATTERNS.items(), strict=True):
        found = analyze(synthetic.make(JOB, 3, plants))
        most = float(found.step_worker_exact.max())
        for place, axes in enumerate(row):
            shown = found.worker_exact if place == 0 else found.step_worker_exact[place]
            axes.imshow(shown.T, cmap="OrRd", vmin=1, vmax=most, aspect="auto", interpolation="nearest")
            axes.set(xticks=[], yticks=[], title=f"{title}, all steps" if place == 0 else f"step {place}")
    return figure


def main() -> None:
    """Write the pictures."""
    slow = synthetic.make(Shape(dp=4, pp=4, microbatches=8, steps=3), 1, [SlowedWorker(1, 2, 1.6)], "an example")
    analysis = analyze(slow)
    for name, figure in pictures.figures(slow, analysis):
        if name == "timeline":
            figure.savefig(HERE / "straggler-timeline.svg", metadata={"Date": None})
    patterns().savefig(HERE / "straggler-patterns.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
