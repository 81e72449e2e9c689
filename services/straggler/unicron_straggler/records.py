"""What a rank's record of an iteration must be like to be used."""

import math

from unicron.checks import MOST_WORKERS, Problem
from unicron.contracts.events import StepTimed
from unicron.contracts.timings import MOST_OPS, OPERATIONS

MOST_PROBLEMS = 5
"""Problems of one record that are told."""

MOST_US = 86_400 * 10**6
"""Longest record of one iteration, in microseconds."""


def timing_problems(timed: StepTimed) -> list[Problem]:
    """Return what keeps a rank's record of an iteration from being used."""
    found = []
    if not 1 <= timed.world_size <= MOST_WORKERS:
        found.append(Problem("world_size", timed.world_size, f"must be from 1 to {MOST_WORKERS}"))
    if not 0 <= timed.rank < timed.world_size:
        found.append(Problem("rank", timed.rank, f"must be from 0 to {timed.world_size - 1}"))
    if timed.epoch < 0 or timed.iteration < 0:
        found.append(Problem("iteration", timed.iteration, f"it and the epoch {timed.epoch} count from 0"))
    if not math.isfinite(timed.began):
        found.append(Problem("began", timed.began, "must be a finite number of Unix seconds"))
    if not 1 <= len(timed.ops) <= MOST_OPS:
        found.append(Problem("ops", len(timed.ops), f"must be 1 to {MOST_OPS} operations"))
    for op in timed.ops:
        if not (0 <= op.kind < len(OPERATIONS) and op.microbatch >= -1):
            found.append(
                Problem("ops", op, f"its kind must be from 0 to {len(OPERATIONS) - 1}, its microbatch from -1")
            )
        elif not (0 <= op.start_us <= MOST_US and 0 <= op.duration_us <= MOST_US):
            found.append(Problem("ops", op, f"start and duration must be from 0 to {MOST_US} microseconds"))
        if len(found) >= MOST_PROBLEMS:
            break
    return found
