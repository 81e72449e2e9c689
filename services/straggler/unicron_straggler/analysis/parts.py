"""Parts of compute times: stage, worker, content of the microbatch, pauses; and the times without some of them.

A forward or backward takes the time of its stage, times how slow its worker is, times how much there is to compute in
its microbatch (which all stages feel, forward and backward alike), plus a pause now and then. Each part is estimated
from medians, so that the others leave it alone; where half of what is compared is slow, the lower half is the measure.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unicron_straggler.analysis.measures import Analysis
from unicron_straggler.analysis.trace import COMMUNICATION, Floats, Integers

SLOW, STAGE, LENGTHS, PAUSES, NETWORK = (
    "slow-worker",
    "stage-imbalance",
    "sequence-length-imbalance",
    "garbage-collection",
    "communication",
)
COMPUTES = ("forward-compute", "backward-compute")

VARIES = 0.04
"""Least variation of forward times within a worker (standard deviation as the quartiles have it, median of workers)
that can be lengths. In the study's job with one slow worker it is 0.017, in the one with uneven lengths 0.09."""
TOGETHER = 0.8
"""Least correlation of forward and backward within a worker (median of workers) that can be lengths."""
LEAST_SLOW = 0.05
"""A worker is slow, and a stage uneven, from this much on."""
LEAST_PAUSE = 0.15
"""A pause is at least this share of the operation it is in."""
CLEAR = 6.0
"""Standard deviations of the noise beyond which a deviation counts."""
SELDOM = 0.15
"""A worker more of whose operations than this are far too long is slow, and does not pause."""

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class TimeParts:
    """The parts of the compute times. Axes: forward and backward, steps, microbatches, stages, data-parallel ranks.

    Where a stage has several model chunks, each is a stage here: the chunks of a stage follow one another.

    Attributes:
        pp: stages, chunks not counted.
        times: seconds.
        places: (2, microbatches, stages) place in the order of the trace.
        stages: (2, 1, 1, stages, 1) mean seconds with slow workers and pauses taken out.
        slowness: (2, steps, 1, stages, dp) logarithm of how much longer slow workers take than others of their stage.
        content: logarithm of how much longer a microbatch takes than the mean one; all 0 where lengths look even.
        pauses: seconds that pauses add.
        variation: standard deviation of the logarithm of forward times within a worker, by the quartiles; median of the
            workers.
        together: correlation of forward and backward within a worker, by the quartiles; median of the workers.
    """

    pp: int
    times: Floats
    places: Integers
    stages: Floats
    slowness: Floats
    content: Floats
    pauses: Floats
    variation: float
    together: float


def parts(analysis: Analysis) -> TimeParts:
    """Take the compute times of a job apart."""
    places = _places(analysis)
    times = np.stack([_by_microbatch(analysis.durations[op], places[at]) for at, op in enumerate(COMPUTES)])
    times = np.maximum(times, np.finfo(np.float32).tiny, dtype=np.float64)
    chunks = times.shape[3] // analysis.meta.pp_size
    logs = np.log(times)  # in which parts that multiply are added
    usual = np.median(logs, axis=(1, 2), keepdims=True)  # of each worker, forward and backward
    level = _lower_median(usual, axis=4)  # of each stage
    logs, usual = logs - level, usual - level
    own = logs - usual
    spread = _deviation(own, (1, 2, 4))
    variation, together = _together(own)
    content = np.zeros_like(own)
    if variation >= VARIES and together >= TOGETHER:
        if times.shape[3] > chunks:  # a rank all of whose stages take longer has had longer sequences
            own += _lower_median(usual, axis=3)
        content = _content(own, spread)
    left = logs - content
    usual = np.median(left, axis=(1, 2), keepdims=True)
    noise = _deviation(left - usual, (1, 2, 4))
    pauses = _pauses(times, left - usual, noise)
    left = np.where(pauses > 0, usual, left)
    slowness = _slowness(left, noise if times.shape[3] > chunks else spread, chunks, lengths=bool(content.any()))
    clean = (times - pauses) * np.exp(-slowness)
    content -= np.log(np.exp(content).mean(axis=(1, 2, 4), keepdims=True))
    stages = clean.mean(axis=(1, 2, 4), keepdims=True)
    pp = analysis.meta.pp_size
    return TimeParts(pp, times, places, stages, slowness, content, pauses, variation, together)


def without(analysis: Analysis, found: TimeParts, causes: Collection[str]) -> dict[str, Floats]:
    """Return all durations, as `Analysis.durations`, with the causes taken away as their cures would."""
    durations = dict(analysis.durations)
    times, pauses = found.times - found.pauses, found.pauses
    if SLOW in causes:
        times = times * np.exp(-found.slowness)
    if LENGTHS in causes:
        times = times * np.exp(-found.content)
    if STAGE in causes:
        times = times * (found.stages.mean(axis=3, keepdims=True) / found.stages)
    if PAUSES in causes:
        if "gc" in durations:  # all at once, at the end of the step, as often as now
            paused = pauses.sum(axis=(0, 2, 3)).mean() / analysis.meta.pp_size
            durations["gc"] = np.full_like(durations["gc"], np.nanmean(durations["gc"]) + paused)
        pauses = np.zeros_like(pauses)
    durations |= in_order(found, times + pauses)
    if NETWORK in causes:
        for op in COMMUNICATION & durations.keys():
            durations[op] = np.full_like(durations[op], analysis.ideal_values[op])
    return durations


