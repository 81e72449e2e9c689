"""The best configuration of a model for every number of GPUs, and so T(t, x) (paper section 5.1)."""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unicron.contracts.tasks import ModelSpec, ParallelLayout
from unicron.costmodel import catalogue, costs, formulas
from unicron.costmodel.catalogue import Accelerator
from unicron.costmodel.costs import LayoutArrays
from unicron.errors import InvalidInputError

MICROBATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Sizes that are tried. Larger ones gain nothing: a microbatch then takes far longer than its fixed costs."""

NEAR = 4
"""Most feasible sizes that an error names."""

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
        found = _scaled(found, _anchor(found, model, gpu, shape))
    return _rows(found, found.sizes <= most)


def curve_of(model: ModelSpec, layouts: Mapping[int, ParallelLayout]) -> Curve:
    """Return T(t, x) at those x of `layouts` that are feasible, each in the layout it has there.

    Raises:
        InvalidInputError: as for `curve`. The anchor is taken to have been measured in the layout that its size has in
            `layouts`, or in the best one where it has none there.
    """
    gpu = catalogue.accelerator(model.accelerator)
    by_shape: dict[ParallelLayout, list[int]] = {}
    for size, layout in layouts.items():
        by_shape.setdefault(layout.with_workers(0), []).append(size)
    found = _joined(_at(_search(model, gpu, max(sizes), shape), sizes) for shape, sizes in by_shape.items())
    if model.anchor_workers:  # one measurement, so one factor for all: that of a shape may be infeasible in another
        measured = layouts.get(model.anchor_workers)
        shape = None if measured is None else measured.with_workers(0)
        found = _scaled(found, _anchor(_search(model, gpu, model.anchor_workers, shape), model, gpu, shape))
    return found


def best_layouts(model: ModelSpec, sizes: Sequence[int]) -> dict[int, ParallelLayout]:
    """Return the shape of a replica with which the model trains fastest, for each of `sizes` that is feasible.

    Args:
        model: what is trained.
        sizes: numbers of GPUs, ascending, at least one.

    Raises:
        InvalidInputError: none of `sizes` is feasible; it says why, and what would do. Or as for `curve`.
    """
    found = curve(model, sizes[-1])
    best = {size: found.configuration(at).layout for at, size in enumerate(found.sizes.tolist())}
    chosen = {
        size: ParallelLayout(tensor=best[size].tensor, pipeline=best[size].pipeline) for size in sizes if size in best
    }
    if not chosen:
        reason = shortage(model, sizes[-1])
        if not reason:
            near = ", ".join(map(str, list(best)[-NEAR:]))
            reason = f"{why_not(model, sizes[-1])}; the largest sizes below it that can are {near}"
        raise InvalidInputError(
            f"from {sizes[0]} to {sizes[-1]} no allowed number of workers can run the model: {reason}"
        )
    return chosen


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


def why_not(model: ModelSpec, workers: int, shape: ParallelLayout | None = None) -> str:
    """Return why `workers` GPUs can't run the model, or not with replicas of `shape`; empty where they can."""
    gpu = catalogue.accelerator(model.accelerator)
    needs = [
        float(costs.memory_bytes(model, on).min())
        for on in _layouts(model, workers, shape)
        for on in [_only(on, workers)]
        if on.data.size
    ]
    if not needs:
        return _no_product(model, workers) if shape is None else _no_data_degree(model, workers, shape)
    if min(needs) > gpu.memory_bytes:
        how = "" if shape is None else f" with {_degrees(shape)}"
        return (
            f"on {workers} GPUs{how} each would need {min(needs) / 1e9:.0f} GB at least, and an {model.accelerator} "
            f"has {gpu.memory_bytes / 1e9:.0f} GB"
        )
    return ""


def _no_product(model: ModelSpec, workers: int) -> str:
    cure = "" if model.padded else "; 'padded: true' allows more sizes"
    return (
        f"{workers} is no product of a tensor degree (dividing {model.heads} heads and {model.gpus_per_node} GPUs "
        f"a node), a pipeline degree (for {model.layers} layers) and a data degree (for {model.batch} sequences)"
        f"{cure}"
    )


def _no_data_degree(model: ModelSpec, workers: int, shape: ParallelLayout) -> str:
    data = workers // (shape.tensor * shape.pipeline)
    rule = "be at most" if model.padded else "divide"
    cure = "" if model.padded else ", unless 'padded: true'"
    return (
        f"{workers} GPUs with {_degrees(shape)} have a data degree of {data}: it must {rule} the {model.batch} "
        f"sequences of a batch, the tensor degree {model.heads} heads and {model.gpus_per_node} GPUs a node, the "
        f"pipeline degree {model.layers} layers{cure}"
    )


def _degrees(shape: ParallelLayout) -> str:
    shard = f" x shard {shape.shard}" if shape.shard > 1 else ""
    return f"tensor {shape.tensor} x pipeline {shape.pipeline}{shard}"


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


def _layouts(model: ModelSpec, most: int, shape: ParallelLayout | None = None) -> Iterator[LayoutArrays]:
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
                yield LayoutArrays(*degrees, microbatch, recompute, distributed)


def _allowed(model: ModelSpec, gpu: Accelerator, on: LayoutArrays) -> NDArray[np.bool_]:
    """Return where the memory suffices and the microbatch divides what a rank gets, or at least is not above it."""
    share = -(-model.batch // on.data)
    fits = (on.microbatch <= share) if model.padded else (share % on.microbatch == 0)
    return fits & (costs.memory_bytes(model, on) <= gpu.memory_bytes)


def _only(on: LayoutArrays, workers: int) -> LayoutArrays:
    """Return the rows of `on` that use exactly so many GPUs."""
    rows = (on.tensor * on.pipeline * on.data)[:, 0] == workers
    return on._replace(data=on.data[rows])


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _anchor(found: Curve, model: ModelSpec, gpu: Accelerator, shape: ParallelLayout | None) -> float:
    """Return by how much to scale the curve, so that it passes through the measurement at a size of `found`."""
    place = np.searchsorted(found.sizes, model.anchor_workers)
    if place == len(found.sizes) or found.sizes[place] != model.anchor_workers:
        reason = why_not(model, model.anchor_workers, shape)
        raise InvalidInputError(f"anchor_workers {model.anchor_workers}: {reason}; give the size that was measured")
    measured = model.anchor_mfu * gpu.peak_flops * model.anchor_workers
    return float(measured / found.flops[place])


def _scaled(found: Curve, factor: float) -> Curve:
    return found._replace(flops=found.flops * factor, seconds=found.seconds / factor)


def _at(found: Curve, sizes: Iterable[int]) -> Curve:
    return _rows(found, np.isin(found.sizes, list(sizes)))


def _rows(found: Curve, which: NDArray[np.bool_]) -> Curve:
    return Curve(found.sizes[which], found.flops[which], found.seconds[which], found.choices[which])


def _joined(parts: Iterable[Curve]) -> Curve:
    """Return the rows of all `parts`, by size."""
    found = list(parts)
    sizes = np.concatenate([np.zeros(0, np.int64), *(part.sizes for part in found)])
    rows = sizes.argsort()
    return Curve(
        sizes[rows],
        np.concatenate([np.zeros(0), *(part.flops for part in found)])[rows],
        np.concatenate([np.zeros(0), *(part.seconds for part in found)])[rows],
        np.concatenate([np.zeros((0, 6), np.int64), *(part.choices for part in found)])[rows],
    )
