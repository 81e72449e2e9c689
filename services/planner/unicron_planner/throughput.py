"""T(t, x): the achieved aggregate FLOP/s of a task on x workers (paper section 5.1), from what is known of it."""

import math
from collections.abc import Mapping

import numpy as np

from unicron.contracts.base import Record
from unicron.contracts.tasks import TaskSpec
from unicron_planner.program import Floats, Ints

ENOUGH = 20
"""Iterations at one size before their mean is trusted."""

STEADY = 0.1
"""Largest coefficient of variation of iteration times that are trusted."""

MEMORY = 200
"""Iterations after which the older ones count half, so that a single bad one is forgotten."""

UNKNOWN_FLOPS = TaskSpec(name="", command=[]).flops_per_iteration
"""A task left at this default has not said how many FLOPs its iterations are."""


class Measured(Record, kw_only=True, frozen=True):
    """Running sums of a task's iteration times at one size.

    Attributes:
        count: iterations, the older ones counting less.
        seconds: sum of their durations.
        squares: sum of the squares of their durations.
        believed_s: the mean that the lookup table was last made with, 0 where it made no use of it.
    """

    count: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0
    believed_s: float = 0.0

    @property
    def mean_s(self) -> float:
        """Mean seconds an iteration where they can be trusted, else 0."""
        if self.count < ENOUGH:
            return 0.0
        mean = self.seconds / self.count
        variance = max(0.0, self.squares / self.count - mean * mean)
        return mean if math.sqrt(variance) <= STEADY * mean else 0.0


def added(measured: Measured, seconds: float) -> Measured:
    """Return `measured` with one more iteration of `seconds`."""
    keep = 0.5 if measured.count >= MEMORY else 1.0
    return Measured(
        count=measured.count * keep + 1,
        seconds=measured.seconds * keep + seconds,
        squares=measured.squares * keep + seconds * seconds,
        believed_s=measured.believed_s,
    )


def known(spec: TaskSpec, measured: Mapping[int, Measured]) -> bool:
    """Return whether the task's FLOP/s are known at any size, by table or by measurement."""
    by_time = spec.flops_per_iteration != UNKNOWN_FLOPS and any(one.mean_s for one in measured.values())
    return bool(spec.throughput) or by_time


def rates(spec: TaskSpec, measured: Mapping[int, Measured], sizes: Ints, nominal: float) -> Floats:
    """Return T(t, x) in FLOP/s for each x in `sizes`.

    In order of preference:

    1. where iterations were measured at this size: `flops_per_iteration` over their mean seconds;
    2. the user's table: between two rows a straight line, beyond the first or the last the same FLOP/s per worker as
       there. If another size was measured, the table is scaled by what the nearest such size achieved of it;
    3. proportional to x: with the FLOP/s per worker of the nearest measured size, else `nominal`.

    A task that did not say its `flops_per_iteration` has no FLOP/s to measure: its iteration times then only shape the
    curve, and the size measured most often stands where the table, or `nominal`, puts it.

    Args:
        spec: the task.
        measured: iteration times by size.
        sizes: worker counts, ascending.
        nominal: FLOP/s that a worker is taken to achieve in a task about which nothing is known.
    """
    modelled = _model(spec, sizes, nominal)
    seconds = {size: one.mean_s for size, one in sorted(measured.items()) if one.mean_s and size > 0}
    if not seconds:
        return modelled
    anchors = np.array(list(seconds), np.int64)
    expected = _model(spec, anchors, nominal)
    flops = spec.flops_per_iteration
    if flops == UNKNOWN_FLOPS:
        usual = max(seconds, key=lambda size: (measured[size].count, -size))
        flops = seconds[usual] * float(expected[anchors == usual][0])
    achieved = flops / np.array(list(seconds.values()))
    nearest = np.abs(sizes[:, None] - anchors[None, :]).argmin(axis=1)
    scaled: Floats = modelled * (achieved / expected)[nearest]
    return np.where(sizes == anchors[nearest], achieved[nearest], scaled)


def _model(spec: TaskSpec, sizes: Ints, nominal: float) -> Floats:
    """Return the user's table, or a straight line, at `sizes`."""
    if not spec.throughput:
        return nominal * sizes.astype(np.float64)
    rows = np.array(sorted(spec.throughput), np.int64)
    flops = np.array([spec.throughput[int(row)] for row in rows], np.float64)
    inside = np.interp(sizes, rows, flops)
    beyond: Floats = np.where(sizes < rows[0], flops[0] / rows[0], flops[-1] / rows[-1]) * sizes
    return np.where((sizes < rows[0]) | (sizes > rows[-1]), beyond, inside)
