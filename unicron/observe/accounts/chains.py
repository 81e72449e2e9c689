"""What one failure cost, and when what of it was: a chain of messages, from its first fact to the task's recovery."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from unicron.contracts.base import Message, Record
from unicron.observe.accounts.book import Book
from unicron.observe.accounts.spans import NONE, Cause, PhaseSpan


class Course(Record, kw_only=True, frozen=True):
    """How a chain went for one task as a whole, which trains as long as any of its workers do.

    Attributes:
        recovered_at: Unix seconds at which it was back at full membership, or had ended; None before that.
        seconds: of wall time by phase, all of them. `TRAINING` is while it trained and was not yet back in full.
        whole_s: of all phases.
        spans: in the order in which they ended, the open one last.
        more: spans that are not in `spans`; they are in `seconds`.
    """

    task: str
    recovered_at: float | None
    seconds: dict[str, float]
    whole_s: float
    spans: list[PhaseSpan]
    more: int


class ChainCost(Record, kw_only=True, frozen=True):
    """What a chain cost: a failure, a plan, or a slowdown.

    Attributes:
        chain: id of its first fact.
        what: the status of the failure, what the plan answered, or "slowdown".
        node: on which it was; empty where it was on none.
        tasks: that it concerns.
        begun: Unix seconds of the fault itself, as far as facts show it; of a plan, when it was decided.
        detected_at: Unix seconds of `FailureDetected` or `SlowdownDetected`; None for a plan that no failure led to.
        decided_at: Unix seconds of the first plan or command in the chain; None before it.
        recovered_at: Unix seconds at which the last of its tasks was back at full membership, or had ended; None
            before that.
        seconds: slot-seconds by phase, all of them.
        whole_s: slot-seconds of all phases.
        spans: of slots, in the order in which they ended, open ones last.
        more: spans that are not in `spans`; they are in `seconds`.
        courses: of each task.
    """

    chain: str
    what: str
    node: str
    tasks: list[str]
    begun: float
    detected_at: float | None
    decided_at: float | None
    recovered_at: float | None
    seconds: dict[str, float]
    whole_s: float
    spans: list[PhaseSpan]
    more: int
    courses: list[Course]

    def record(self) -> dict[str, Any]:
        """Return a row: what it was and when, its tasks with blanks between, slot-seconds in all and by phase."""
        head = {name: getattr(self, name) for name in ("chain", "what", "node")} | {"tasks": " ".join(self.tasks)}
        times = {name: getattr(self, name) for name in ("begun", "detected_at", "decided_at", "recovered_at")}
        return head | times | {"whole_s": self.whole_s} | {f"{phase}_s": spent for phase, spent in self.seconds.items()}


@dataclass(slots=True)
class Chain:
    """What is known of a chain while it goes on.

    Attributes:
        cause: of all that it costs.
        begun, detected_at, decided_at: as in `ChainCost`.
        tasks: when each that it concerns was back; None before that.
    """

    cause: Cause
    begun: float
    detected_at: float | None = None
    decided_at: float | None = None
    tasks: dict[str, float | None] = field(default_factory=dict)

    def detected(self, now: float) -> None:
        """What went wrong is known."""
        if self.detected_at is None:
            self.detected_at = now

    def recovered_at(self) -> float | None:
        """Return when all tasks were back; where none is concerned, when it was known."""
        times = [at for at in self.tasks.values() if at is not None]
        if len(times) < len(self.tasks):
            return None
        return max(times, default=self.detected_at if self.detected_at is not None else self.begun)


class Chains:
    """The newest chains that have a cause, the newest last; books tell the same ones apart."""

    def __init__(self, most: int, books: Sequence[Book]) -> None:
        self.known: OrderedDict[str, Chain] = OrderedDict()
        self._most, self._books = most, books

    def cause(self, message: Message) -> Cause:
        """Return what began a message's chain: its first failure or plan."""
        known = self.known.get(message.correlation or message.id)
        return NONE if known is None else known.cause

    def of(self, message: Message, now: float, what: str, node: str = "") -> Chain:
        """Return a message's chain; where nothing began it yet, this did."""
        name = message.correlation or message.id
        known = self.known.get(name)
        if known is None:
            known = self.known[name] = Chain(Cause(what, node, name), now)
            for book in self._books:
                book.open(name)
            if len(self.known) > self._most:
                oldest, _ = self.known.popitem(last=False)
                for book in self._books:
                    book.fold(oldest)
        return known

    def decided(self, message: Message, now: float) -> None:
        """A plan or a command was said in a chain."""
        known = self.known.get(message.correlation)
        if known is not None and known.decided_at is None:
            known.decided_at = now

    def recovered(self, task: str, now: float, chains: set[str]) -> None:
        """A task is back from these chains, as far as they are known."""
        for each in chains & self.known.keys():
            self.known[each].tasks[task] = now
