"""Analyses one window of a task: the costs of its stragglers, and which they are."""

from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from unicron.contracts.answers import StragglerWindow
from unicron.errors import InvalidInputError
from unicron_straggler.analysis.diagnosis import NONE, Diagnosis, diagnose
from unicron_straggler.analysis.measures import Analysis, analyze
from unicron_straggler.analysis.parts import SLOW
from unicron_straggler.analysis.trace import Trace
from unicron_straggler.collect import RankStep, Step, as_fast_as_others, trace_of

UNKNOWN = "unknown"
"""The diagnosis of a slow window of which no cause explains enough."""

MOST_SLOW = 0.5
"""Share of a window's iterations that must be slow themselves (one that is very slow makes no slow window), and of the
waste that a cause must explain to be believed at once."""

ALONE = 0.7
"""Share of the waste that goes with one worker, from which on that worker is to blame."""


@dataclass(frozen=True)
class WindowVerdict:
    """The result of a window.

    Attributes:
        window: for the history.
        culprit: the rank that is to blame, where it is one.
        elsewhere: workers on other nodes than the culprit's, where it computes slowly; else 0.
        sound: the records explain the iterations; else they say neither that the task is slow nor that it is not.
    """

    window: StragglerWindow
    culprit: RankStep | None = None
    elsewhere: int = 0
    sound: bool = True


def judge(task: str, epoch: int, steps: list[Step], threshold: float, at: float) -> WindowVerdict:
    """Analyse whole iterations of one membership.

    Args:
        task: its name.
        epoch: of the membership.
        steps: of the window.
        threshold: slowdown above which iterations and windows are slow.
        at: Unix seconds.
    """
    window = StragglerWindow(
        at=at,
        epoch=epoch,
        world_size=len(steps[0].ranks),
        first=steps[0].iteration,
        last=steps[-1].iteration,
        steps=len(steps),
        slowdown=1.0,
        waste=0.0,
    )
    trace, left_out = trace_of(task, steps)
    if not trace.duration.any():
        return WindowVerdict(replace(window, problems=["no operation took any time"]), sound=False)
    try:
        analysis = analyze(trace)
    except InvalidInputError as error:
        return WindowVerdict(replace(window, problems=[str(error)]), sound=False)
    problems = [problem.text for problem in analysis.problems]
    if left_out:
        problems.append(f"{left_out} operations of microbatches that not every rank has were left out")
    if not analysis.trustworthy:
        problems.append(f"iterations took {analysis.launch_slowdown:.3f} times as long as their operations explain")
    slow = analysis.slowdown > threshold and float((analysis.step_slowdown > threshold).mean()) > MOST_SLOW
    window = replace(
        window,
        slowdown=analysis.slowdown,
        waste=analysis.waste,
        slow=slow and analysis.trustworthy,
        problems=problems,
    )
    return (
        _explained(window, trace, analysis, steps[-1].ranks)
        if window.slow
        else WindowVerdict(window, sound=analysis.trustworthy)
    )


def _explained(window: StragglerWindow, trace: Trace, analysis: Analysis, ranks: list[RankStep]) -> WindowVerdict:
    """Find why a window is slow, and which rank is to blame."""
    first = diagnose(analysis)[0]
    if first.share < MOST_SLOW:
        first = _slow_somehow(trace, analysis) or first
    culprit = ranks[first.ranks[0]] if first.ranks else None
    window = replace(
        window,
        diagnosis=UNKNOWN if first.cause == NONE else first.cause,
        worker=culprit.worker if culprit else "",
        gain=first.gain,
        evidence=msgspec.json.encode(first.evidence).decode(),
        cure=first.cure,
    )
    if first.cause != SLOW or culprit is None:
        return WindowVerdict(window, culprit)
    return WindowVerdict(window, culprit, sum(other.node != culprit.node for other in ranks))


def _slow_somehow(trace: Trace, analysis: Analysis) -> Diagnosis | None:
    """Blame the one worker without which most of the waste would go, though its computing does not look slow.

    Live, a forward begins when its microbatch is handed out: a worker that waits for its data has slow forwards only.
    """
    rank = analysis.slowest_ranks_exact[0]
    as_is, without = analysis.simulated_mean_s, analyze(as_fast_as_others(trace, rank)).simulated_mean_s
    share = (as_is - without) / (as_is - analysis.ideal_mean_s)
    if share < ALONE:
        return None
    gain = as_is / without
    cure = (
        f"Look at what rank {rank} does beside computing, such as loading data, or drain its node: "
        f"with rank {rank} as fast as the others, steps are {gain:.2f} times as fast."
    )
    return Diagnosis(SLOW, share, gain, {"share": share}, cure, (rank,))
