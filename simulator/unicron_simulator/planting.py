"""Durations of the operations of a job made up, and the causes of slowness that can be planted in them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from unicron_straggler.analysis.trace import Floats

FORWARD_S = 0.2
BACKWARD_S = 0.4
TOKENS = 32768
"""A microbatch is packed with sequences up to this length, as in the study's long-context jobs."""

ONCE = {
    "gc": 0.0,
    "layernorm-grads-all-reduce": 0.002,
    "embedding-grads-all-reduce": 0.02,
    "params-all-gather": 0.05,
    "grads-reduce-scatter": 0.1,
    "optimizer-clip-main-grad": 0.005,
    "optimizer": 0.02,
}
"""Seconds of what happens once in a step."""

TRANSFERS = ("forward-send", "forward-recv", "backward-send", "backward-recv")
TRANSFER_S = 0.002

Times = Mapping[str, Floats]
"""Seconds by op type over (operations of a step, stages, steps, data-parallel ranks); of communication, to transfer."""


@dataclass(frozen=True)
class Shape:
    """The size of a job: data-parallel ranks, pipeline stages, microbatches a step and steps."""

    dp: int
    pp: int
    microbatches: int
    steps: int
    noise: float = 0.015
    """Spread of compute times, as a share; communication has seven times as much. Workers differ by 1 % besides."""


@dataclass(frozen=True)
class SlowedWorker:
    """One worker computes `factor` times as long, in `share` of the steps."""

    dp_rank: int
    stage: int
    factor: float
    share: float = 1.0


@dataclass(frozen=True)
class StageImbalance:
    """One stage (the last, where the loss is computed) computes `factor` times as long."""

    factor: float
    stage: int = -1


@dataclass(frozen=True)
class SequenceLengths:
    """Microbatches are packed with sequences of a long-tailed length.

    Attributes:
        quadratic: share of the mean time that grows with the sum of the squares of the lengths (attention).
        spread: standard deviation of the logarithm of the lengths.
    """

    quadratic: float
    spread: float = 1.3


@dataclass(frozen=True)
class GarbageCollection:
    """Each worker stops for `pause_s` once in a step with probability `rate`, each on its own time.

    The pause lengthens a forward operation: Python starts those, but not the backward ones. With `recorded` it is
    an operation of its own at the end of the step.
    """

    rate: float
    pause_s: float
    recorded: bool = False


@dataclass(frozen=True)
class Communication:
    """Transfers take `delay_s` longer.

    Attributes:
        delay_s: seconds, give or take a fifth.
        share: of the transfers that are hit.
        link: data-parallel rank and stage of a link to the stage after it that all hit transfers go over; None: any.
        collective: the collectives over data-parallel ranks are hit in `share` of the steps, instead of transfers
            between stages.
    """

    delay_s: float
    share: float
    link: tuple[int, int] | None = None
    collective: bool = False


Plant = SlowedWorker | StageImbalance | SequenceLengths | GarbageCollection | Communication


def draw(shape: Shape, seed: int, plants: Sequence[Plant] = ()) -> dict[str, Floats]:
    """Draw the durations of a job, and plant causes in them."""
    base, *streams = (np.random.default_rng(each) for each in np.random.SeedSequence(seed).spawn(6))
    times = _healthy(shape, base)
    kinds = (StageImbalance, SequenceLengths, SlowedWorker, GarbageCollection, Communication)  # pauses come on top
    for plant in sorted(plants, key=lambda plant: kinds.index(type(plant))):
        random = streams[kinds.index(type(plant))]
        match plant:
            case StageImbalance():
                for optype in ("forward-compute", "backward-compute"):
                    times[optype][:, plant.stage] *= plant.factor
            case SlowedWorker():
                slow = np.where(_some(shape.steps, plant.share, random), plant.factor, 1.0)
                for optype in ("forward-compute", "backward-compute"):
                    times[optype][:, plant.stage, :, plant.dp_rank] *= slow
            case SequenceLengths():
                _lengths(times, shape, plant, random)
            case GarbageCollection():
                _pauses(times, shape, plant, random)
            case Communication():
                _delays(times, shape, plant, random)
    return times


def _healthy(shape: Shape, random: np.random.Generator) -> dict[str, Floats]:
    """Draw a job with noise alone; that of compute has heavy tails (Student's t with 4 degrees of freedom)."""
    count = shape.microbatches

    def computes() -> Floats:
        tails = random.standard_t(4, (count, shape.pp, shape.steps, shape.dp))
        return np.asarray(np.exp(shape.noise * np.clip(tails, -20, 20)) * workers)

    def transfers(number: int) -> Floats:
        return np.exp(random.normal(0, 7 * shape.noise, (number, shape.pp, shape.steps, shape.dp)))

    workers = np.exp(random.normal(0, 0.01, (shape.pp, 1, shape.dp)))
    times = {"forward-compute": FORWARD_S * computes(), "backward-compute": BACKWARD_S * computes()}
    times |= {optype: TRANSFER_S * transfers(count) for optype in TRANSFERS}
    return times | {optype: seconds * transfers(1) for optype, seconds in ONCE.items()}


def _some(count: int, share: float, random: np.random.Generator) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Pick that share of `count`, one at least."""
    chosen = np.zeros(count, dtype=bool)
    chosen[random.permutation(count)[: max(1, round(count * share))]] = True
    return chosen


def _lengths(times: dict[str, Floats], shape: Shape, plant: SequenceLengths, random: np.random.Generator) -> None:
    """Make all operations of a microbatch longer or shorter by its sequences, on each stage alike."""
    size = (shape.microbatches, shape.steps, shape.dp)
    squares, left = np.zeros(size), np.full(size, TOKENS)
    while left.any():
        lengths = np.minimum(np.exp(random.normal(np.log(2000), plant.spread, size)).astype(int) + 1, left)
        squares += lengths.astype(float) ** 2
        left -= lengths
    squares /= squares.mean()
    for optype, quadratic in (("forward-compute", plant.quadratic), ("backward-compute", 0.85 * plant.quadratic)):
        times[optype] *= (1 + quadratic * (squares - 1))[:, None]


def _pauses(times: dict[str, Floats], shape: Shape, plant: GarbageCollection, random: np.random.Generator) -> None:
    size = (shape.pp, shape.steps, shape.dp)
    pauses = np.where(random.random(size) < plant.rate, plant.pause_s * random.uniform(0.8, 1.2, size), 0)
    if plant.recorded:
        times["gc"][0] += pauses
        return
    places = random.integers(shape.microbatches, size=size)
    here = np.arange(shape.microbatches)[:, None, None, None] == places
    times["forward-compute"] += here * pauses


def _delays(times: dict[str, Floats], shape: Shape, plant: Communication, random: np.random.Generator) -> None:
    if plant.collective:
        for optype in ("params-all-gather", "grads-reduce-scatter"):
            hit = _some(shape.steps, plant.share, random)
            times[optype] += np.where(hit, plant.delay_s * random.uniform(0.8, 1.2, shape.steps), 0)[:, None]
        return
    for kind, to in (("forward", 1), ("backward", -1)):
        size = (shape.microbatches, shape.pp - 1, shape.steps, shape.dp)
        delays = np.where(random.random(size) < plant.share, plant.delay_s * random.uniform(0.8, 1.2, size), 0)
        if plant.link is not None:
            only = np.zeros(size[1:], dtype=bool)
            only[plant.link[1], :, plant.link[0]] = True
            delays *= only
        senders, receivers = (slice(None, -1), slice(1, None))[::to]
        times[f"{kind}-send"][:, senders] += delays
        times[f"{kind}-recv"][:, receivers] += delays