def in_order(found: TimeParts, times: Floats) -> dict[str, Floats]:
    """Return compute times, shaped as those in `found`, as they are in `Analysis.durations`."""
    durations = {}
    _, count, stages = found.places.shape
    chunks = stages // found.pp
    for at, op in enumerate(COMPUTES):
        ordered = np.empty((times.shape[1], count * chunks, found.pp, times.shape[4]))
        ordered[:, found.places[at], (np.arange(stages) // chunks)[None, :]] = times[at]
        durations[op] = ordered
    return durations


def _places(analysis: Analysis) -> Integers:
    """Return where each microbatch of each chunk is in the order of the trace; chunks as in the forward."""
    pp, count = analysis.computes.shape[0], analysis.durations[COMPUTES[0]].shape[1]
    each = np.empty((2, count, pp), dtype=int)
    kinds = np.sort(np.unique(analysis.computes[:, :, 0]))
    for at, code in enumerate(kinds):
        for stage in range(pp):
            mine = analysis.computes[stage][analysis.computes[stage][:, 0] == code]
            each[at, :, stage] = mine[np.lexsort((mine[:, 1], mine[:, 2])), 1]
    chunks = max(1, analysis.meta.vpp_size)
    if count % chunks:
        chunks = 1
    return each.reshape(2, count // chunks, chunks, pp).transpose(0, 1, 3, 2).reshape(2, count // chunks, -1)


def _by_microbatch(durations: Floats, places: Integers) -> Floats:
    """Return (steps, microbatches, stages and chunks, dp)."""
    stages = np.arange(places.shape[1]) // (places.shape[1] // durations.shape[2])
    return durations[:, places, stages[None, :]]


def _lower_median(values: Floats, axis: int) -> Floats:
    count = values.shape[axis]
    return np.asarray(np.take(np.sort(values, axis=axis), [(count - 1) // 2], axis=axis))


def _deviation(values: Floats, axes: tuple[int, ...]) -> Floats:
    """Return the standard deviation, estimated from the quartiles: the few that are far off don't count."""
    low, high = np.quantile(values, (0.25, 0.75), axis=axes, keepdims=True)
    return np.asarray(np.maximum((high - low) / 1.349, 1e-4))


def _together(own: Floats) -> tuple[float, float]:
    """Return how much forward varies within a worker, and how much backward goes with it: medians of the workers.

    Both come from quartiles, so that pauses in some forwards don't hide how much the others have in common.
    """
    deviation = _deviation(own, (1, 2))
    forward, backward = own / deviation
    sums, differences = (_deviation(each, (0, 1)) ** 2 for each in (forward + backward, forward - backward))
    return float(np.median(deviation[0])), float(np.median((sums - differences) / (sums + differences)))


def _content(own: Floats, spread: Floats) -> Floats:
    """Return how much longer each microbatch takes by what most of its operations say."""
    scaled = (own / spread).transpose(1, 2, 4, 0, 3)
    said = _lower_median(scaled.reshape(*scaled.shape[:3], -1), axis=3)[..., 0]
    return spread * said[None, :, :, None, :]


def _slowness(left: Floats, noise: Floats, chunks: int, *, lengths: bool) -> Floats:
    """Return by how much workers are slower than their stage's usual one, in each step; 0 where that may be chance."""
    _, steps, count, places, dp = left.shape
    by_stage = left.reshape(2, steps, count, places // chunks, chunks, dp)
    slow = by_stage.mean(axis=(2, 4))  # (2, steps, stages, dp)
    if lengths and places == chunks:  # one stage: a step of long sequences looks like a slow one
        slow = np.repeat(slow.mean(axis=1, keepdims=True), steps, axis=1)
    slow -= _lower_median(slow, axis=3)
    chance = 1.25 * float(np.sqrt((noise**2).mean())) / np.sqrt(steps * count)
    clear = slow.mean(axis=(0, 1)) > max(LEAST_SLOW, CLEAR * chance)
    slow = np.where(clear, np.maximum(slow, 0), 0)
    return np.repeat(slow, chunks, axis=2)[:, :, None]


def _pauses(times: Floats, left: Floats, noise: Floats) -> Floats:
    """Return the seconds that an operation takes longer than one would think, where that is seldom and much."""
    long = left > np.maximum(CLEAR * noise, np.log1p(LEAST_PAUSE))
    long &= long.mean(axis=(0, 1, 2), keepdims=True) < SELDOM
    return np.where(long, times * -np.expm1(-left), 0)
