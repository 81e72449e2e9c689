"""The measures of the study: what stragglers cost, and where the cost comes from."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from unicron_straggler.trace import COMMUNICATION, OPTYPES, Floats, Integers, Meta, Problem, Trace

TRUSTED_LAUNCH = 0.05
"""A simulated job further than this share from the traced one is not to be trusted (the study discards those)."""


@dataclass(frozen=True)
class Analysis:
    """What stragglers cost a job. Slowdowns are ratios of mean step times; times are seconds.

    Arrays over steps, data-parallel ranks (dp) and stages (pp) have these axes in this order; steps are in the order of
    `steps`, ranks and stages in theirs.

    Attributes:
        meta: the job.
        steps: numbers of the steps, rising.
        slowdown: S, simulated over ideal.
        waste: W, 1 - 1/S, the share of the GPU hours that a job without stragglers would save.
        launch_slowdown: traced over simulated: delays between operations, which the simulation has not.
        traced_mean_s: mean step time as traced.
        simulated_mean_s: mean step time of the simulation of the operations as traced.
        ideal_mean_s: mean step time with every operation at its ideal.
        by_op: S_t by op type (send and recv merged as forward-pp-comm and backward-pp-comm): only that type as traced.
        by_dp: (dp,) only that data-parallel rank as traced.
        by_stage: (pp,) only that stage as traced.
        worker_approximate: (dp, pp) the smaller of the two before.
        worker_exact: (dp, pp) only that worker as traced.
        slowest_ranks: the slowest 3 % of the ranks of the trace by `worker_approximate`, slowest first.
        slowest_ranks_exact: the same by `worker_exact`.
        m_w: share of the slowdown that goes when `slowest_ranks` are ideal. Not clipped; NaN without a slowdown.
        m_w_exact: the same for `slowest_ranks_exact`.
        m_s: share of the slowdown that goes when the last stage is ideal.
        all_mean: S if the ideal of every type were the mean.
        all_median: S if the ideal of every type were the median.
        correlation: of forward and backward times: "pooled" over workers, and "stage0", ... over one stage. Misleads.
        correlation_normalised: the same with each time divided by the mean of its worker and type.
        forward_variation: median over workers of the coefficient of variation of forward times.
        forward_mean_by_stage: (pp,) seconds.
        backward_mean_by_stage: (pp,) seconds.
        ideal_values: ideal seconds by op type.
        step_traced_s: (steps,)
        step_simulated_s: (steps,)
        step_ideal_s: the ideal time of a step, the same for all.
        step_by_op: (steps,) by op type, each step's ratio.
        step_by_dp: (steps, dp)
        step_by_stage: (steps, pp)
        step_worker_exact: (steps, dp, pp)
        durations: by op type, seconds over (steps, microbatches, pp, dp): traced time of compute, transfer time of
            communication. The microbatch axis is the place `seq_id`; it has length 1 for what happens once in a step.
            NaN where a stage has no such operation.
        computes: (pp, n, 3) what each stage computed in the order of the first step of data-parallel rank 0: code of
            the op type, seq_id, microbatch.
        problems: what is wrong with the trace.
    """

    meta: Meta
    steps: Integers
    slowdown: float
    waste: float
    launch_slowdown: float
    traced_mean_s: float
    simulated_mean_s: float
    ideal_mean_s: float
    by_op: Mapping[str, float]
    by_dp: Floats
    by_stage: Floats
    worker_approximate: Floats
    worker_exact: Floats
    slowest_ranks: tuple[int, ...]
    slowest_ranks_exact: tuple[int, ...]
    m_w: float
    m_w_exact: float
    m_s: float
    all_mean: float
    all_median: float
    correlation: Mapping[str, float]
    correlation_normalised: float
    forward_variation: float
    forward_mean_by_stage: Floats
    backward_mean_by_stage: Floats
    ideal_values: Mapping[str, float]
    step_traced_s: Floats
    step_simulated_s: Floats
    step_ideal_s: float
    step_by_op: Mapping[str, Floats]
    step_by_dp: Floats
    step_by_stage: Floats
    step_worker_exact: Floats
    durations: Mapping[str, Floats]
    computes: Integers
    problems: tuple[Problem, ...]

    @property
    def step_slowdown(self) -> Floats:
        """(steps,) S of each step."""
        return self.step_simulated_s / self.step_ideal_s

    @property
    def trustworthy(self) -> bool:
        """Whether simulation and trace agree within 5 % and every problem leaves the result standing."""
        return abs(self.launch_slowdown - 1) <= TRUSTED_LAUNCH and all(one.stands for one in self.problems)

    def as_json(self) -> dict[str, Any]:
        """Return the measures under the names that the authors' analyzer gives them."""
        raise NotImplementedError


def analyze(trace: Trace) -> Analysis:
    """Simulate the job of a trace with and without its stragglers.

    Raises:
        InvalidInputError: the trace has no whole step, or its operations don't fit the dependency model.
    """
    raise NotImplementedError
