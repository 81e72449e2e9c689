"""For each cause of slowness: the figures it rests on, the culprits, and the cure in a sentence."""

import math
from typing import Any

import numpy as np

from unicron.train.balance import balance
from unicron_straggler.analysis.measures import Analysis
from unicron_straggler.analysis.parts import LEAST_SLOW, TimeParts, in_order
from unicron_straggler.analysis.trace import COMMUNICATION, Floats, Integers
from unicron_straggler.analysis.what_if import WhatIf, stage_times

MOST_NAMED = 5
"""Culprits that a sentence names."""

MOST_MOVED = 4_000
"""Microbatches that are shared out anew to see what that would bring (15 ms); of as many steps, evenly chosen."""

Found = tuple[dict[str, Any], str, tuple[int, ...]]


def find_cure(cause: str, what_if: WhatIf, seconds: float, layers: int) -> Found:
    """Return evidence, cure and culprits of a cause, without which a step takes `seconds`."""
    gain = _gain(what_if.as_is, seconds)
    match cause:
        case "slow-worker":
            return _slow(what_if.analysis, what_if.found, gain)
        case "stage-imbalance":
            return _stage(what_if, gain, layers)
        case "sequence-length-imbalance":
            return _lengths(what_if)
        case "garbage-collection":
            return _pauses(what_if.analysis, what_if.found, gain)
        case _:
            return _network(what_if.analysis, gain)


def _gain(before: float, after: float) -> str:
    return f"{after:.3g} s a step instead of {before:.3g} s ({_faster(before / after)})"


def _faster(ratio: float) -> str:
    return f"{100 * (ratio - 1):.0f} % faster" if ratio < 2 else f"{ratio:.2f} times as fast"


def _slow(analysis: Analysis, found: TimeParts, gain: str) -> Found:
    chunks = found.slowness.shape[3] // found.pp
    usual = found.stages[:, :, 0]
    took = (usual * np.exp(found.slowness[:, :, 0])).sum(axis=0) / usual.sum(axis=0)
    slow = took.reshape(len(took), found.pp, chunks, -1).mean(axis=2)  # (steps, stages, dp)
    mean = slow.mean(axis=0)
    stages, dps = np.unravel_index(np.argsort(-mean, axis=None)[: int((mean > 1).sum())], mean.shape)
    ranks = tuple(int(rank) for rank in analysis.ranks[dps, stages])
    workers = [
        {
            "rank": rank,
            "dp_rank": int(analysis.dp_ranks[dp]),
            "stage": int(stage),
            "slower": float(mean[stage, dp]),
            "steps_share": float((slow[:, stage, dp] > 1 + LEAST_SLOW).mean()),
        }
        for rank, stage, dp in zip(ranks, stages, dps, strict=True)
    ]
    named = ", ".join(
        "rank {rank} (data-parallel rank {dp_rank}, stage {stage}, {slower:.2f} times as long)".format(**one)
        for one in workers[:MOST_NAMED]
    )
    more = f" and {len(workers) - MOST_NAMED} more" if len(workers) > MOST_NAMED else ""
    cure = f"Drain the node of {named}{more}, which computes longer than the others of its stage: {gain}."
    return {"workers": workers, "m_w": analysis.m_w}, cure, ranks


def _stage(what_if: WhatIf, gain: str, layers: int) -> Found:
    times = stage_times(what_if.found)
    worst = int(times.argmax())
    others = float(np.delete(times, worst).mean())
    part = float((times[worst] - times.mean()) / others)
    evidence: dict[str, Any] = {
        "stage": worst,
        "longer_than_others": float(times[worst] / others),
        "stage_seconds": times.tolist(),
        "m_s": what_if.analysis.m_s,
        "move_share_of_layers": part,
    }
    name = "the last stage" if worst == len(times) - 1 else f"stage {worst}"
    hint = "" if len(what_if.analysis.dp_ranks) > 1 else "; with one data-parallel rank, a slow worker looks the same"
    why = f"it takes {times[worst] / others:.2f} times as long as they"
    if not layers:
        move = f"Move about {100 * part:.0f} % of the layers of {name} to the others: {why}"
        return evidence, f"{move}; {gain}{hint}.", ()
    count, after = _best_move(what_if, worst, layers)
    evidence |= {"move_layers": count, "seconds_after": after}
    if count == 0:
        cure = f"No whole layer of {name} can be moved with a gain; make its loss or embedding cheaper: {gain} at best"
    else:
        cure = f"Move {count} of the {layers} layers of {name} to the others: {why}; {_gain(what_if.as_is, after)}"
    return evidence, f"{cure}{hint}.", ()


def _best_move(what_if: WhatIf, worst: int, layers: int) -> tuple[int, float]:
    """Return how many layers to move from a stage, and the seconds of a step then."""
    found = what_if.found
    chunks = found.stages.shape[3] // found.pp
    mine = np.arange(found.stages.shape[3]) // chunks == worst
    layer = found.stages[:, :, :, ~mine].mean(axis=3, keepdims=True) * chunks / layers
    best = (0, what_if.as_is)
    for count in range(1, layers):
        more = math.ceil(count / max(1, found.pp - 1))  # what the fullest of the others gets
        moved = np.where(mine[None, None, None, :, None], -count, more) * layer / chunks
        seconds = what_if.seconds(_scaled(what_if, np.maximum(0, 1 + moved / found.stages)))
        if seconds >= best[1]:
            break
        best = (count, seconds)
    return best


