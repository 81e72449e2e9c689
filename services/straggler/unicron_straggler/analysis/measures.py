"""The measures of the study: what stragglers cost, and where the cost comes from."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from unicron_straggler.analysis import tensors
from unicron_straggler.analysis.model import BACKWARD, FORWARD, Graph
from unicron_straggler.analysis.simulate import Scenario, alone_times, ideal_time, step_times
from unicron_straggler.analysis.trace import COMMUNICATION, OPTYPES, Floats, Integers, Meta, Trace, TraceProblem

MEDIAN = COMMUNICATION | {"layernorm-grads-all-reduce"}
"""Types whose ideal is the median; that of the others is the mean."""
SLOWEST_PERCENT = 3
"""So many of the ranks are fixed for M_w."""
TRUSTED_LAUNCH = 0.05
"""A simulated job further than this share from the traced one is not to be trusted (the study discards those)."""


@dataclass(frozen=True, eq=False)
class Analysis:
    """The costs of a job's stragglers. Slowdowns are ratios of mean step times; times are seconds.

    Arrays over steps, data-parallel ranks (dp) and stages (pp) have these axes in this order; steps are in the order of
    `steps`, ranks and stages in theirs.

    Attributes:
        meta: the job.
        steps: numbers of the steps, rising.
        dp_ranks: the data-parallel ranks that the dp axes stand for: all, but for those missing in the trace.
        ranks: (dp, pp) global ranks.
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
        graph: which operation waits for which; with `durations` and `simulate` one can ask what-ifs of one's own.
        problems: what is wrong with the trace.
    """

    meta: Meta
    steps: Integers
    dp_ranks: Integers
    ranks: Integers
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
    graph: Graph
    problems: tuple[TraceProblem, ...]

    @property
    def step_slowdown(self) -> Floats:
        """(steps,) S of each step."""
        return self.step_simulated_s / self.step_ideal_s

    @property
    def trustworthy(self) -> bool:
        """Whether simulation and trace agree within 5 % and every problem leaves the result standing."""
        return abs(self.launch_slowdown - 1) <= TRUSTED_LAUNCH and all(one.stands for one in self.problems)

    def as_json(self) -> dict[str, Any]:
        """Return the measures under the names that the authors' analyzer gives them; slowdowns with the worst first."""
        meta = self.meta
        dp, stages = [str(rank) for rank in self.dp_ranks], [str(stage) for stage in range(meta.pp_size)]
        workers = [f"{rank},{stage}" for rank in dp for stage in stages]
        return {
            "meta": {
                "trial_name": meta.name,
                "run_id": meta.run_id,
                "dp_size": meta.dp_size,
                "dsp_size": meta.dsp_size,
                "pp_size": meta.pp_size,
                "tp_size": meta.tp_size,
                "vpp_size": meta.vpp_size,
                "world_size": meta.world_size,
            },
            "S": self.slowdown,
            "W": self.waste,
            "launch_slowdown": self.launch_slowdown,
            "T_trace_mean": self.traced_mean_s,
            "T_sim_mean": self.simulated_mean_s,
            "T_ideal_mean": self.ideal_mean_s,
            "S_t": _worst_first(self.by_op),
            "S_dp": _worst_first(dict(zip(dp, self.by_dp.tolist(), strict=True))),
            "S_pp": _worst_first(dict(zip(stages, self.by_stage.tolist(), strict=True))),
            "S_w_approx_min": dict(zip(workers, self.worker_approximate.ravel().tolist(), strict=True)),
            "S_w_exact": dict(zip(workers, self.worker_exact.ravel().tolist(), strict=True)),
            "top3pct_ranks": list(self.slowest_ranks),
            "top3pct_ranks_exact": list(self.slowest_ranks_exact),
            "Mw": self.m_w,
            "Mw_exactSw": self.m_w_exact,
            "Ms": self.m_s,
            "S_if_all_mean": self.all_mean,
            "S_if_all_median": self.all_median,
            "fb_corr": dict(self.correlation),
            "fwd_mean_by_stage": dict(zip(stages, self.forward_mean_by_stage.tolist(), strict=True)),
            "bwd_mean_by_stage": dict(zip(stages, self.backward_mean_by_stage.tolist(), strict=True)),
            "ideal_values": {
                name: {"is_comm": name in COMMUNICATION, "ideal_s": value}
                for name, value in sorted(self.ideal_values.items())
            },
            "step_S": _worst_first(
                dict(zip([str(step) for step in self.steps], self.step_slowdown.tolist(), strict=True))
            ),
        }


