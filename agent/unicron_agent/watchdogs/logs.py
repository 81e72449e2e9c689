"""Whether the workers of a node write what their users want to see. Pure.

Often one rank alone writes, so each agent reports what its own workers do not write, and the registry concludes.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from unicron.contracts.events import PatternMissed
from unicron.contracts.watchdogs import LogPattern


@dataclass
class _Watched:
    """The patterns of one task.

    Attributes:
        since: when its first worker here started.
        seen: by index of the pattern, when a line matched last.
        missed: indices of those that were reported.
    """

    patterns: Sequence[LogPattern]
    since: float
    seen: dict[int, float] = field(default_factory=dict)
    missed: set[int] = field(default_factory=set)

    def overdue(self, index: int, now: float) -> tuple[float, bool] | None:
        """Return the limit that a pattern has passed, and whether it was never seen; None where it has passed none."""
        pattern, seen = self.patterns[index], self.seen.get(index)
        if seen is None and pattern.within_s and now - self.since > pattern.within_s:
            return pattern.within_s, True
        if pattern.absent_for_s and now - (self.since if seen is None else seen) > pattern.absent_for_s:
            return pattern.absent_for_s, seen is None
        return None


class LogWatch:
    """Watches what the workers of a node write.

    Args:
        node: its name.
    """

    def __init__(self, node: str) -> None:
        self._node = node
        self._tasks: dict[str, _Watched] = {}

    @property
    def patterns(self) -> dict[str, list[LogPattern]]:
        """What is watched for, by task."""
        return {task: list(watched.patterns) for task, watched in self._tasks.items()}

    def started(self, task: str, patterns: Sequence[LogPattern], now: float) -> None:
        """Watch a task from the start of its first worker here."""
        if patterns:
            self._tasks.setdefault(task, _Watched(tuple(patterns), now))

    def matched(self, task: str, index: int, now: float) -> list[PatternMissed]:
        """Note that a line has matched; report that it is there again where it was missed."""
        watched = self._tasks.get(task)
        if watched is None or index >= len(watched.patterns):
            return []
        watched.seen[index] = now
        if index not in watched.missed:
            return []
        watched.missed.discard(index)
        return [self._fact(task, watched.patterns[index], missing=False)]

    def look(self, now: float) -> list[PatternMissed]:
        """Report, once each, what was not seen in time."""
        out = []
        for task, watched in self._tasks.items():
            for index, pattern in enumerate(watched.patterns):
                if index not in watched.missed and (overdue := watched.overdue(index, now)):
                    watched.missed.add(index)
                    out.append(self._fact(task, pattern, *overdue))
        return out

    def keep(self, tasks: Collection[str]) -> None:
        """Forget the tasks that no worker here trains for any more."""
        self._tasks = {task: watched for task, watched in self._tasks.items() if task in tasks}

    def _fact(
        self, task: str, pattern: LogPattern, limit_s: float = 0.0, first: bool = False, *, missing: bool = True
    ) -> PatternMissed:
        return PatternMissed(
            node=self._node, task=task, pattern=pattern.pattern, limit_s=limit_s, first=first, missing=missing
        )
