"""What speaks for a decision and against it: the second best, and plans that take more or fewer running workers."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from unicron.contracts.answers import Weighing
from unicron_planner import lookup
from unicron_planner.lookup import Event, LookupRow, Situation, TaskStanding
from unicron_planner.program import Floats

RELUCTANT = 1e6
"""Times what a task earns: no gain outweighs it, so that workers are taken only where they must be."""


@dataclass(frozen=True)
class Decision:
    """A decision, and what else it could have been; that is worked out for whoever asks first.

    Attributes:
        given: the situation before the event.
        event: that was answered.
        row: the answer.
    """

    given: Situation
    event: Event
    row: LookupRow

    @cached_property
    def runner_up(self) -> LookupRow | None:
        """The second best."""
        return lookup.runner_up(self.given, self.event, self.row)

    @cached_property
    def taken(self) -> Weighing | None:
        """The decision against the best that takes no more from running tasks than it must; None where that is it."""
        gentle = self._otherwise(lambda task: RELUCTANT * np.maximum.accumulate(task.waf))
        return self._weigh(gentle, self.row, shown=gentle)

    @cached_property
    def held_back(self) -> Weighing | None:
        """The best if all estimates were exact, against the decision; None where that is it."""
        tempting = self._otherwise(lambda _: None)
        return self._weigh(self.row, tempting, shown=tempting)

    def _otherwise(self, doubt: Callable[[TaskStanding], Floats | None]) -> LookupRow:
        tasks = {name: replace(task, doubt=doubt(task)) for name, task in self.given.tasks.items()}
        return lookup.answer(replace(self.given, tasks=tasks), self.event)

    def _weigh(self, gentle: LookupRow, bold: LookupRow, shown: LookupRow) -> Weighing | None:
        """Return what `bold` gains over `gentle`; None where no more is taken from a running task."""
        names = list(self.row.sizes)
        if not any(bold.sizes[name] < min(gentle.sizes[name], self._left(name)) for name in names):
            return None
        running_s = self.given.running_s(self.event.workers)
        earned = [sum(self.given.tasks[name].waf_of(row.sizes[name]) for name in names) for row in (gentle, bold)]
        gain = (earned[1] - earned[0]) * running_s
        return Weighing(
            changes={name: shown.sizes[name] for name in names if bold.sizes[name] != gentle.sizes[name]},
            gain=gain,
            cost=gain - (bold.reward - gentle.reward),
            error=(self.doubt(bold) - self.doubt(gentle)) * running_s,
        )

    def _left(self, name: str) -> int:
        return self.given.tasks[name].held - self.event.lost.get(name, 0)

    def doubt(self, row: LookupRow) -> float:
        """Return the WAF that an answer must gain beyond its cost, as it takes workers that tasks have left."""
        tasks = self.given.tasks
        return sum(
            max(0.0, _doubt_at(tasks[name], self._left(name)) - _doubt_at(tasks[name], size))
            for name, size in row.sizes.items()
        )


def _doubt_at(task: TaskStanding, size: int) -> float:
    """Return the doubt of the task's largest size up to `size`."""
    at = int(np.searchsorted(task.sizes, size, side="right")) - 1
    return 0.0 if task.doubt is None else float(task.doubt[max(at, 0)])
