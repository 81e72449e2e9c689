"""Incidents: which failure is open, which tasks it hit, and how it ended for each of them. Pure.

An incident is a chain of messages: a failure and all that follows from it, or a plan or a slowdown. A failure hits the
task that it names and, where its node is given up, all tasks with slots there, unless they have ended or regrouped
meanwhile; and each task that its chain takes from its work. It is over for a task that is back at full membership, by
whatever chain, has ended, or was paused. A task that waits for slots is not back.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from unicron.contracts.base import Message
from unicron.contracts.events import (
    FailureDetected,
    TaskBroken,
    TaskPaused,
    TaskRecovered,
    TaskRemoved,
    TaskStateChanged,
    WorkerStalled,
)
from unicron.contracts.tasks import TaskState

FAILURES = 1000
"""Failures that are listed; older ones only count in the accounts."""

TaskOutcome = TaskStateChanged | TaskRecovered | TaskBroken | TaskRemoved
"""Messages that say what state a task is in."""


def chain_of(message: Message) -> str:
    """Return the id of the chain that `message` belongs to."""
    return message.correlation or message.id


def shown_at(message: Message) -> float:
    """Return the Unix seconds of what a message reports; a worker that hangs has done so since its last progress."""
    return message.at - message.waited_s if isinstance(message, WorkerStalled) else message.at


def ends_healing(message: Message) -> bool:
    """Return whether a message says that nothing of its task is to be healed any more."""
    match message:
        case TaskStateChanged():
            return message.state.ended
        case TaskPaused():
            return message.paused
        case _:
            return isinstance(message, TaskRecovered | TaskRemoved)


class IncidentCause(NamedTuple):
    """The kind of an incident, and its GPU time: empty for none.

    Attributes:
        what: the status of a failure, what a plan answered, or "slowdown".
        node: on which it was; empty where it was on none.
        chain: id of its first message.
    """

    what: str = ""
    node: str = ""
    chain: str = ""


NONE = IncidentCause()


@dataclass(slots=True)
class Hit:
    """How a task stands by an incident.

    Attributes:
        state: "back", "broken", or a state of tasks; empty before anything is said.
        workers: at how many it is back.
        over_at: Unix seconds at which nothing was to be healed any more; None before that.
    """

    state: str = ""
    workers: int = 0
    over_at: float | None = None


@dataclass(slots=True, kw_only=True)
class Incident:
    """The facts about an incident.

    Attributes:
        begun: Unix seconds of the fault itself, as far as facts show it; of a plan, when it was decided.
        detected_at: Unix seconds of `FailureDetected` or `SlowdownDetected`; None for a plan that no failure led to.
        decided_at: Unix seconds of the first plan or command in the chain; None before it.
        tasks: that it hit, or that the plan or the slowdown is about.
    """

    cause: IncidentCause
    begun: float
    detected_at: float | None = None
    decided_at: float | None = None
    tasks: dict[str, Hit] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        """Whether one of its tasks is still to be healed."""
        return any(hit.over_at is None for hit in self.tasks.values())

    def recovered_at(self) -> float | None:
        """Return when the last task was back; where none is concerned, when it was known; None before that."""
        if self.is_open:
            return None
        known = self.begun if self.detected_at is None else self.detected_at
        return max((hit.over_at for hit in self.tasks.values() if hit.over_at is not None), default=known)

    def took_s(self, task: str = "") -> float | None:
        """Return the seconds from the fault until a task was back, or all were; None before, or where it hit none."""
        over_at = self.tasks[task].over_at if task else self.recovered_at() if self.tasks else None
        return None if over_at is None else max(0.0, over_at - self.begun)

    def ended(self) -> str:
        """Return how its tasks have ended that are not back, such as "failed"; empty where all are."""
        return " ".join(sorted({hit.state for hit in self.tasks.values()} - {"", "back", str(TaskState.RUNNING)}))

    def record(self, message: TaskOutcome, now: float) -> None:
        """Record how a task stands."""
        running = isinstance(message, TaskStateChanged) and message.state is TaskState.RUNNING
        hit = self.tasks.setdefault(message.task, Hit(over_at=now if running else None))
        match message:
            case TaskRecovered():
                hit.state, hit.workers = "back", message.workers
            case TaskBroken():
                hit.state = "broken"
            case TaskRemoved():
                hit.state = str(TaskState.REMOVED)
            case _ if not running:
                hit.state, hit.over_at = str(message.state), None
            case _ if not hit.state:  # else it runs with what is left, and how it is healed is known
                hit.state = str(TaskState.RUNNING)
        if ends_healing(message):
            hit.over_at = now


@dataclass(slots=True, kw_only=True)
class Failure(Incident):
    """An incident that is a failure.

    Attributes:
        first: as it was detected first.
        severity: of the worst that was detected in its chain.
    """

    first: FailureDetected
    severity: int = 3


class Incidents:
    """The newest incidents.

    Args:
        most: that are known.
        forget: is called with the chain of each that is not known any more.

    Attributes:
        known: by chain, the newest last; `failures` the newest of them that are failures.
        changed: chains of those that the newest message changed.
    """

    def __init__(self, most: int, forget: Callable[[str], None]) -> None:
        self.known: OrderedDict[str, Incident] = OrderedDict()
        self.failures: OrderedDict[str, Failure] = OrderedDict()
        self.changed: set[str] = set()
        self._most, self._forget = most, forget
        self._open: dict[str, set[str]] = {}

    def cause(self, message: Message) -> IncidentCause:
        """Return what began a message's chain: its first failure, plan or slowdown."""
        known = self.known.get(chain_of(message))
        return NONE if known is None else known.cause

    def begin(self, message: Message, now: float, what: str, node: str = "") -> Incident:
        """Return the incident of a message's chain; where nothing began it yet, this message did."""
        chain = chain_of(message)
        self.changed.add(chain)
        if chain not in self.known:
            if self.known and len(self.known) >= self._most:
                self._drop()
            self.known[chain] = Incident(cause=IncidentCause(what, node, chain), begun=now)
        if isinstance(message, FailureDetected):
            self._fail(chain, message, now)
        return self.known[chain]

    def _drop(self) -> None:
        chain, oldest = self.known.popitem(last=False)
        self.failures.pop(chain, None)
        for task in oldest.tasks:
            self._open.get(task, set()).discard(chain)
        self._forget(chain)

    def _fail(self, chain: str, message: FailureDetected, now: float) -> None:
        known = self.known[chain]
        if not isinstance(known, Failure):
            known = Failure(**{each.name: getattr(known, each.name) for each in fields(known)}, first=message)
            self.known[chain] = self.failures[chain] = known
            if len(self.failures) > FAILURES:
                self.failures.popitem(last=False)
        known.detected_at = now if known.detected_at is None else known.detected_at
        known.severity = min(known.severity, int(message.severity))

    def hit(self, incident: Incident, task: str) -> None:
        """Record that a task is to be healed from an incident."""
        incident.tasks[task] = Hit()
        self._open.setdefault(task, set()).add(incident.cause.chain)

    def are_open(self, task: str) -> bool:
        """Return whether a task is to be healed from anything."""
        return bool(self._open.get(task))

    def record(self, message: Message, now: float) -> None:
        """Record what a message says of its task: for the failure that led to it, and for all that are over by it."""
        own = self.failures.get(chain_of(message))
        if own is not None and isinstance(message, TaskOutcome):
            own.record(message, now)
            self.changed.add(own.cause.chain)
            if own.tasks[message.task].over_at is None:
                self._open.setdefault(message.task, set()).add(own.cause.chain)
        if ends_healing(message):
            task = str(getattr(message, "task", ""))
            for chain in self._open.pop(task, set()):
                self.changed.add(chain)
                if isinstance(message, TaskOutcome):
                    self.known[chain].record(message, now)
                self.known[chain].tasks[task].over_at = now
