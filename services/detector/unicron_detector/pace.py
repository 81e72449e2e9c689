"""How fast the workers of a task compute, each against its own past and against others. Pure."""

from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from statistics import median_low

from unicron.contracts.ranges import SHORTEST_S
from unicron.contracts.slowdowns import ComputeTimed, SlowWorker

SLOWER = 1.1
"""Of what the others take: beyond that a worker is slow."""

CLEAR = 4.0
"""Of the deviation of the others from their middle: beyond that one stands out."""

SOON, LATE = 0.3, 0.01
"""Weights of what was timed last in the recent and in the usual time of a worker."""

PAST = 10
"""Microbatches timed before a worker has a usual time; before that it is compared with others of its place."""

PEERS = 3
"""As many workers have to have a place for one of them to be held against the others."""

WORKERS = 200_000
"""Workers that are remembered."""

BUSY, SATURATED, RISEN = 0.2, 0.3, 0.1
"""Pressure of a node beyond which its machine is busy: the first where that is more than usual by the last, else the
second."""

ALONE = 1.3
"""Slower than this multiple of the others' time a worker is slow itself, if others on machines as busy are not."""

NAMED = 16
"""Slow workers that are named: of a slow switch or rack there may be thousands."""


@dataclass(slots=True)
class WorkerPace:
    """A worker. Seconds are those of a microbatch."""

    node: str
    rank: int
    place: int
    epoch: int
    recent_s: float
    usual_s: float
    count: int = 1


@dataclass(slots=True)
class NodePressure:
    """A node of a task: how much wants to run on it, lately and usually."""

    recent: float
    usual: float

    @property
    def busy(self) -> bool:
        """Whether its machine has more to do than it has cores for, so that whatever runs there may be slow."""
        return self.recent > SATURATED or self.recent > max(BUSY, self.usual + RISEN)


class Paces:
    """The workers of all tasks; where they are too many, those of the tasks that were heard of last."""

    def __init__(self) -> None:
        self._tasks: OrderedDict[str, dict[str, WorkerPace]] = OrderedDict()
        self._pressures: dict[str, dict[str, NodePressure]] = {}

    def forget(self, task: str) -> None:
        """Drop a task."""
        self._tasks.pop(task, None)
        self._pressures.pop(task, None)

    def observe(self, timed: ComputeTimed, *, frozen: bool) -> None:
        """Add a node's timings; where the task is slow (`frozen`), they do not change what is usual."""
        workers = self._tasks.setdefault(timed.task, {})
        self._tasks.move_to_end(timed.task)
        before = len(workers)
        self._note_pressure(timed, frozen=frozen)
        for each in timed.workers:
            if each.seconds < SHORTEST_S:
                continue
            pace = workers.get(each.worker)
            if pace is None:
                pace = WorkerPace(timed.node, each.rank, each.place, timed.epoch, each.seconds, each.seconds)
                workers[each.worker] = pace
                continue
            if timed.epoch < pace.epoch:
                continue
            pace.epoch, pace.rank = timed.epoch, each.rank
            pace.recent_s += SOON * (each.seconds - pace.recent_s)
            if not frozen:
                pace.count += 1
                pace.usual_s += max(LATE, 1 / pace.count) * (each.seconds - pace.usual_s)

        if len(workers) > before:
            self._forget_the_oldest()

    def _note_pressure(self, timed: ComputeTimed, *, frozen: bool) -> None:
        pressures = self._pressures.setdefault(timed.task, {})
        pressure = pressures.setdefault(timed.node, NodePressure(timed.pressure, timed.pressure))
        pressure.recent += SOON * (timed.pressure - pressure.recent)
        pressure.usual += 0.0 if frozen else LATE * (timed.pressure - pressure.usual)

    def _forget_the_oldest(self) -> None:
        while len(self._tasks) > 1 and sum(map(len, self._tasks.values())) > WORKERS:
            self.forget(next(iter(self._tasks)))

    def busy(self, task: str, common: float, slow: list[SlowWorker]) -> list[str]:
        """Return the nodes that are busy, where that explains what `slow` has returned; none where it does not.

        It does where all are slow together, or wait; else where the slow workers are just those on busy machines. A
        slow device has the cores wait, not the other way round.
        """
        workers, pressures = self._tasks.get(task, {}), self._pressures.get(task, {})
        there = {pace.node for pace in workers.values()}
        busy = {node for node in there if node in pressures and pressures[node].busy}
        named = {each.node for each in slow}
        if not named:
            return sorted(busy)
        names = {each.worker for each in slow}
        spared = any(pace.node in busy and name not in names for name, pace in workers.items())
        alone = spared and slow[0].factor > ALONE * max(1.0, common)
        return [] if alone or not named <= busy else sorted(named)

    def slow(self, task: str) -> tuple[float, list[SlowWorker]]:
        """Return the median factor by which microbatches take longer than usual, and the workers that exceed it."""
        workers = self._tasks.get(task, {})
        newest = max((pace.epoch for pace in workers.values()), default=0)
        for name in [name for name, pace in workers.items() if pace.epoch < newest]:
            del workers[name]  # it is in no membership any more
        factors = self._factors(workers)
        if not factors:
            return 0.0, []
        common = median_low(sorted(factors.values()))
        apart = CLEAR * median_low(sorted(abs(factor - common) for factor in factors.values()))
        limit = max(SLOWER * max(1.0, common), common + apart)
        slow = {name: factor for name, factor in factors.items() if factor > limit}
        named = sorted(slow, key=lambda name: -slow[name])[:NAMED]
        return common, [
            SlowWorker(worker=name, node=workers[name].node, rank=workers[name].rank, factor=slow[name])
            for name in named
        ]

    def _factors(self, workers: dict[str, WorkerPace]) -> dict[str, float]:
        """Return how many times as long as usual each takes; one without a past, as others with its place."""
        at: defaultdict[int, list[float]] = defaultdict(list)
        for pace in workers.values():
            at[pace.place].append(pace.recent_s)
        others = {place: median_low(seconds) for place, seconds in at.items() if len(seconds) >= PEERS}
        found: dict[str, float] = {}
        for name, pace in workers.items():
            usual_s = pace.usual_s if pace.count >= PAST else others.get(pace.place)
            if usual_s:
                found[name] = pace.recent_s / usual_s
        return found
