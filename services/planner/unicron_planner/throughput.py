"""T(t, x): the achieved aggregate FLOP/s of a task on x workers (paper section 5.1), from what is known of it."""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from unicron.contracts.base import Record
from unicron.contracts.ranges import Amount
from unicron.contracts.tasks import ModelSpec, ParallelLayout, TaskSpec
from unicron.costmodel import planning
from unicron_planner.program import Floats, Ints

ENOUGH = 20
"""Iterations at one size before their mean is trusted."""

STEADY = 0.1
"""Largest coefficient of variation of iteration times that are trusted."""

MEMORY = 200
"""Iterations after which the older ones count half, so that a single bad one is forgotten."""

NAMED = 4
"""Most sizes that a reason lists."""

MEASURED, TABLE, MODEL, LINEAR = "measured", "table", "model", "linear"

UNKNOWN_FLOPS = TaskSpec(name="", command=[]).flops_per_iteration
"""A task left at this default has not said how many FLOPs its iterations are."""


class MeasuredSize(Record, kw_only=True, frozen=True):
    """Running sums of a task's iteration times at one size.

    Attributes:
        count: iterations, the older ones counting less.
        seconds: sum of their durations.
        squares: sum of the squares of their durations.
        believed_s: the mean that the lookup table was last made with, 0 where it made no use of it.
    """

    count: Amount = 0.0
    seconds: Amount = 0.0
    squares: Amount = 0.0
    believed_s: Amount = 0.0

    @property
    def spread(self) -> float:
        """Coefficient of variation."""
        mean = self.seconds / self.count
        return math.sqrt(max(0.0, self.squares / self.count - mean * mean)) / mean

    @property
    def mean_s(self) -> float:
        """Mean seconds an iteration where they can be trusted, else 0."""
        return self.seconds / self.count if self.count >= ENOUGH and self.spread <= STEADY else 0.0


def added(measured: MeasuredSize, seconds: float) -> MeasuredSize:
    """Return `measured` with one more iteration of `seconds`."""
    keep = 0.5 if measured.count >= MEMORY else 1.0
    return MeasuredSize(
        count=measured.count * keep + 1,
        seconds=measured.seconds * keep + seconds,
        squares=measured.squares * keep + seconds * seconds,
        believed_s=measured.believed_s,
    )


def has_known_flops(spec: TaskSpec, measured: Mapping[int, MeasuredSize]) -> bool:
    """Return whether the task's FLOP/s are known at any size, by table or by measurement."""
    if spec.model is not None:
        return True
    by_time = spec.flops_per_iteration != UNKNOWN_FLOPS and any(one.mean_s for one in measured.values())
    return bool(spec.throughput) or by_time


class Estimate(NamedTuple):
    """T(t, x) for each feasible x.

    Attributes:
        sizes: x, ascending.
        flops: T(t, x) in FLOP/s.
        sources: MEASURED, TABLE, MODEL or LINEAR for each.
        curve: the closed-form model's at these sizes, None without a model.
    """

    sizes: Ints
    flops: Floats
    sources: list[str]
    curve: planning.Curve | None


def estimate(spec: TaskSpec, measured: Mapping[int, MeasuredSize], limit: int, nominal: float) -> Estimate:
    """Return T(t, x) in FLOP/s for each feasible x up to `limit`.

    In order of preference:

    1. where iterations were measured at this size: `flops_per_iteration` over their mean seconds;
    2. the user's table: between two rows a straight line, beyond the first or the last the same FLOP/s per worker as
       there. If other sizes were measured, the table is scaled by what the nearest of them achieved of it: the median
       of three, where there are as many, so that one bad measurement moves nothing but its own size;
    3. the closed-form model of a 3D-parallel job, scaled likewise;
    4. proportional to x: with the FLOP/s per worker of the nearest measured size, else `nominal`.

    A task that did not say its `flops_per_iteration` has no FLOP/s to measure: its iteration times then only shape the
    curve, and the size measured most often stands where the table, the model, or `nominal`, puts it.

    Args:
        spec: the task.
        measured: iteration times by size.
        limit: largest size of interest.
        nominal: FLOP/s that a worker is taken to achieve in a task about which nothing is known.
    """
    sizes, curve = _feasible(spec, limit)
    modelled = _modelled(spec, sizes, curve, nominal)
    sources = [TABLE if spec.throughput else LINEAR if curve is None else MODEL] * len(sizes)
    seconds = {size: one.mean_s for size, one in sorted(measured.items()) if one.mean_s and size in sizes}
    if not seconds:
        return Estimate(sizes, modelled, sources, curve)
    anchors = np.array(list(seconds), np.int64)
    expected = modelled[np.searchsorted(sizes, anchors)]
    flops = spec.flops_per_iteration
    if flops == UNKNOWN_FLOPS:
        usual = max(seconds, key=lambda size: (measured[size].count, -size))
        flops = seconds[usual] * float(expected[anchors == usual][0])
    achieved = flops / np.array(list(seconds.values()))
    near = np.abs(sizes[:, None] - anchors[None, :]).argsort(axis=1, kind="stable")[:, : 3 if len(anchors) > 2 else 1]
    nearest = near[:, 0]
    exact = sizes == anchors[nearest]
    sources = [MEASURED if hit else source for hit, source in zip(exact.tolist(), sources, strict=True)]
    scaled: Floats = modelled * planning.scale((achieved / expected)[near])
    return Estimate(sizes, np.where(exact, achieved[nearest], scaled), sources, curve)


