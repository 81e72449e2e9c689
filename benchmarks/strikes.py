"""What `benchmarks.parallel` and the peers beside it have in common: layouts, pace, where a rank is struck, medians."""

import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.struck import Point
from unicron.contracts.tasks import ParallelLayout

ROOT = Path(__file__).parents[1]
LAYOUTS = {
    "dp4": ParallelLayout(replicas=4),
    "dp2_tp2": ParallelLayout(replicas=2, tensor=2),
    "dp2_pp2": ParallelLayout(replicas=2, pipeline=2),
    "dp2_fsdp2": ParallelLayout(replicas=2, shard=2),
    "dp3_fsdp2": ParallelLayout(replicas=3, shard=2),
    "dp2_tp2_pp2": ParallelLayout(replicas=2, tensor=2, pipeline=2),
    "mcore_dp2_tp2": ParallelLayout(replicas=2, tensor=2),
    "mcore_dp2_pp2": ParallelLayout(replicas=2, pipeline=2),
    "mcore_dp2_tp2_pp2": ParallelLayout(replicas=2, tensor=2, pipeline=2),
}
MEGATRON = "mcore"
"""What the names of those begin with in which megatron-core's own model is trained, by examples/megatron."""

NODE = "node"
FAULTS = ("killed", "raised", "stopped", NODE)
PHASES = ("forward", "backward", "reduce", "update")
MICROBATCHES, MICROBATCH_S = 12, 0.25
"""Of a global batch; and about what one takes, of which a stopped rank's detection allows three."""

FIRST, APART = 3, 3
"""Iteration of the first strike, and how many from one to the next."""

BATCH, BLOCKS, CHUNKS = 8, 2, 4


def sizes(example: str) -> list[str]:
    """Return the arguments that make the examples take a microbatch of `BATCH` samples, in `CHUNKS` where they do."""
    at_once = BATCH // CHUNKS if example == "megatron" else BATCH
    return ["--batch", str(at_once), "--layers", str(BLOCKS), "--chunks", str(CHUNKS)]


def pace_s(layout: ParallelLayout) -> float:
    """Return the seconds for each sample and block that make a microbatch take `MICROBATCH_S`, or a little more."""
    passes = 3 * BLOCKS * BATCH / layout.shard
    if layout.pipeline > 1:
        passes *= (CHUNKS + layout.pipeline - 1) / (CHUNKS * layout.pipeline)
    return MICROBATCH_S / passes


def points(layout: ParallelLayout, fault: str, phases: Sequence[str]) -> list[Point]:
    """Return the strikes of a task: first and last ranks of the first and last replicas in turn."""
    last = Point("", "", layout.replicas - 1, layout.replica_workers - 1, 0)
    victims = [(last.replica, last.place), (0, 0), (last.replica, 0), (0, last.place)]
    return [
        Point(phase, fault, *victims[number % len(victims)], FIRST + number * APART)
        for number, phase in enumerate(phases)
    ]


def middle(values: Iterable[float | None]) -> float | None:
    """Return the median; None where there is nothing, or one of them never came."""
    found = list(values)
    there = [value for value in found if value is not None]
    return statistics.median(there) if there and len(there) == len(found) else None


def worst(values: Iterable[float | None]) -> float | None:
    """Return the greatest; None where one is missing."""
    found = list(values)
    there = [value for value in found if value is not None]
    return max(there) if there and len(there) == len(found) else None


def named(layout: str, fault: str, found: dict[str, Any]) -> dict[str, Any]:
    """Return figures with their whole names; seconds to the millisecond."""
    return {
        f"{layout}_{fault}_{name}": round(value, 3) if isinstance(value, float) and name.endswith("_s") else value
        for name, value in found.items()
    }


def say(text: str) -> None:
    """Tell how far it is."""
    print(text, file=sys.stderr, flush=True)
