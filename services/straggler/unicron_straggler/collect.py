"""Puts the records of the ranks of a task together: iterations of which every rank is there, on one clock."""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

from unicron.contracts.events import StepTimed
from unicron.contracts.timings import OPERATIONS
from unicron_straggler.analysis.trace import CODES, COMMUNICATION, Floats, Integers, Meta, Trace

OPEN = 4
"""Iterations that may wait for ranks at the same time; ranks are never further apart."""

MOST_OPS = 1_000_000
"""Operations that are held of one task, whose analysis takes about a second; a window ends with them."""

REDUCE = CODES["grads-reduce-scatter"]
MICROSECOND = 1e-6

MISSING, REGROUPED, TOO_LARGE = "ranks missing", "membership changed", "too large"
"""Why a recorded iteration is left out."""


@dataclass(frozen=True)
class RankStep:
    """The operations of one rank in one iteration.

    Attributes:
        began: Unix seconds of the rank's clock, to which the operations relate.
        ops: (n, 5) kind, microbatch, start and duration in microseconds, place among those of its kind.
        counts: operations by kind.
    """

    worker: str
    node: str
    slot: int
    began: float
    ops: Integers
    counts: Integers

    @classmethod
    def from_record(cls, timed: StepTimed) -> Self:
        """Return what a rank recorded."""
        seen = [0] * len(OPERATIONS)
        rows = []
        for op in timed.ops:
            rows.append((op.kind, op.microbatch, op.start_us, op.duration_us, seen[op.kind]))
            seen[op.kind] += 1
        return cls(timed.worker, timed.node, timed.slot, timed.began, np.array(rows, np.int64), np.array(seen))

    @property
    def reduce_end(self) -> float:
        """Unix seconds of the rank's clock at which its reduce ended, NaN where it had none."""
        found = self.ops[self.ops[:, 0] == REDUCE]
        return float(self.began + found[-1, 2:4].sum() * MICROSECOND) if len(found) else float("nan")


@dataclass(frozen=True)
class Step:
    """An iteration of which every rank is there; `ranks` in their order."""

    iteration: int
    ranks: list[RankStep]


@dataclass
class Collector:
    """The records of one task in one membership.

    Attributes:
        whole: iterations that wait for the rest of their window, rising.
        dropped: iterations left out since this was asked last, by reason.
    """

    task: str
    epoch: int = -1
    world_size: int = 0
    whole: list[Step] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    _open: dict[int, dict[int, RankStep]] = field(default_factory=dict)
    _held: int = 0
    _latest: int = -1

    def add(self, timed: StepTimed) -> None:
        """Take the record of one rank in; what is late, or of an older membership, is ignored."""
        if timed.epoch > self.epoch or (timed.epoch == self.epoch and timed.world_size != self.world_size):
            self._regroup(timed)
        if timed.epoch < self.epoch or timed.iteration <= self._latest:
            return
        ranks = self._open.setdefault(timed.iteration, {})
        if timed.rank not in ranks:
            ranks[timed.rank] = RankStep.from_record(timed)
            self._held += len(timed.ops)
        if len(ranks) == self.world_size:
            self._complete(timed.iteration)
        elif len(self._open) > OPEN:
            self._leave_out(min(self._open), MISSING)
        elif self._held > MOST_OPS and not self.whole:
            self._leave_out(timed.iteration, TOO_LARGE)

    @property
    def full(self) -> bool:
        """Whether no more iterations should be waited for."""
        return bool(self.whole) and self._held > MOST_OPS

    def take_window(self) -> list[Step]:
        """Return the whole iterations, and begin anew."""
        taken, self.whole = self.whole, []
        self._held = sum(len(rank.ops) for ranks in self._open.values() for rank in ranks.values())
        return taken

    def _regroup(self, timed: StepTimed) -> None:
        """A new membership: workers have other ranks, so what was recorded before says nothing about them."""
        if lost := len(self.whole) + len(self._open):
            self.dropped[REGROUPED] += lost
        self.epoch, self.world_size, self._latest = timed.epoch, timed.world_size, -1
        self.whole, self._open, self._held = [], {}, 0

    def _complete(self, iteration: int) -> None:
        """All ranks of `iteration` are there; what is missing of earlier ones will not come any more."""
        ranks = self._open.pop(iteration)
        for earlier in sorted(each for each in self._open if each < iteration):
            self._leave_out(earlier, MISSING)
        self._latest = iteration
        self.whole.append(Step(iteration, [ranks[rank] for rank in range(self.world_size)]))

    def _leave_out(self, iteration: int, reason: str) -> None:
        self._held -= sum(len(rank.ops) for rank in self._open.pop(iteration).values())
        self._latest = max(self._latest, iteration)
        self.dropped[reason] += 1