def check(spec: TaskSpec) -> None:
    """Raise where nothing can be worked out for the task at any size.

    Raises:
        InvalidInputError: its model names what is not known, or its anchor can't be run.
    """
    if spec.model is not None:
        _model_curve(spec, spec.model, max(spec.min_workers, spec.model.anchor_workers))


def least(spec: TaskSpec) -> tuple[int, str]:
    """Return T_necessary, the fewest workers with which the task can run; 0 and the reason where it never can."""
    sizes = _feasible(spec, spec.max_workers)[0]
    if len(sizes):
        return int(sizes[0]), ""
    may = f"it may have {spec.min_workers} to {spec.max_workers} workers in multiples of {spec.unit}"
    if spec.layouts:
        may += f" for which there is a layout: {_listed(spec.sizes)}"
    return 0, f"no size is feasible: {may}; {_obstacle(spec)}"


def _obstacle(spec: TaskSpec) -> str:
    if spec.model is None:
        return "there is no such multiple"
    if spec.layouts:  # the largest is the likeliest to fit
        return planning.why_not(spec.model, spec.sizes[-1], spec.shape(spec.sizes[-1]))
    return planning.shortage(spec.model, spec.max_workers) or planning.why_not(spec.model, spec.max_workers)


def _listed(sizes: Sequence[int]) -> str:
    named = ", ".join(map(str, sizes[:NAMED]))
    return f"{named} and {len(sizes) - NAMED} more" if len(sizes) > NAMED else named


def _feasible(spec: TaskSpec, limit: int) -> tuple[Ints, planning.Curve | None]:
    """Return the sizes up to `limit` that the task may have and its model allows, and the model's curve there."""
    allowed = spec.sizes
    sizes = (
        np.arange(allowed.start, allowed.stop, allowed.step, dtype=np.int64)
        if isinstance(allowed, range)
        else np.array(allowed, np.int64)
    )
    sizes = sizes[sizes <= limit]
    if spec.model is None:
        return sizes, None
    most = spec.max_workers if limit >= spec.max_workers else 1 << (limit - 1).bit_length()
    curve = _model_curve(spec, spec.model, most)
    _, _, at = np.intersect1d(sizes, curve.sizes, assume_unique=True, return_indices=True)
    return curve.sizes[at], planning.Curve(curve.sizes[at], curve.flops[at], curve.seconds[at], curve.choices[at])


def _model_curve(spec: TaskSpec, model: ModelSpec, most: int) -> planning.Curve:
    """Return the model's curve up to `most`: at each size of the shape that the task has there, if it declares any."""
    if spec.layouts:  # all of them: the anchor was measured in one, which may be larger
        return _curve_of(model, tuple((size, spec.shape(size)) for size in sorted(spec.layouts)))
    return _curve(model, most, spec.layout.with_workers(0))


@lru_cache(maxsize=1024)
def _curve(model: ModelSpec, most: int, shape: ParallelLayout) -> planning.Curve:
    """Return the model's curve, of any shape of a replica where the task declares none."""
    return planning.curve(model, most, shape if shape.replica_workers > 1 else None)


@lru_cache(maxsize=1024)
def _curve_of(model: ModelSpec, layouts: tuple[tuple[int, ParallelLayout], ...]) -> planning.Curve:
    return planning.curve_of(model, dict(layouts))


def _modelled(spec: TaskSpec, sizes: Ints, curve: planning.Curve | None, nominal: float) -> Floats:
    """Return the user's table, the closed-form model, or a straight line, at `sizes`."""
    if not spec.throughput:
        return nominal * sizes.astype(np.float64) if curve is None else curve.flops
    rows = np.array(sorted(spec.throughput), np.int64)
    flops = np.array([spec.throughput[int(row)] for row in rows], np.float64)
    inside = np.interp(sizes, rows, flops)
    beyond: Floats = np.where(sizes < rows[0], flops[0] / rows[0], flops[-1] / rows[-1]) * sizes
    return np.where((sizes < rows[0]) | (sizes > rows[-1]), beyond, inside)