def _scaled(what_if: WhatIf, factors: Floats, steps: Integers | None = None) -> dict[str, Floats]:
    """Return the durations with compute times (but not pauses) multiplied; of some steps, or of all."""
    found = what_if.found
    durations = dict(what_if.analysis.durations)
    times, pauses = found.times, found.pauses
    if steps is not None:
        durations = {op: each[steps] for op, each in durations.items()}
        times, pauses = times[:, steps], pauses[:, steps]
    return durations | in_order(found, (times - pauses) * factors + pauses)


def _lengths(what_if: WhatIf) -> Found:
    """Estimate the gain of sharing out: between moving microbatches as they are and making all of a step equal."""
    found = what_if.found
    total, count, _, dp = found.content.shape[1:]
    steps = np.linspace(0, total - 1, max(1, min(total, MOST_MOVED // (count * dp)))).round().astype(int)
    even = np.log(np.exp(found.content).mean(axis=(2, 4), keepdims=True)) - found.content
    best = what_if.as_is / what_if.seconds(_scaled(what_if, np.exp(even)))
    content = found.content[:, steps]
    costs = (found.stages * np.exp(content)).sum(axis=(0, 3))  # (steps, microbatches, dp)
    moved = content.copy()
    for step in range(len(steps)):
        lengths = np.sqrt(costs[step].T).ravel().tolist()  # a rank's microbatches follow one another
        for rank, mine in enumerate(balance(lengths, dp, count)):
            for place, (number,) in enumerate(mine):
                moved[:, step, place, :, rank] = content[:, step, number % count, :, number // count]
    before = what_if.seconds(_scaled(what_if, np.ones_like(content), steps))
    whole = before / what_if.seconds(_scaled(what_if, np.exp(moved - content), steps))
    best = max(best, whole)
    loads = costs.sum(axis=1)
    evidence = {
        "forward_variation": what_if.analysis.forward_variation,
        "forward_spread": found.variation,
        "forward_backward_correlation": found.together,
        "longest_rank_over_mean": float((loads.max(axis=1) / loads.mean(axis=1)).mean()),
        "gain_sequences_balanced": best,
        "gain_whole_microbatches_moved": whole,
    }
    cure = (
        "Redistribute sequences over ranks and microbatches by the sum of their squared lengths "
        f"(unicron.train.balance): up to {_faster(best)}, {_faster(whole)} if only whole microbatches change ranks."
    )
    return evidence, cure, ()


def _pauses(analysis: Analysis, found: TimeParts, gain: str) -> Found:
    long = found.pauses[found.pauses > 0]
    recorded = np.nan_to_num(analysis.durations["gc"]) if "gc" in analysis.durations else np.zeros(1)
    workers = (found.pauses > 0).any(axis=(0, 1, 2)).reshape(found.pp, -1, found.pauses.shape[4]).any(axis=1)
    paused = np.concatenate([long, recorded[recorded > 0]])
    evidence = {
        "pauses": len(paused),
        "median_pause_s": float(np.median(paused)),
        "pauses_a_worker_and_step": len(paused) / (len(analysis.steps) * analysis.ranks.size),
        "in_forward_share": float((found.pauses[0] > 0).sum() / len(long)) if len(long) else 0.0,
        "recorded_as_gc": int((recorded > 0).sum()),
        "workers_share": float(workers.mean()) if len(long) else float((recorded > 0).any(axis=(0, 1)).mean()),
    }
    cure = (
        "Plan garbage collection: on all ranks at once at the end of every n-th step (gc_every of "
        f"unicron.train.Session, or UNICRON_GC_EVERY): {evidence['pauses']} pauses of "
        f"{evidence['median_pause_s']:.2g} s came at times of their own; {gain}."
    )
    return evidence, cure, ()


def _network(analysis: Analysis, gain: str) -> Found:
    """Find transfers that take longer than usual, and whether it is one link."""
    extra = {
        op: np.maximum(np.nan_to_num(analysis.durations[op] - analysis.ideal_values[op]), 0)
        for op in COMMUNICATION & analysis.durations.keys()
    }
    totals = {op: float(each.sum()) for op, each in extra.items()}
    worst = max(totals, key=lambda op: totals[op])
    times, usual = analysis.durations[worst], analysis.ideal_values[worst]
    workers = extra[worst].sum(axis=(0, 1)).T  # (dp, pp)
    dp, stage = np.unravel_index(workers.argmax(), workers.shape)
    part = float(workers[dp, stage] / workers.sum()) if workers.sum() else 0.0
    one = part > 0.5 and workers.size > 2 and worst.endswith(("-send", "-recv"))
    rank = int(analysis.ranks[dp, stage])
    evidence = {
        "slowest_type": worst,
        "median_s": usual,
        "p99_s": float(np.nanquantile(times, 0.99)),
        "long_share": float(np.nanmean(np.where(np.isnan(times), np.nan, times > 2 * usual))),
        "worst_rank": rank,
        "worst_rank_share": part,
        "slowdown_by_type": {op: each for op, each in analysis.by_op.items() if each > 1.001},
    }
    if one:
        where = (
            f"at rank {rank} (data-parallel rank {analysis.dp_ranks[dp]}, stage {stage}); check its links, or drain it"
        )
    else:
        where = "in many places; look for a flapping link or switch, or for other traffic"
    cure = f"Check the network: {worst} takes up to {evidence['p99_s']:.2g} s, usually {usual:.2g} s, {where}: {gain}."
    return evidence, cure, (rank,) if one else ()
