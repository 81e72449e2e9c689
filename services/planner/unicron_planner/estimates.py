"""D_running and D_transition of equation 3, from what this cluster has seen. Pure functions on `state`.

Plans are made with believed values, which follow the estimates only when those have moved by `DRIFT`: a plan that was
prepared and one that is computed then rest on the same numbers, and what was worked out before can be kept.
"""

from msgspec.structs import replace

from unicron.contracts.base import Record
from unicron_planner.state import DurationSums, PlannerState

DRIFT = 0.05
"""Change of an estimate, as a part of it, from which on it is believed."""

MEMORY = 50
"""Transitions after which the older ones count half."""

FAILURE = "failure"
RESIZE = "resize"
RELAYOUT = "relayout"
"""The shape of its replicas changes: all its processes start anew and its state is cut up in another way."""

LONGEST_S = 3600.0
"""A transition that took longer waited for something else, such as nodes."""

KINDS = (FAILURE, RESIZE, RELAYOUT)


class PlannerOptions(Record, kw_only=True, frozen=True):
    """The options of an administrator.

    Attributes:
        transition_s: D_transition in seconds before any was observed; counts as one observation of each kind.
        prior_failures: sev1 failures that were seen before this cluster, the shape of the Gamma prior.
        prior_worker_s: worker-seconds in which they were seen, its rate. By default three a week among 128 workers
            (paper section 2.2: one to seven).
        use_measured: whether measured iteration times outrank the tables of users. Where workers share processor
            cores, one more of them seems to bring nothing, and the measurements are better left out.
        spare_nodes: nodes that are kept free to take the place of lost ones.
        estimate_error: by how much F(t, x) may be off where it was not measured, as a part of it. A plan that takes
            workers from running tasks must gain more than it costs and than it may be off by; 0 lets any gain do.
    """

    transition_s: float = 5.0
    prior_failures: float = 1.0
    prior_worker_s: float = 128 * 7 * 86400 / 3
    use_measured: bool = True
    spare_nodes: int = 0
    estimate_error: float = 0.05


def failure_rate(state: PlannerState, options: PlannerOptions) -> float:
    """Return the failures a second and worker that plans are made with."""
    return state.believed_rate or _estimated_rate(state, options)


def transition_s(state: PlannerState, options: PlannerOptions, kind: str) -> float:
    """Return the D_transition that plans are made with, for one of `KINDS`."""
    return state.transitions.get(kind, DurationSums()).believed_s or options.transition_s


def record_disturbance(state: PlannerState, task: str, kind: str, *, anew: bool = False) -> None:
    """Note why a task is on its way to full membership.

    A change of layout that is under way stays the reason, whatever comes on top of it, unless the task stops or starts
    as a whole (`anew`).
    """
    if anew or state.disturbed.get(task) != RELAYOUT:
        state.disturbed[task] = kind


def record_transition(state: PlannerState, task: str, seconds: float) -> None:
    """Note that a task took `seconds` to be back at full membership."""
    kind = state.disturbed.pop(task, "")
    if kind:
        now, seconds = state.transitions.get(kind, DurationSums()), min(seconds, LONGEST_S)
        keep = 0.5 if now.count >= MEMORY else 1.0
        state.transitions[kind] = replace(now, count=now.count * keep + 1, seconds=now.seconds * keep + seconds)


def update_beliefs(state: PlannerState, options: PlannerOptions) -> None:
    """Let the believed values follow the estimates."""
    state.believed_rate = _follow_estimate(state.believed_rate, _estimated_rate(state, options))
    for kind, seen in state.transitions.items():
        mean = (options.transition_s + seen.seconds) / (1 + seen.count)
        state.transitions[kind] = replace(seen, believed_s=_follow_estimate(seen.believed_s, mean))


def _estimated_rate(state: PlannerState, options: PlannerOptions) -> float:
    """Return the mean of the posterior Gamma distribution."""
    return (options.prior_failures + state.failures) / (options.prior_worker_s + state.worker_seconds)


def _follow_estimate(believed: float, estimate: float) -> float:
    return estimate if abs(estimate - believed) > DRIFT * max(estimate, believed) else believed