def _worst_first(slowdowns: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(slowdowns.items(), key=lambda item: -item[1]))


def analyze(trace: Trace) -> Analysis:
    """Simulate the job of a trace with and without its stragglers.

    Raises:
        InvalidInputError: the trace has no whole step, or its operations don't fit the dependency model.
    """
    job = tensors.job(trace)
    averages = ideals(job)
    ideal = averages.chosen
    ideal_s = ideal_time(job.graph, ideal)
    merged = _merged(job)
    simulated, of_types, of_stages, without_last = _simulated(job, ideal, merged, trace.meta.pp_size)
    lone = [Scenario(), *(Scenario(stages=frozenset({stage})) for stage in range(trace.meta.pp_size))]
    alone = alone_times(job.graph, job.durations, ideal, lone)
    workers = alone[1:].transpose(1, 2, 0)
    by_dp, by_stage = alone[0].mean(0) / ideal_s, of_stages.mean(1) / ideal_s
    approximate, exact = np.minimum(by_dp[:, None], by_stage), workers.mean(0) / ideal_s
    slowest, slowest_exact = _slowest(job.ranks, approximate), _slowest(job.ranks, exact)
    fixed = [Scenario(fixed=np.isin(job.ranks, ranks)) for ranks in (slowest, slowest_exact)]
    without = [*step_times(job.graph, job.durations, ideal, fixed).mean(1), without_last.mean()]
    mean = float(simulated.mean())
    shares = [_share(mean, float(each), ideal_s) for each in without]
    variations = _variations(job)
    return Analysis(
        meta=trace.meta,
        steps=job.steps,
        dp_ranks=job.dp_ranks,
        ranks=job.ranks,
        slowdown=mean / ideal_s,
        waste=1 - ideal_s / mean,
        launch_slowdown=float(job.step_traced_s.mean()) / mean,
        traced_mean_s=float(job.step_traced_s.mean()),
        simulated_mean_s=mean,
        ideal_mean_s=ideal_s,
        by_op=dict(zip(merged, (of_types.mean(1) / ideal_s).tolist(), strict=True)),
        by_dp=by_dp,
        by_stage=by_stage,
        worker_approximate=approximate,
        worker_exact=exact,
        slowest_ranks=slowest,
        slowest_ranks_exact=slowest_exact,
        m_w=shares[0],
        m_w_exact=shares[1],
        m_s=shares[2],
        all_mean=mean / ideal_time(job.graph, averages.means),
        all_median=mean / ideal_time(job.graph, averages.medians),
        correlation=variations.correlation,
        correlation_normalised=variations.normalised,
        forward_variation=variations.forward,
        forward_mean_by_stage=variations.forward_mean,
        backward_mean_by_stage=variations.backward_mean,
        ideal_values={OPTYPES[code]: value for code, value in ideal.items()},
        step_traced_s=job.step_traced_s,
        step_simulated_s=simulated,
        step_ideal_s=ideal_s,
        step_by_op={name: of_types[at] / ideal_s for at, name in enumerate(merged)},
        step_by_dp=alone[0] / ideal_s,
        step_by_stage=of_stages.T / ideal_s,
        step_worker_exact=workers / ideal_s,
        durations={OPTYPES[code]: each for code, each in job.durations.items()},
        computes=job.computes,
        graph=job.graph,
        problems=job.problems,
    )


