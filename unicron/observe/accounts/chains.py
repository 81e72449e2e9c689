"""The costs of one failure over time: a chain of messages, from its first fact to the task's recovery."""

from typing import Any

from unicron.contracts.base import Record
from unicron.observe.accounts.spans import PhaseSpan


class TaskCourse(Record, kw_only=True, frozen=True):
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
    """The costs of a chain: of a failure, a plan, or a slowdown.

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
        ended: how tasks ended or stand that are not back, such as "failed".
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
    ended: str
    seconds: dict[str, float]
    whole_s: float
    spans: list[PhaseSpan]
    more: int
    courses: list[TaskCourse]

    def record(self) -> dict[str, Any]:
        """Return a row: what it was and when, its tasks with blanks between, slot-seconds in all and by phase."""
        head = {name: getattr(self, name) for name in ("chain", "what", "node")} | {"tasks": " ".join(self.tasks)}
        times = {name: getattr(self, name) for name in ("begun", "detected_at", "decided_at", "recovered_at")}
        return head | times | {"whole_s": self.whole_s} | {f"{phase}_s": spent for phase, spent in self.seconds.items()}
