"""Collects how long the workers of a node compute into one message for each task and iteration. Pure."""

from collections.abc import Collection
from dataclasses import dataclass, field

from unicron.contracts.slowdowns import Computed, ComputeTimed
from unicron.contracts.worker import Iterated
from unicron_agent.workers.workers import LocalWorker

SHORTEST_S = 0.5
"""Shortest time between two messages of a task: if iterations are shorter, the message has the mean of several."""


@dataclass
class _Sums:
    """The timings of a task since its last message.

    Attributes:
        reported_at: when that message was sent, in monotonic seconds.
        iteration: the newest that was collected.
        reported: workers that have reported that iteration.
        ranks: by worker, its rank, its place, the sum of its means, and their number.
    """

    reported_at: float
    epoch: int
    iteration: int = -1
    reported: set[str] = field(default_factory=set)
    ranks: dict[str, tuple[int, int, float, int]] = field(default_factory=dict)


class Timings:
    """Collects the compute times of a node's workers.

    Attributes:
        pressure: share of the time in which something waits for a core of this machine.
    """

    def __init__(self, node: str) -> None:
        self._node = node
        self._tasks: dict[str, _Sums] = {}
        self.pressure = 0.0

    def add(self, worker: LocalWorker, done: Iterated, here: Collection[str], now: float) -> list[ComputeTimed]:
        """Add a worker's report of an iteration; return the message once all workers in `here` have reported it."""
        sums = self._tasks.get(worker.task)
        if sums is None or sums.epoch != done.epoch:
            sums = self._tasks[worker.task] = _Sums(sums.reported_at if sums else -SHORTEST_S, done.epoch)
        if done.computed_s > 0:
            *_, total, count = sums.ranks.get(worker.worker, (0, 0, 0.0, 0))
            sums.ranks[worker.worker] = done.rank, worker.place, total + done.computed_s, count + 1
        if done.iteration > sums.iteration:
            sums.iteration, sums.reported = done.iteration, set()
        sums.reported.add(worker.worker)
        if not (sums.ranks and sums.reported.issuperset(here)) or now - sums.reported_at < SHORTEST_S:
            return []
        means = [
            Computed(worker=name, rank=rank, place=place, seconds=total / count)
            for name, (rank, place, total, count) in sums.ranks.items()
        ]
        sums.reported_at, sums.ranks = now, {}
        return [
            ComputeTimed(
                node=self._node,
                task=worker.task,
                epoch=sums.epoch,
                iteration=sums.iteration,
                workers=means,
                pressure=self.pressure,
            )
        ]

    def keep_tasks(self, tasks: Collection[str]) -> None:
        """Forget the tasks that have no worker here any more."""
        for task in [task for task in self._tasks if task not in tasks]:
            del self._tasks[task]