def _simulated(
    job: tensors.Job, ideal: dict[int, float], merged: dict[str, frozenset[int]], stages: int
) -> tuple[Floats, Floats, Floats, Floats]:
    """Return each step's seconds as traced; if only one op type, only one stage, all but the last stage is so."""
    scenarios = [
        Scenario(),
        *(Scenario(codes=codes) for codes in merged.values()),
        *(Scenario(stages=frozenset({stage})) for stage in range(stages)),
        Scenario(stages=frozenset(range(stages - 1))),
    ]
    times = step_times(job.graph, job.durations, ideal, scenarios)
    return times[0], times[1 : 1 + len(merged)], times[1 + len(merged) : -1], times[-1]


@dataclass(frozen=True)
class Ideals:
    """Seconds of each op type by code, over all steps, microbatches, stages and data-parallel ranks.

    Attributes:
        chosen: what the study holds for ideal: the median of communication, the mean of all else.
        means: the mean of every type.
        medians: the median of every type.
    """

    chosen: dict[int, float]
    means: dict[int, float]
    medians: dict[int, float]


def ideals(job: tensors.Job) -> Ideals:
    """Return what operations would take in a job without stragglers."""
    means, medians = {}, {}
    for code, each in job.durations.items():
        kept = each[~np.isnan(each)]
        means[code] = float(kept.mean(dtype=np.float64))
        medians[code] = tensors.median(kept)
    chosen = {code: medians[code] if OPTYPES[code] in MEDIAN else mean for code, mean in means.items()}
    return Ideals(chosen, means, medians)


def _merged(job: tensors.Job) -> dict[str, frozenset[int]]:
    """Return the codes of each type of S_t: sends and receives of a direction are one."""
    found: dict[str, set[int]] = {}
    for code in job.durations:
        name = OPTYPES[code]
        direction = name.partition("-")[0]
        found.setdefault(f"{direction}-pp-comm" if name.endswith(("-send", "-recv")) else name, set()).add(code)
    return {name: frozenset(codes) for name, codes in found.items()}


def _slowest(ranks: Integers, slowdowns: Floats) -> tuple[int, ...]:
    """Return the slowest 3 % of the ranks, rounded up; of equals the lower first."""
    count = -(-ranks.size * SLOWEST_PERCENT // 100)
    order = np.lexsort((ranks.ravel(), -slowdowns.ravel()))
    return tuple(ranks.ravel()[order[:count]].tolist())


def _share(simulated_s: float, without_s: float, ideal_s: float) -> float:
    """Return which share of the slowdown goes away; NaN where there is none to go."""
    return (simulated_s - without_s) / (simulated_s - ideal_s) if simulated_s != ideal_s else math.nan


@dataclass(frozen=True)
class _Variations:
    """How forward and backward times vary, and how much together."""

    correlation: dict[str, float]
    normalised: float
    forward: float
    forward_mean: Floats
    backward_mean: Floats


def _variations(job: tensors.Job) -> _Variations:
    forward, backward = job.durations[FORWARD].astype(np.float64), job.durations[BACKWARD].astype(np.float64)
    forward_mean, backward_mean = (each.mean((0, 1)) for each in (forward, backward))  # (pp, dp)
    correlation = {"pooled": _correlation(forward, backward)}
    for stage in range(forward.shape[2]):
        correlation[f"stage{stage}"] = _correlation(forward[:, :, stage], backward[:, :, stage])
    return _Variations(
        correlation,
        _correlation(forward / forward_mean, backward / backward_mean),
        tensors.median(forward.std((0, 1)) / forward_mean),
        forward_mean.mean(1),
        backward_mean.mean(1),
    )


def _correlation(ones: Floats, others: Floats) -> float:
    """Return Pearson's correlation; NaN if one of the two does not vary."""
    ones, others = ones - ones.mean(), others - others.mean()
    size = math.sqrt(float((ones * ones).sum()) * float((others * others).sum()))
    return float((ones * others).sum()) / size if size else math.nan
