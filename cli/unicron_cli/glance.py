"""A cluster at a glance: what `unicron top` knows of it. Pure; fed with statuses and with the journal's messages."""

from collections import Counter, deque

from unicron.contracts.base import Message, Record
from unicron.contracts.queries import Status, TaskView
from unicron.contracts.tasks import UNCOUNTED, NodeState, TaskState
from unicron.observe.accounts.goodput import Goodput
from unicron.observe.incidents import Failure
from unicron.observe.words.headline import about, outcome
from unicron.observe.words.story import describe

FAILURES = 50
EVENTS = 200
"""So many of the newest are known."""

INCIDENTS = 4 * FAILURES
"""Failures, plans and slowdowns that are told apart."""

_URGENCY = (
    *(TaskState.FAILED, TaskState.RECOVERING, TaskState.RECONFIGURING, TaskState.STARTING, TaskState.RUNNING),
    *(TaskState.WAITING, TaskState.FINISHED, TaskState.REMOVED),
)
"""States of tasks, the first to look at first."""


class TaskLine(Record, kw_only=True, frozen=True):
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


class FailureLine(Record, kw_only=True, frozen=True):
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


class EventLine(Record, kw_only=True, frozen=True):
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
        slots: of the nodes that are up.
        spare: slots of those on which nobody computes.
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
    tasks: list[TaskLine] = []
    failures: list[FailureLine] = []
    events: list[EventLine] = []


class Watched:
    """What was seen of a cluster so far.

    Attributes:
        status: the newest.
        whole: the journal was read from its beginning, so the goodput of tasks is known.
        error: why nobody answers; empty where somebody does.
    """

    def __init__(self) -> None:
        self.status: Status | None = None
        self.whole = True
        self.error = ""
        self._accounts = Goodput(chains=INCIDENTS)
        self._events: deque[EventLine] = deque(maxlen=EVENTS)
        self._goodput: dict[str, float] = {}

    def handle(self, message: Message) -> None:
        """Take the journal's next message into account."""
        self._events.appendleft(EventLine(at=message.at, source=message.source, text=describe(message)))
        self._accounts.handle(message)

    def account(self, now: float) -> None:
        """Work out anew where the time went; it looks at each slot."""
        self._goodput = {row.name: row.goodput for row in self._accounts.report(now).tasks if row.total_s}

    def glance(self, now: float) -> Glance:
        """Return what is to be shown at `now`, in Unix seconds."""
        status = self.status or Status()
        up = {node.node: len(node.slots) for node in status.nodes if node.state is NodeState.UP}
        used = {(member.node, member.slot) for view in status.tasks for member in view.members if member.node in up}
        tasks = [self._task(view) for view in status.tasks]
        failures = list(reversed(self._accounts.incidents.failures.values()))
        return Glance(
            at=now,
            error=self.error,
            waf=sum(view.waf for view in status.tasks),
            planned_waf=status.plan.waf if status.plan else None,
            nodes=dict(Counter(str(node.state) for node in status.nodes)),
            slots=sum(up.values()),
            spare=max(0, sum(up.values()) - len(used)),
            tasks=sorted(tasks, key=lambda line: _URGENCY.index(line.state)),
            failures=[_failure(failure) for failure in failures[:FAILURES]],
            events=list(self._events),
        )

    def _task(self, view: TaskView) -> TaskLine:
        return TaskLine(
            task=view.spec.name,
            state=view.state,
            workers=len(view.members),
            iteration=view.iteration + 1,
            iterations=view.spec.iterations if view.spec.iterations < UNCOUNTED else None,
            loss=view.loss,
            iteration_s=view.iteration_s,
            goodput=self._goodput.get(view.spec.name) if self.whole else None,
            waf=view.waf,
        )


def _failure(failure: Failure) -> FailureLine:
    return FailureLine(
        at=failure.first.at,
        chain=failure.cause.chain,
        severity=failure.severity,
        what=about(failure.first),
        outcome=outcome(failure, failure.first),
        open=failure.is_open,
    )
