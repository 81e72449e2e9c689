"""How long the workers of a node compute, collected into one message a task and iteration. Pure."""

from collections.abc import Collection
from dataclasses import dataclass, field

from unicron.contracts.slowdowns import Computed, ComputeTimed
from unicron.contracts.worker import Iterated
from unicron_agent.workers.workers import Worker

SHORTEST_S = 0.5
"""A task is told of no more often than that: where iterations are shorter, it is the mean of several."""


@dataclass
class _Sums:
    """What has been collected of a task since it was told of last.

    Attributes:
        told_at: when that was, in monotonic seconds.
        iteration: the last that was collected.
        by: who has told of that one.
        ranks: by worker, its rank, its place, the sum of its means, and how many these are.
    """

    told_at: float
    epoch: int
    iteration: int = -1
    by: set[str] = field(default_factory=set)
    ranks: dict[str, tuple[int, int, float, int]] = field(default_factory=dict)


class Timings:
    """What the workers of a node tell of their iterations.

    Attributes:
        pressure: for which share of the time something waits for a core of this machine.
    """

    def __init__(self, node: str) -> None:
        self._node = node
        self._tasks: dict[str, _Sums] = {}
        self.pressure = 0.0

    def add(self, worker: Worker, done: Iterated, here: Collection[str], now: float) -> list[ComputeTimed]:
        """Take in what a worker tells of an iteration; return what is to be told once the last of `here` has."""
        sums = self._tasks.get(worker.task)
        if sums is None or sums.epoch != done.epoch:
            sums = self._tasks[worker.task] = _Sums(sums.told_at if sums else -SHORTEST_S, done.epoch)
        if done.computed_s > 0:
            *_, total, count = sums.ranks.get(worker.worker, (0, 0, 0.0, 0))
            sums.ranks[worker.worker] = done.rank, worker.place, total + done.computed_s, count + 1
        if done.iteration > sums.iteration:
            sums.iteration, sums.by = done.iteration, set()
        sums.by.add(worker.worker)
        if not (sums.ranks and sums.by.issuperset(here)) or now - sums.told_at < SHORTEST_S:
            return []
        told = [
            Computed(worker=name, rank=rank, place=place, seconds=total / count)
            for name, (rank, place, total, count) in sums.ranks.items()
        ]
        sums.told_at, sums.ranks = now, {}
        return [
            ComputeTimed(
                node=self._node,
                task=worker.task,
                epoch=sums.epoch,
                iteration=sums.iteration,
                workers=told,
                pressure=self.pressure,
            )
        ]

    def keep(self, tasks: Collection[str]) -> None:
        """Forget the tasks that have no worker here any more."""
        for task in [task for task in self._tasks if task not in tasks]:
            del self._tasks[task]
