"""Facts of the watchdogs in agents from which services conclude something."""

from unicron.contracts.base import AgentMessage
from unicron.contracts.events.workers import WorkerFact
from unicron.contracts.ranges import Amount, Label, Name, Number, Seconds, Size
from unicron.contracts.sentences import where


class WorkerGrows(WorkerFact, kw_only=True, frozen=True):
    """The memory of a worker grows without end and will soon fill its node; it has just ended an iteration.

    Attributes:
        epoch: of its membership.
        iteration: that it has ended.
        used: bytes that its processes hold.
        left: bytes that the machine, or the container, has left.
        rate: bytes a second by which it grows.
    """

    epoch: Number
    iteration: Number
    used: Size
    left: Size
    rate: Amount

    def __str__(self) -> str:
        return (
            f"{where(self)} holds {self.used / 2**30:.1f} GiB and grows by {self.rate * 60 / 2**20:.0f} MiB a minute; "
            f"{self.left / 2**30:.1f} GiB are left there"
        )


class PatternMissed(AgentMessage, kw_only=True, frozen=True):
    """A pattern that a user expects in a task's output was not seen on a node in time, or is seen there again.

    Attributes:
        pattern: the expression.
        limit_s: seconds in which it should have been seen.
        first: it was never seen there since the task's workers started; else not since it was last.
        missing: false where it is seen again.
    """

    task: Name
    pattern: Label
    limit_s: Seconds
    first: bool = False
    missing: bool = True

    def __str__(self) -> str:
        if not self.missing:
            return f"{self.task} on {self.node} writes {self.pattern!r} again"
        since = " since it started" * self.first
        return f"nothing that {self.task} on {self.node} wrote{since} matches {self.pattern!r}, for {self.limit_s:g} s"
