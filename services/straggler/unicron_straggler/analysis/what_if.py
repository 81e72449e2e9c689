"""How long a step of a job takes, on average, without some of the causes of slowness."""

from collections.abc import Collection, Mapping

import numpy as np

from unicron_straggler.analysis import simulate
from unicron_straggler.analysis.measures import Analysis
from unicron_straggler.analysis.parts import LEAST_SLOW, LENGTHS, NETWORK, PAUSES, SLOW, STAGE, Parts, parts, without
from unicron_straggler.analysis.trace import CODES, Floats


class WhatIf:
    """How long a step takes, on average, without some of the causes."""

    def __init__(self, analysis: Analysis) -> None:
        self.analysis = analysis
        self.found: Parts = parts(analysis)
        self.as_is = analysis.simulated_mean_s
        self._ideal = {CODES[op]: seconds for op, seconds in analysis.ideal_values.items()}

    def suspects(self) -> list[str]:
        """Return the causes that there are signs of."""
        found, durations = self.found, self.analysis.durations
        recorded = bool(np.nan_to_num(durations["gc"]).any()) if "gc" in durations else False
        stages = stage_times(found)
        signs = {
            SLOW: found.slowness.any(),
            STAGE: stages.max() > (1 + LEAST_SLOW) * stages.mean(),
            LENGTHS: found.content.any(),
            PAUSES: found.pauses.any() or recorded,
            NETWORK: True,
        }
        return [cause for cause, sign in signs.items() if sign]

    def worth(self, cause: str, causes: Collection[str], best: float) -> tuple[float, float]:
        """Return the seconds of a step that `cause` costs, and those a step takes with only that cured.

        Args:
            cause: one of `causes`.
            causes: all that there are signs of.
            best: seconds of a step with all of them cured.
        """
        cured = self.seconds(without(self.analysis, self.found, [cause]))
        others = [each for each in causes if each != cause]
        left = self.seconds(without(self.analysis, self.found, others))
        return ((self.as_is - cured) + (left - best)) / 2, cured

    def seconds(self, durations: Mapping[str, Floats]) -> float:
        """Return the mean seconds of a step with these durations."""
        coded = {CODES[op]: each for op, each in durations.items()}
        times = simulate.step_times(self.analysis.graph, coded, self._ideal, [simulate.Scenario()])
        return float(times.mean())


def stage_times(found: Parts) -> Floats:
    """Return (pp,) mean seconds of forward and backward of a microbatch, slow workers and pauses taken out."""
    return np.asarray(found.stages.sum(axis=0).reshape(found.pp, -1).sum(axis=1))
