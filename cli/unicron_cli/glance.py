"""A cluster at a glance: what `unicron top` knows of it. Pure; fed with statuses and with the journal's messages."""

from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unicron.contracts.base import Message, Record
from unicron.contracts.events import FailureDetected, TaskRecovered, TaskStateChanged
from unicron.contracts.queries import Status, TaskView
from unicron.contracts.tasks import UNCOUNTED, NodeState, TaskState
from unicron.observe.words.headline import ENDS, about, outcome
from unicron.observe.words.story import chain_of, describe

FAILURES = 50
EVENTS = 200
"""So many of the newest are known."""

ENDS_KEPT = 100
"""Messages that are kept of how it ended for the tasks that one failure hit."""

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


@dataclass
class _Trouble:
    """A failure, and the newest of what it led to."""

    failure: FailureDetected
    ends: deque[Message] = field(default_factory=lambda: deque(maxlen=ENDS_KEPT))

    def open(self) -> set[str]:
        """Return the tasks that it hit and that are not back, nor over."""
        ways: dict[str, bool] = {}
        for end in self.ends:
            if isinstance(end, TaskStateChanged):
                goes_on = end.state is not TaskState.RUNNING or ways.get(end.task, True)  # it runs with what is left
                ways[end.task] = not end.state.ended and goes_on
            else:
                ways[str(getattr(end, "task", ""))] = False
        return {task for task, on_its_way in ways.items() if on_its_way}

    def line(self, chain: str) -> FailureLine:
        messages = [self.failure, *self.ends]
        return FailureLine(
            at=self.failure.at,
            chain=chain,
            severity=self.failure.severity.value,
            what=about(messages),
            outcome=outcome(messages),
            open=bool(self.open()),
        )


class Watched:
    """What was seen of a cluster so far.

    Attributes:
        status: the newest.
        goodput: by task, as far as it is known.
        error: why nobody answers; empty where somebody does.
    """

    def __init__(self) -> None:
        self.status: Status | None = None
        self.goodput: Mapping[str, float] = {}
        self.error = ""
        self._failures: OrderedDict[str, _Trouble] = OrderedDict()
        self._events: deque[EventLine] = deque(maxlen=EVENTS)

    def hear(self, message: Message) -> None:
        """Take in the journal's next message."""
        self._events.appendleft(EventLine(at=message.at, source=message.source, text=describe(message)))
        chain = chain_of(message)
        if isinstance(message, FailureDetected) and chain not in self._failures:
            self._failures[chain] = _Trouble(message)
            if len(self._failures) > FAILURES:
                self._failures.popitem(last=False)
        elif isinstance(message, ENDS):
            self._end(chain, message)

    def _end(self, chain: str, message: Any) -> None:
        """Note how a task stands with the failure that led to it; its end with all that it had not overcome yet."""
        over = isinstance(message, TaskRecovered) or (isinstance(message, TaskStateChanged) and message.state.ended)
        if isinstance(message, TaskStateChanged):
            message = TaskStateChanged(task=message.task, state=message.state)  # members of thousands take room
        for each, trouble in self._failures.items():
            if each == chain or (over and message.task in trouble.open()):
                trouble.ends.append(message)

    def glance(self, now: float) -> Glance:
        """Return what is to be shown at `now`, in Unix seconds."""
        status = self.status or Status()
        up = {node.node: len(node.slots) for node in status.nodes if node.state is NodeState.UP}
        used = {(member.node, member.slot) for view in status.tasks for member in view.members if member.node in up}
        tasks = [self._task(view) for view in status.tasks]
        return Glance(
            at=now,
            error=self.error,
            waf=sum(view.waf for view in status.tasks),
            planned_waf=status.plan.waf if status.plan else None,
            nodes=dict(Counter(str(node.state) for node in status.nodes)),
            slots=sum(up.values()),
            spare=max(0, sum(up.values()) - len(used)),
            tasks=sorted(tasks, key=lambda line: _URGENCY.index(line.state)),
            failures=[trouble.line(chain) for chain, trouble in reversed(self._failures.items())],
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
            goodput=self.goodput.get(view.spec.name),
            waf=view.waf,
        )
