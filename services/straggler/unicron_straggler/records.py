"""Checks a rank's record of an iteration."""

from collections.abc import Iterator

from unicron.checks import MOST_WORKERS
from unicron.contracts.events import StepTimed
from unicron.contracts.timings import OPERATIONS
from unicron.errors import Problem

MOST_US = 86_400 * 10**6
"""Longest record of one iteration, in microseconds."""


def timing_problems(timed: StepTimed) -> Iterator[Problem]:
    """Yield what keeps a rank's record of an iteration from being used."""
    if not 1 <= timed.world_size <= MOST_WORKERS:
        yield Problem("world_size", timed.world_size, f"must be from 1 to {MOST_WORKERS}")
    if not 0 <= timed.rank < timed.world_size:
        yield Problem("rank", timed.rank, f"must be from 0 to {timed.world_size - 1}")
    if timed.epoch < 0 or timed.iteration < 0:
        yield Problem("iteration", timed.iteration, f"it and the epoch {timed.epoch} count from 0")
    if not timed.ops:
        yield Problem("ops", [], "holds no operation")
    for op in timed.ops:
        if not (0 <= op.kind < len(OPERATIONS) and op.microbatch >= -1):
            yield Problem("ops", op, f"its kind must be from 0 to {len(OPERATIONS) - 1}, its microbatch from -1")
        if not (0 <= op.start_us <= MOST_US and 0 <= op.duration_us <= MOST_US):
            yield Problem("ops", op, f"start and duration must be from 0 to {MOST_US} microseconds")
