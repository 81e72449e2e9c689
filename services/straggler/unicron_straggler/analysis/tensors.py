"""A trace as tensors of durations over (steps, microbatches, pp, dp), and what had to be left out for it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from unicron.errors import InvalidInputError
from unicron_straggler.analysis import model
from unicron_straggler.analysis.trace import CODES, COMMUNICATION, OPTYPES, Floats, Integers, Trace, TraceProblem

GC = CODES["gc"]
CLOCKS_S = 0.010
"""How far clocks may disagree: a transfer that ends this much before its group began took no time (as the study has
it), and an operation that starts this much before the one before it ends overlaps it."""
ENOUGH = 0.5
"""A result stands if no larger share of the steps than this had to be left out."""
TRANSFERS = tuple(CODES[name] for name in ("forward-send", "forward-recv", "backward-send", "backward-recv"))
STREAMS = (*TRANSFERS, model.GATHER, model.SCATTER)


@dataclass(frozen=True, eq=False)
class Job:
    """A trace, ready for simulation.

    Attributes:
        steps: numbers of the steps, rising.
        dp_ranks: the data-parallel ranks that the dp axis stands for.
        ranks: (dp, pp) global ranks.
        graph: which operation waits for which.
        durations: by code, (steps, microbatches, pp, dp) seconds: traced time of compute, transfer time of
            communication; NaN where a stage has no such operation.
        step_traced_s: (steps,) from the first start to the last end.
        computes: (pp, n, 3) code, seq_id, microbatch of what each stage computed, in order.
        problems: what is wrong with the trace.
    """

    steps: Integers
    dp_ranks: Integers
    ranks: Integers
    graph: model.Graph
    durations: dict[int, Floats]
    step_traced_s: Floats
    computes: Integers
    problems: tuple[TraceProblem, ...]


@dataclass
class _Axes:
    """The position of each row of a trace on the axes of steps and data-parallel ranks, -1 if it is left out."""

    steps: Integers
    dp_ranks: Integers
    step_at: Integers
    dp_at: Integers
    pp: int


def job(trace: Trace) -> Job:
    """Return the tensors and the graph of a trace.

    Raises:
        InvalidInputError: no step is whole, or the operations don't fit the dependency model.
    """
    meta = trace.meta
    if not len(trace):
        raise InvalidInputError(f"zero steps: the trace of {meta.name} has no operations; record at least one step")
    problems = [*trace.problems, *_wrong_sizes(trace)]
    axes = _axes(trace)
    counts = _counts(trace, axes)
    _drop_ranks(trace, axes, counts, problems)
    usual = _drop_steps(trace, axes, counts, problems)
    del counts
    starts, durations = _scatter(trace, axes, usual)
    repeated = _holes(durations, usual)
    if repeated.all():
        raise InvalidInputError(
            f"zero steps: in every step of {meta.name} some seq_id is there twice and another missing; number the "
            "operations of a type on a rank in a step from 0"
        )
    stages = _stages(trace, axes, usual, int(np.flatnonzero(~repeated)[0]))
    graph = model.build(meta, stages)
    traced = _traced(starts, durations)
    overlapping = _overlaps(starts, durations, stages) & ~repeated
    a_step = int(usual.sum()) * len(axes.dp_ranks)
    keep_all = bool((overlapping | repeated).all())
    for name, which in (("repeated-operations", repeated), ("overlapping-operations", overlapping)):
        if which.any():
            problems.append(_left_out(name, which, axes.steps, 0 if keep_all and which is overlapping else a_step))
    kept = ~(repeated if keep_all else repeated | overlapping)
    for code in [code for code in starts if OPTYPES[code] not in COMMUNICATION]:
        del starts[code]
    _transfer_times(starts, durations, graph)
    for code, each in durations.items():
        durations[code] = each if kept.all() else each[kept]
    return Job(
        steps=axes.steps[kept],
        dp_ranks=axes.dp_ranks,
        ranks=_ranks(trace, axes),
        graph=graph,
        durations=durations,
        step_traced_s=traced[kept],
        computes=_computes(stages),
        problems=tuple(problems),
    )


def _wrong_sizes(trace: Trace) -> list[TraceProblem]:
    """Hold the trace against the sizes of its meta."""
    meta = trace.meta
    for column, name, size in (
        (trace.dp_rank, "dp_size", meta.dp_size),
        (trace.stage, "pp_size", meta.pp_size),
        (trace.mc, "vpp_size", meta.vpp_size),
    ):
        lowest = -1 if name == "vpp_size" else 0  # not every operation belongs to a chunk
        if not lowest <= column.min() <= column.max() < size:
            what = {"dp_size": "data-parallel ranks", "pp_size": "stages", "vpp_size": "model chunks"}[name]
            raise InvalidInputError(
                f"wrong meta: the trace of {meta.name} has {what} {column.min()} to {column.max()}, and {name} is "
                f"{size}; mend {name}"
            )
    product = meta.dp_size * meta.pp_size * meta.tp_size * meta.dsp_size
    if meta.world_size in {0, product}:
        return []
    text = (
        f"world_size is {meta.world_size} and dp_size x pp_size x tp_size x dsp_size {product}: one of them is wrong, "
        "and if it is dp_size or pp_size the result is too; nothing is left out"
    )
    return [TraceProblem("wrong-meta", text)]


def _axes(trace: Trace) -> _Axes:
    lowest = int(trace.step.min())
    span = int(trace.step.max()) - lowest + 1
    steps: Any
    step_at: Any
    if span > 50_000_000:
        steps, step_at = np.unique(trace.step, return_inverse=True)
    else:
        seen = np.zeros(span, bool)
        offset = trace.step - lowest
        seen[offset] = True
        steps = np.flatnonzero(seen) + lowest
        step_at = (np.cumsum(seen, dtype=np.int32) - 1)[offset]
    return _Axes(steps, np.arange(trace.meta.dp_size), step_at, trace.dp_rank, trace.meta.pp_size)


def _counts(trace: Trace, axes: _Axes) -> Integers:
    """Return (steps, pp, dp, codes) how many operations there are."""
    shape = (len(axes.steps), axes.pp, len(axes.dp_ranks), len(OPTYPES))
    key = axes.step_at.astype(np.int64)
    for size, column in zip(shape[1:], (trace.stage, trace.dp_rank, trace.optype), strict=True):
        key *= size
        key += column
    return np.bincount(key, minlength=int(np.prod(shape))).reshape(shape)


def _drop_ranks(trace: Trace, axes: _Axes, counts: Integers, problems: list[TraceProblem]) -> None:
    """Leave out data-parallel ranks of which a stage is missing throughout."""
    whole = (counts.sum((0, 3)) > 0).all(0)
    if whole.all():
        return
    missing = np.flatnonzero(~whole)
    if not whole.any():
        stages = np.flatnonzero(counts.sum((0, 2, 3)) == 0)
        raise InvalidInputError(
            f"missing ranks: no data-parallel rank of {trace.meta.name} is in the trace with all {axes.pp} stages "
            f"(nothing at all of stages {stages.tolist()}); add the ranks that are missing, or mend pp_size in the meta"
        )
    places = np.where(whole, np.cumsum(whole) - 1, -1)
    axes.dp_ranks, axes.dp_at = np.flatnonzero(whole), places[trace.dp_rank]
    text = (
        f"of {len(whole)} data-parallel ranks the trace lacks stages of {_few(missing)}: these are left out, and what "
        "they cost is not known; add their traces, or mend dp_size in the meta"
    )
    problems.append(TraceProblem("missing-ranks", text, int((axes.dp_at < 0).sum()), stands=False))


def _drop_steps(trace: Trace, axes: _Axes, counts: Integers, problems: list[TraceProblem]) -> Integers:
    """Leave out steps with other operations than usual; return the usual (pp, codes) counts."""
    counts = counts[:, :, axes.dp_ranks]
    usual = _usual(counts)
    other = counts != usual[None, :, None]
    other[..., GC] = False  # garbage is collected whenever; a step may well have none
    usual[:, GC] = counts[..., GC].any()
    absent = (counts.sum(3) == 0).any((1, 2))
    partner = other[..., TRANSFERS].any((1, 2, 3)) & ~absent
    rest = other.any((1, 2, 3)) & ~absent & ~partner
    bad = absent | partner | rest
    if bad.all():
        name, code, stage = _first_of(other, absent, partner)
        raise InvalidInputError(
            f"zero steps: none of the {len(bad)} steps of {trace.meta.name} is whole ({name}: the first has too few or "
            f"too many {OPTYPES[code]} on stage {stage}); record whole steps on all ranks"
        )
    for name, which, cause in (
        ("missing-ranks", absent, "some worker recorded nothing"),
        ("operations-without-partner", partner, "a send or receive has no partner"),
        ("incomplete-steps", rest, "operations are missing or recorded twice"),
    ):
        if which.any():
            text = f"{which.sum()} of {len(bad)} steps are left out, for {cause} in them: {_few(axes.steps[which])}"
            dropped = int(counts[which].sum())
            problems.append(TraceProblem(name, text, dropped, stands=bool(bad.mean() <= ENOUGH)))
    if bad.any():
        axes.step_at = np.where(bad, -1, np.cumsum(~bad) - 1)[axes.step_at]
        axes.steps = axes.steps[~bad]
    return usual


def _usual(counts: Integers) -> Integers:
    """Return (pp, codes) the median of the counts over steps and data-parallel ranks; of two the lower."""
    rows = counts.transpose(1, 3, 0, 2).reshape(counts.shape[1], counts.shape[3], -1)
    middle = (rows.shape[-1] - 1) // 2
    return np.partition(rows, middle)[..., middle].astype(int)


def median(values: Floats) -> float:
    """Return the median of all values, none of which is NaN; numpy's own loads its masked arrays for it."""
    ordered = np.partition(values, [(values.size - 1) // 2, values.size // 2], axis=None)
    return (float(ordered[(values.size - 1) // 2]) + float(ordered[values.size // 2])) / 2


def _first_of(other: Any, absent: Any, partner: Any) -> tuple[str, int, int]:
    name = "missing ranks" if absent.all() else "operations without partner" if partner.any() else "incomplete steps"
    where = np.argwhere(other)
    return (name, int(where[0][3]), int(where[0][1])) if len(where) else (name, 0, 0)


def _scatter(trace: Trace, axes: _Axes, usual: Integers) -> tuple[dict[int, Floats], dict[int, Floats]]:
    """Return starts and durations by code; NaN where there is no such operation."""
    starts: dict[int, Floats] = {}
    durations: dict[int, Floats] = {}
    left_out = bool((axes.step_at < 0).any() or (axes.dp_at < 0).any())
    for code in np.flatnonzero(usual.any(0)).tolist():
        rows = np.flatnonzero(trace.optype == code)
        if left_out:
            rows = rows[(axes.step_at[rows] >= 0) & (axes.dp_at[rows] >= 0)]
        shape = (len(axes.steps), 1 if code == GC else int(usual[:, code].max()), axes.pp, len(axes.dp_ranks))
        places: Any = np.zeros(len(rows), np.int32) if code == GC else trace.seq_id[rows]
        if places.size and not 0 <= places.min() <= places.max() < shape[1]:
            inside = (places >= 0) & (places < shape[1])
            rows, places = rows[inside], places[inside]
        at: Any = axes.step_at[rows].astype(np.int64)
        for size, column in zip(shape[1:], (places, trace.stage[rows], axes.dp_at[rows]), strict=True):
            at *= size
            at += column
        if code == GC:
            summed: Floats = np.bincount(at, trace.duration[rows], math.prod(shape)).astype(np.float64, copy=False)
            durations[code] = summed.reshape(shape)
            continue
        for store, times in ((starts, trace.start), (durations, trace.duration)):
            filled = np.full(shape, np.nan, times.dtype)
            filled.reshape(-1)[at] = times[rows]
            store[code] = filled
    return starts, durations


def _holes(durations: dict[int, Floats], usual: Integers) -> Any:
    """Return (steps,) whether an operation is missing though the count is right: then another is there twice."""
    found: Any = False
    for code, each in durations.items():
        expected = np.arange(each.shape[1])[:, None] < usual[:, code]
        found |= (np.isnan(each) & expected[:, :, None]).any((1, 2, 3))
    return np.asarray(found)


def _stages(trace: Trace, axes: _Axes, usual: Integers, first: int) -> list[model.StageOps]:
    """Return what each stage did in the first step of the first data-parallel rank."""
    rows = np.flatnonzero((axes.step_at == first) & (axes.dp_at == 0))
    rows = rows[np.lexsort((-trace.optype[rows], trace.seq_id[rows], trace.start[rows]))]  # ties: backward is first
    found = []
    for stage in range(axes.pp):
        here = rows[trace.stage[rows] == stage]
        computing = here[(trace.optype[here] == model.FORWARD) | (trace.optype[here] == model.BACKWARD)]
        columns = (trace.optype, trace.seq_id, trace.mc, trace.mb_id)
        values = zip(*(column[computing].tolist() for column in columns), strict=True)
        computes = tuple(model.Compute(code, seq, max(chunk, 0), batch) for code, seq, chunk, batch in values)
        gathering = here[trace.optype[here] == model.GATHER]
        gathers = tuple(max(chunk, 0) for chunk in trace.mc[gathering].tolist())
        found.append(model.StageOps(computes, usual[stage].tolist(), gathers))
    return found


def _chains(stages: list[model.StageOps]) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Yield each stream: its stage, and the code and place of its operations in order."""
    for stage, ops in enumerate(stages):
        yield stage, [(one.code, one.seq) for one in ops.computes]
        for code in STREAMS:
            yield stage, [(code, seq) for seq in range(ops.counts[code])]


def _overlaps(starts: dict[int, Floats], durations: dict[int, Floats], stages: list[model.StageOps]) -> Any:
    """Return (steps,) whether operations of one stream overlap, or come in another order than in the first step."""
    found: Any = False
    for stage, chain in _chains(stages):
        ends: Any = None
        for code, seq in chain:
            start = starts[code][:, seq, stage]
            if ends is not None:
                found |= (start < ends - CLOCKS_S).any(-1)
            ends = start + durations[code][:, seq, stage]
    return np.asarray(found)


def _left_out(name: str, which: Any, steps: Integers, a_step: int) -> TraceProblem:
    """Return the problem of steps with operations twice, or overlapping; `a_step` operations of each are left out."""
    share = f"{which.sum()} of {len(steps)} steps"
    words = name.replace("-", " ")
    if not a_step:
        text = f"{share} have {words} on one stream, and no other steps are left: kept, but their times can't be right"
        return TraceProblem(name, text, 0, stands=False)
    text = f"{share} are left out, for {words} on one stream in them: {_few(steps[which])}"
    return TraceProblem(name, text, int(which.sum()) * a_step, stands=bool(which.mean() <= ENOUGH))


def _few(numbers: Integers) -> str:
    return ", ".join(str(number) for number in numbers[:8]) + (", ..." if len(numbers) > 8 else "")


def _traced(starts: dict[int, Floats], durations: dict[int, Floats]) -> Floats:
    """Return (steps,) the time from the first start to the last end."""
    axes = (1, 2, 3)
    first = [np.fmin.reduce(start, axis=axes) for start in starts.values()]
    last = [np.fmax.reduce(start + durations[code], axis=axes) for code, start in starts.items()]
    return np.asarray(np.max(last, axis=0) - np.min(first, axis=0), np.float64)


def _transfer_times(starts: dict[int, Floats], durations: dict[int, Floats], graph: model.Graph) -> None:
    """Replace durations of communication by the time from the latest start of its group to its own end."""
    for code in (model.GATHER, model.SCATTER, model.CLIP, model.EMBEDDING):
        if code in starts:
            axis = {model.CLIP: (2, 3), model.EMBEDDING: (2,)}.get(code, (3,))
            latest = np.fmax.reduce(starts[code], axis=axis, keepdims=True)
            durations[code] = _transferred(starts[code], durations[code], latest)
    for ones, others in ((TRANSFERS[0], TRANSFERS[1]), (TRANSFERS[2], TRANSFERS[3])):
        pairs = [(graph.keys[a], graph.keys[b]) for a, b in graph.pairs if graph.keys[a][0] == ones]
        if ones not in starts:
            continue
        here = tuple(np.array([[a[1], a[2]] for a, _ in pairs], int).reshape(-1, 2).T)
        there = tuple(np.array([[b[1], b[2]] for _, b in pairs], int).reshape(-1, 2).T)
        latest = np.maximum(starts[ones][:, here[0], here[1]], starts[others][:, there[0], there[1]])
        for code, (places, stages) in ((ones, here), (others, there)):
            start = starts.pop(code)
            single = start.copy()  # where nothing was transferred there is no partner to wait for
            single[:, places, stages] = latest
            durations[code] = _transferred(start, durations[code], single)


def _transferred(start: Floats, duration: Floats, latest: Floats) -> Floats:
    moved = start + duration - latest
    moved[moved <= -CLOCKS_S] = 0
    return moved


def _ranks(trace: Trace, axes: _Axes) -> Integers:
    ranks = np.full((len(axes.dp_ranks), axes.pp), -1, np.int64)
    rows = np.flatnonzero((axes.step_at == 0) & (axes.dp_at >= 0))
    ranks[axes.dp_at[rows], trace.stage[rows]] = trace.rank[rows]
    return ranks


def _computes(stages: list[model.StageOps]) -> Integers:
    length = max(len(ops.computes) for ops in stages)
    computes = np.full((len(stages), length, 3), -1, np.int64)
    for stage, ops in enumerate(stages):
        for at, one in enumerate(ops.computes):
            computes[stage, at] = one.code, one.seq, one.microbatch
    return computes
