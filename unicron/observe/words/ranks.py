"""The one way in which people read and type which worker is meant: TASK:RANK, its process in brackets."""

import re
from collections import OrderedDict
from collections.abc import Iterable
from typing import Self

from unicron.contracts.answers import TaskView
from unicron.contracts.base import Message
from unicron.contracts.commands import Regroup
from unicron.contracts.events import Regrouped, TaskStateChanged, TaskSubmitted
from unicron.contracts.tasks import TaskState

MOST = 200_000
"""Workers whose ranks are known, the newest ones."""

_QUOTED_OR_NAME = re.compile(r'"[^"]*"|(?<![\w.:/=(-])(?<!\bon )[A-Za-z0-9_-]+-\d+(?![\w/-]|[.:]\w)')
"""What a program has written stays as it is; so do nodes, files, and what is in brackets already."""


class RankNames:
    """The ranks of workers, those of their newest membership, as far as the journal or the registry told them."""

    def __init__(self) -> None:
        self._ranks = OrderedDict[str, str]()
        self._tasks = set[str]()  # a sentence that names gpt-2 may be about a task of that name

    @classmethod
    def of(cls, tasks: Iterable[TaskView]) -> Self:
        """Return the ranks that workers have now."""
        names = cls()
        names.learn(tasks)
        return names

    def learn(self, tasks: Iterable[TaskView]) -> None:
        """Take the ranks into account that workers have now."""
        for view in tasks:
            self.take(view.spec.name, (member.worker for member in view.members))

    def forget(self, others: Self) -> None:
        """Forget the workers that `others` knows."""
        kept = (each for each in self._ranks.items() if others.rank(each[0]) == each[0])
        self._ranks = OrderedDict(kept)

    def observe(self, message: Message) -> None:
        """Take a message of the journal into account; messages come in its order."""
        match message:
            case TaskSubmitted():
                self._tasks.add(message.task)
            case Regroup():
                # who has a rank keeps it until it computes as another: this membership may never come to that
                workers = zip(message.ranks, (member.worker for member in message.members), strict=False)
                self._take(message.task, [each for each in workers if each[1] not in self._ranks])
            case Regrouped():
                self._take(message.task, [(message.rank, message.worker)])
            case TaskStateChanged(state=TaskState.RUNNING):
                self.take(message.task, (member.worker for member in message.members))

    def _take(self, task: str, ranks: Iterable[tuple[int, str]]) -> None:
        self._tasks.add(task)
        for rank, worker in ranks:
            self._ranks[worker] = f"{task}:{rank}"
            self._ranks.move_to_end(worker)
        while len(self._ranks) > MOST:
            self._ranks.popitem(last=False)

    def rank(self, worker: str) -> str:
        """Return TASK:RANK of a worker; of one that has had none yet, the name of its process."""
        return self._ranks.get(worker, worker)

    def worker(self, rank: str) -> str | None:
        """Return the newest worker that had TASK:RANK, None where that is not known."""
        return next((worker for worker, known in reversed(self._ranks.items()) if known == rank), None)

    def take(self, task: str, workers: Iterable[str]) -> None:
        """Take into account the workers of a task's newest membership, in rank order."""
        self._take(task, enumerate(workers))

    def explain(self, text: str) -> str:
        """Return a sentence that names workers by TASK:RANK, with their processes in brackets."""
        return _QUOTED_OR_NAME.sub(self._explained, text)

    def _explained(self, found: re.Match[str]) -> str:
        rank = self._ranks.get(found[0])
        return f"{rank} ({found[0]})" if rank and found[0] not in self._tasks else found[0]
