"""Why a job is slow: which causes can be seen, what each costs, and what to do about it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unicron_straggler.analysis import cures
from unicron_straggler.analysis.measures import Analysis
from unicron_straggler.analysis.parts import LENGTHS, NETWORK, PAUSES, SLOW, STAGE, without
from unicron_straggler.analysis.what_if import WhatIf

NONE = "none"
CAUSES = (SLOW, STAGE, LENGTHS, PAUSES, NETWORK, NONE)

LEAST_GAIN = 0.02
"""A cause that costs less than this share of a step is left out."""


@dataclass(frozen=True)
class Diagnosis:
    """One cause of slowness.

    Attributes:
        cause: one of `CAUSES`.
        share: of the waste that it explains. What it costs is the mean of what goes when it alone is cured, and of what
            comes when it alone is left of all causes found; the waste is the simulated time less the ideal one, or less
            that with all causes cured where that is shorter (a slow worker among few slows the ideal down too).
        gain: mean step time as it is over that with the cause cured; 1.25 says a quarter more steps.
        evidence: the figures it rests on, ready for JSON.
        cure: what to do, in a sentence.
        ranks: global ranks of the culprits, worst first; empty where it is nobody in particular.
    """

    cause: str
    share: float
    gain: float
    evidence: Mapping[str, Any]
    cure: str
    ranks: tuple[int, ...] = ()


def diagnose(analysis: Analysis, *, layers: int = 0) -> list[Diagnosis]:
    """Return the causes found, that which explains most of the waste first; "none" alone if there is none.

    Args:
        analysis: of the job.
        layers: of each stage, so that the cure of a stage that has too much to do can name layers; 0: not known.
    """
    what_if = WhatIf(analysis)
    causes = what_if.suspects()
    best = what_if.seconds(without(analysis, what_if.found, causes))
    most = what_if.as_is - min(best, analysis.ideal_mean_s)
    worth = {cause: what_if.worth(cause, causes, best) for cause in causes}
    found = []
    for cause, (saved, seconds) in sorted(worth.items(), key=lambda each: -each[1][0]):
        if saved <= LEAST_GAIN * what_if.as_is:
            continue
        evidence, cure, ranks = cures.of(cause, what_if, seconds, layers)
        found.append(Diagnosis(cause, saved / most, what_if.as_is / seconds, evidence, cure, ranks))
    return found or [_nothing(analysis)]


def _nothing(analysis: Analysis) -> Diagnosis:
    lost = f"{100 * analysis.waste:.1f} % of the time is lost to stragglers"
    if analysis.slowdown < 1.1:
        cure = f"Nothing to be done: {lost}, as chance has it."
    else:
        cure = f"{lost}, but no cause that is known here explains it; look at the pictures of workers and steps."
    evidence = {"slowdown": analysis.slowdown, "forward_variation": analysis.forward_variation}
    return Diagnosis(NONE, 0.0, 1.0, evidence, cure)
