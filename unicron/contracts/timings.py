"""A worker's record of an iteration: one entry for each operation, small enough to send often."""

from unicron.contracts.base import Record
from unicron.contracts.ranges import Number, Whole

OPERATIONS = (
    "forward-compute",
    "backward-compute",
    "forward-send",
    "forward-recv",
    "backward-send",
    "backward-recv",
    "params-all-gather",
    "grads-reduce-scatter",
    "layernorm-grads-all-reduce",
    "embedding-grads-all-reduce",
    "optimizer-clip-main-grad",
    "optimizer",
    "gc",
)
"""Names of the operations, as the traces of the straggler study have them."""

MOST_OPS = 20_000
"""Operations of one rank in one iteration; an iteration with more is not recorded."""

DEFAULT_SHARE = 0.1
"""Share of the iterations that is recorded unless somebody switches it."""


class Op(Record, array_like=True, frozen=True):
    """An operation, as an array of four whole numbers rather than a map.

    Attributes:
        kind: its place in `OPERATIONS`.
        microbatch: of the global batch; -1 for what happens once in an iteration.
        start_us: microseconds from the beginning of the rank's record.
        duration_us: microseconds; of a communication, waiting for the others included.
    """

    kind: Number
    microbatch: Number
    start_us: Whole
    duration_us: Whole


def period_of(share: float) -> int:
    """Return of how many iterations one is recorded; 0 for none. The same on all ranks, so that they choose the same.

    Args:
        share: of the iterations, from 0 to 1.
    """
    return max(1, round(1 / share)) if share > 0 else 0
