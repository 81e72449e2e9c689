"""A cluster at a glance: what `unicron top` shows of it. Pure."""

from collections import Counter
from collections.abc import Mapping
from itertools import islice

from unicron.contracts.base import Record
from unicron.contracts.tasks import UNCOUNTED, TaskState
from unicron.observe.cluster import ClusterPicture
from unicron.observe.incidents import Failure
from unicron.observe.state import TaskPicture
from unicron.observe.words.headline import about, outcome
from unicron.observe.words.ranks import RankNames

FAILURES = 50
EVENTS = 200
"""So many of the newest are shown."""

_URGENCY = (
    *(TaskState.FAILED, TaskState.RECOVERING, TaskState.RECONFIGURING, TaskState.STARTING, TaskState.RUNNING),
    *(TaskState.WAITING, TaskState.FINISHED, TaskState.REMOVED),
)
"""States of tasks, the first to look at first."""


class TaskGlance(Record, kw_only=True, frozen=True):
    """A task at a glance.

    Attributes:
        workers: that compute.
        iteration: that it is in, from 1; 0 before the first.
        iterations: None where they are not counted.
        goodput: share of its GPU time that was training, 0 to 1; None where that is not known.
        waf: weighted FLOP/s.
    """

    task: str
    state: TaskState
    workers: int
    iteration: int
    iterations: int | None
    loss: float | None
    iteration_s: float
    goodput: float | None
    waf: float


class FailureGlance(Record, kw_only=True, frozen=True):
    """A failure at a glance.

    Attributes:
        at: Unix seconds at which it was detected.
        what: whom it hit, and why.
        outcome: how the tasks that it hit stand; empty where it hit none.
        open: one of them is still on its way back.
    """

    at: float
    chain: str
    severity: int
    what: str
    outcome: str
    open: bool


class EventGlance(Record, kw_only=True, frozen=True):
    """A message at a glance, in words."""

    at: float
    source: str
    text: str


class Glance(Record, kw_only=True, frozen=True):
    """A cluster at a glance.

    Attributes:
        at: Unix seconds.
        error: why what is shown may be out of date; empty where it is not.
        waf: weighted FLOP/s that all tasks achieve together.
        planned_waf: what the plan in force expects; None before the first.
        nodes: how many are in each state.
        slots: of the nodes that are up; `spare` those of them that the plan gives to no task.
        tasks: the first to look at first.
        failures, events: newest first.
    """

    at: float
    error: str = ""
    waf: float = 0.0
    planned_waf: float | None = None
    nodes: dict[str, int] = {}
    slots: int = 0
    spare: int = 0
    tasks: list[TaskGlance] = []
    failures: list[FailureGlance] = []
    events: list[EventGlance] = []


def glance(cluster: ClusterPicture, goodput: Mapping[str, float], now: float, error: str = "") -> Glance:
    """Return what is to be shown of a cluster at `now`, with the goodput of its tasks as far as that is known."""
    failures = islice(reversed(cluster.failures.values()), FAILURES)
    entries = islice((entry for entry, _, _ in reversed(cluster.events)), EVENTS)
    return Glance(
        at=now,
        error=error,
        waf=cluster.waf,
        planned_waf=cluster.plan.waf if cluster.plan else None,
        nodes=dict(Counter(str(node.state) for node in cluster.nodes.values())),
        slots=cluster.slots,
        spare=cluster.spares,
        tasks=[
            _task(task, goodput) for task in sorted(cluster.tasks.values(), key=lambda task: _URGENCY.index(task.state))
        ],
        failures=[_failure(failure, cluster.names) for failure in failures],
        events=[EventGlance(at=entry.at, source=entry.source, text=entry.text) for entry in entries],
    )


def _task(task: TaskPicture, goodput: Mapping[str, float]) -> TaskGlance:
    return TaskGlance(
        task=task.spec.name,
        state=task.state,
        workers=len(task.members),
        iteration=task.iteration + 1,
        iterations=task.spec.iterations if task.spec.iterations < UNCOUNTED else None,
        loss=task.loss,
        iteration_s=task.iteration_s,
        goodput=goodput.get(task.spec.name),
        waf=task.waf,
    )


def _failure(failure: Failure, names: RankNames) -> FailureGlance:
    return FailureGlance(
        at=failure.first.at,
        chain=failure.cause.chain,
        severity=failure.severity,
        what=names.explain(about(failure.first)),
        outcome=outcome(failure, failure.first),
        open=failure.is_open,
    )
