"""The best configuration of a model for every number of GPUs, and so T(t, x) (paper section 5.1)."""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unicron.contracts.tasks import ModelSpec, ParallelLayout
from unicron.costmodel import catalogue, costs, formulas
from unicron.costmodel.catalogue import Accelerator
from unicron.costmodel.costs import Layout
from unicron.errors import InvalidInputError

MICROBATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Sizes that are tried. Larger ones gain nothing: a microbatch then takes far longer than its fixed costs."""

FAR = 16_384
"""GPUs up to which `shortage` looks for the fewest that would do."""


class Configuration(NamedTuple):
    """How Megatron is to be started.

    Attributes:
        recompute: "none", "selective" (with sequence parallelism) or "full".
        distributed: whether to use the distributed optimizer.
    """

    tensor: int
    pipeline: int
    data: int
    microbatch: int
    recompute: str
    distributed: bool

    def __str__(self) -> str:
        optimizer = ", distributed optimizer" if self.distributed else ""
        return (
            f"tensor {self.tensor} x pipeline {self.pipeline} x data {self.data}, microbatch {self.microbatch}, "
            f"{self.recompute} recompute{optimizer}"
        )

    @property
    def layout(self) -> ParallelLayout:
        """How its workers share the model and the data."""
        return ParallelLayout(tensor=self.tensor, pipeline=self.pipeline, replicas=self.data)


class Curve(NamedTuple):
    """T(t, x) at all feasible x, ascending; arrays of the same length.

    Attributes:
        sizes: feasible numbers of GPUs.
        flops: achieved model FLOP/s of all of them together, the T(t, x) of the paper.
        seconds: of one iteration.
        choices: one row for each size: tensor, pipeline, data, microbatch, recompute, distributed.
    """

    sizes: NDArray[np.int64]
    flops: NDArray[np.float64]
    seconds: NDArray[np.float64]
    choices: NDArray[np.int64]

    def configuration(self, index: int) -> Configuration:
        """Return the configuration behind entry `index`."""
        tensor, pipeline, data, microbatch, recompute, distributed = map(int, self.choices[index])
        return Configuration(
            tensor, pipeline, data, microbatch, formulas.RECOMPUTE[recompute], distributed=bool(distributed)
        )


def curve(model: ModelSpec, most: int, shape: ParallelLayout | None = None) -> Curve:
    """Return T(t, x) for every feasible x up to `most`; empty where none is.

    Args:
        model: what is trained.
        most: GPUs.
        shape: of one replica, where it is not to be chosen. Ranks that share a replica out (FSDP) are taken for
            data-parallel ones with a distributed optimizer, the nearest thing that Megatron has.

    Raises:
        InvalidInputError: the accelerator is unknown, or the anchor's size can't be run.
    """
    gpu = catalogue.accelerator(model.accelerator)
    found = _search(model, gpu, max(most, model.anchor_workers), shape)
    if model.anchor_workers:
        found = _anchored(found, model, gpu)
    reached = found.sizes <= most
    return Curve(found.sizes[reached], found.flops[reached], found.seconds[reached], found.choices[reached])


def scale(ratios: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return by how much to scale a curve, given what measurements were of what it says.

    Their median: one measurement that is far off, as on a cluster with a slow link that day, does not move it.

    Args:
        ratios: measured over said; their last axis counts the measurements.
    """
    return np.asarray(np.median(ratios, axis=-1))


def shortage(model: ModelSpec, most: int) -> str:
    """Return why no size up to `most` is feasible and how many GPUs would do; empty where one is feasible."""
    gpu = catalogue.accelerator(model.accelerator)
    if _search(model, gpu, most).sizes.size:
        return ""
    billions, memory = formulas.parameters(model) / 1e9, gpu.memory_bytes / 1e9
    what = f"a model of {billions:.1f} billion parameters"
    limit = most
    while limit < FAR:
        limit = min(max(2 * limit, 64), FAR)
        found = _search(model, gpu, limit)
        if found.sizes.size:
            least = int(found.sizes[0])
            how = found.configuration(0)
            return f"{what} needs at least {least} {model.accelerator} of {memory:.0f} GB ({how}); {most} are too few"
    return f"{what} does not fit into {FAR} {model.accelerator} of {memory:.0f} GB; use more layers of fewer weights"


