"""The shared data types: a trace of operations, and what was wrong with it."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from unicron.contracts.timings import OPERATIONS

OPTYPES = OPERATIONS
"""Names of the operations; `Trace.optype` holds places in this tuple."""

CODES = {name: code for code, name in enumerate(OPTYPES)}
"""The place of each name."""

COMMUNICATION = frozenset(
    {
        "forward-send",
        "forward-recv",
        "backward-send",
        "backward-recv",
        "params-all-gather",
        "grads-reduce-scatter",
        "embedding-grads-all-reduce",
        "optimizer-clip-main-grad",
    }
)
"""Operations that wait for others: what counts of them is the transfer time, not the time traced."""

Floats = NDArray[np.floating]
Integers = NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class Meta:
    """The job that a trace is of; sizes are counts of ranks, `vpp_size` of model chunks in a stage.

    One rank of each tensor-parallel (and DeepSpeed-Ulysses, `dsp_size`) group is in the trace.
    """

    name: str
    dp_size: int
    pp_size: int
    tp_size: int = 1
    dsp_size: int = 1
    vpp_size: int = 1
    world_size: int = 0
    """0: not known."""
    run_id: int = 0


@dataclass(frozen=True, slots=True)
class TraceProblem:
    """Something wrong with a trace.

    Attributes:
        name: in kebab-case, the same for every trace, such as "missing-ranks".
        text: a sentence for people: what, where.
        dropped: operations left out for it.
        stands: whether what is computed from the rest still holds.
    """

    name: str
    text: str
    dropped: int = 0
    stands: bool = True


@dataclass(frozen=True, eq=False)
class Trace:
    """The operations of a job, one element of each column for each; in no particular order.

    Attributes:
        meta: the job.
        dp_rank: data-parallel rank.
        stage: pipeline stage.
        rank: global rank.
        step: number of the training step as traced; steps need not follow one another.
        optype: place in `OPTYPES`.
        start: seconds since the earliest start of the step; times may have single precision.
        duration: seconds.
        seq_id: place among the operations of its type on its rank in its step, from 0 in order of start.
        mc: model chunk (virtual stage) of a compute operation; -1 where it does not apply.
        mb_id: microbatch; -1 where it does not apply.
        gmc: chunk among all of the model; -1 where it does not apply.
        problems: what the reader found and what it dropped.
    """

    meta: Meta
    dp_rank: Integers
    stage: Integers
    rank: Integers
    step: Integers
    optype: Integers
    start: Floats
    duration: Floats
    seq_id: Integers
    mc: Integers
    mb_id: Integers
    gmc: Integers
    problems: tuple[TraceProblem, ...] = field(default=())

    def __len__(self) -> int:
        """Return the number of operations."""
        return len(self.start)