def offsets(steps: list[Step]) -> Floats:
    """Return by how many seconds the clock of each rank is ahead of that of rank 0.

    A reduce ends on all ranks at the same time; the median over the window leaves out the odd delay.
    """
    ends = np.array([[rank.reduce_end for rank in step.ranks] for step in steps])
    ahead = ends - ends[:, :1]
    return np.asarray(np.nan_to_num(np.median(ahead, axis=0)), np.float64)


def trace_of(task: str, steps: list[Step]) -> tuple[Trace, int]:
    """Return the window as a trace, on the clock of rank 0, and how many operations were left out of it.

    Ranks may have different numbers of microbatches, where the global batch can't be shared out evenly. Only as many as
    every rank has are looked at: the others are no straggler's fault.
    """
    ahead, world = offsets(steps), len(steps[0].ranks)
    records = [record for step in steps for record in step.ranks]
    size = np.array([len(record.ops) for record in records])
    common = np.array([np.min([record.counts for record in step.ranks], axis=0) for step in steps])
    common[:, CODES["gc"]] = MOST_OPS  # not every rank needs to have collected garbage
    at = np.repeat(np.repeat(np.arange(len(steps)), world), size)
    rank = np.repeat(np.tile(np.arange(world), len(steps)), size)
    kind, microbatch, begun, duration, place = np.vstack([record.ops for record in records]).T
    start = begun * MICROSECOND + np.repeat([record.began for record in records], size) - ahead[rank]
    earliest = np.full(len(steps), np.inf)
    np.minimum.at(earliest, at, start)
    start -= earliest[at]
    kept = place < common[at, kind]
    rank, kind, microbatch, duration, place, at, start = (
        column[kept] for column in (rank, kind, microbatch, duration, place, at, start)
    )
    nothing = np.zeros_like(rank)
    trace = Trace(
        meta=Meta(name=task, dp_size=world, pp_size=1, world_size=world),
        dp_rank=rank,
        stage=nothing,
        rank=rank,
        step=np.array([step.iteration for step in steps])[at],
        optype=kind,
        start=start,
        duration=duration * MICROSECOND,
        seq_id=place,
        mc=nothing,
        mb_id=np.where(microbatch < 0, -1, place),
        gmc=nothing,
    )
    return trace, int((~kept).sum())


def as_fast_as_others(trace: Trace, rank: int) -> Trace:
    """Return the trace as if `rank` had worked as long as the others did on average, operation by operation.

    What its operations wait for stays as it is. The study compares with the mean over all workers, the slow one
    included; among few workers that is far from what they would achieve without it.
    """
    _, at = np.unique(np.column_stack([trace.step, trace.optype, trace.seq_id]), axis=0, return_inverse=True)
    others = trace.rank != rank
    count = np.bincount(at, others)
    mean = np.bincount(at, np.where(others, trace.duration, 0.0)) / np.maximum(count, 1)
    own_work = ~np.isin(trace.optype, [CODES[name] for name in COMMUNICATION])
    replaced = ~others & own_work & (count[at] > 0)
    return replace(trace, duration=np.where(replaced, mean[at], trace.duration))