def why_not(model: ModelSpec, workers: int) -> str:
    """Return why `workers` GPUs can't run the model; empty where they can."""
    gpu = catalogue.accelerator(model.accelerator)
    needs = [
        float(costs.memory_bytes(model, on).min())
        for on in _layouts(model, workers)
        for on in [_only(on, workers)]
        if on.data.size
    ]
    if not needs:
        cure = "" if model.padded else "; 'padded: true' allows more sizes"
        return (
            f"{workers} is no product of a tensor degree (dividing {model.heads} heads and {model.gpus_per_node} GPUs "
            f"a node), a pipeline degree (for {model.layers} layers) and a data degree (for {model.batch} sequences)"
            f"{cure}"
        )
    if min(needs) > gpu.memory_bytes:
        return (
            f"on {workers} GPUs each would need {min(needs) / 1e9:.0f} GB at least, and an {model.accelerator} has "
            f"{gpu.memory_bytes / 1e9:.0f} GB"
        )
    return ""


# --- the search: one pass for each (tensor, pipeline), in which the data degree is the number of GPUs -----------------


@functools.lru_cache(maxsize=64)
def _search(model: ModelSpec, gpu: Accelerator, most: int, shape: ParallelLayout | None = None) -> Curve:
    """Return the best configuration of every feasible size up to `most`, without the anchor."""
    best = np.full(most + 1, np.inf)
    choices = np.zeros((most + 1, 6), np.int64)
    for on in _layouts(model, most, shape):
        seconds = np.where(_allowed(model, gpu, on), costs.iteration_s(model, gpu, on), np.inf)
        column = seconds.argmin(axis=1)
        least = seconds[np.arange(len(column)), column]
        workers = (on.tensor * on.pipeline * on.data)[:, 0]
        better = least < best[workers]
        at, column = workers[better], column[better]
        best[at] = least[better]
        choices[at, 0], choices[at, 1], choices[at, 2] = on.tensor, on.pipeline, on.data[better, 0]
        for place, entry in enumerate((on.microbatch, on.recompute, on.distributed)):
            choices[at, 3 + place] = entry[column]
    sizes = np.flatnonzero(np.isfinite(best))
    seconds = best[sizes]
    return Curve(sizes, formulas.iteration_flops(model) / seconds, seconds, choices[sizes])


def _layouts(model: ModelSpec, most: int, shape: ParallelLayout | None = None) -> Iterator[Layout]:
    """Yield for each (tensor, pipeline), or for that of `shape`, all data degrees (rows) times all other choices."""
    shard = 1 if shape is None else shape.shard
    options = [
        (microbatch, recompute, distributed)
        for distributed in ((False, True) if shard == 1 else (True,))
        for recompute in range(len(formulas.RECOMPUTE))
        for microbatch in MICROBATCHES
    ]
    microbatch, recompute, distributed = (np.array(column) for column in zip(*options, strict=True))
    for tensor in _divisors(model.gpus_per_node):
        for pipeline in range(1, min(model.layers, most // tensor) + 1):
            if model.heads % tensor or not (model.padded or model.layers % pipeline == 0):
                continue
            if shape is not None and (tensor, pipeline) != (shape.tensor, shape.pipeline):
                continue
            data = np.arange(shard, min(most // (tensor * pipeline), model.batch) + 1, shard)
            data = data if model.padded else data[model.batch % data == 0]
            if data.size:
                degrees = np.array(tensor), np.array(pipeline), data[:, None]
                yield Layout(*degrees, microbatch, recompute, distributed)


def _allowed(model: ModelSpec, gpu: Accelerator, on: Layout) -> NDArray[np.bool_]:
    """Return where the memory suffices and the microbatch divides what a rank gets, or at least is not above it."""
    share = -(-model.batch // on.data)
    fits = (on.microbatch <= share) if model.padded else (share % on.microbatch == 0)
    return fits & (costs.memory_bytes(model, on) <= gpu.memory_bytes)


def _only(on: Layout, workers: int) -> Layout:
    """Return the rows of `on` that use exactly so many GPUs."""
    rows = (on.tensor * on.pipeline * on.data)[:, 0] == workers
    return on._replace(data=on.data[rows])


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _anchored(found: Curve, model: ModelSpec, gpu: Accelerator) -> Curve:
    """Scale the whole curve so that it passes through the measurement."""
    place = np.searchsorted(found.sizes, model.anchor_workers)
    if place == len(found.sizes) or found.sizes[place] != model.anchor_workers:
        reason = why_not(model, model.anchor_workers)
        raise InvalidInputError(f"anchor_workers {model.anchor_workers}: {reason}; give the size that was measured")
    measured = model.anchor_mfu * gpu.peak_flops * model.anchor_workers
    factor = measured / found.flops[place]
    return found._replace(flops=found.flops * factor, seconds=found.seconds / factor)
