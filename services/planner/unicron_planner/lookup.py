"""The lookup table of paper section 5.2: what to do after each event that can come next."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import gcd
from typing import NamedTuple

import numpy as np

from unicron.contracts.plans import Trigger, TriggerKind
from unicron_planner import program
from unicron_planner.program import Floats, Ints, Passes, Scores, Tasks, Truths

MIXED = 256
"""Most rows for events that hit several tasks."""

STEPS = 2e9
"""Additions that such rows may take, all together: about a second."""


class LookupRow(NamedTuple):
    """One answer of the lookup table.

    Attributes:
        trigger: what it is the answer to.
        workers: n' after that event.
        sizes: workers of each task that is left after it.
        reward: sum of G (equation 3).
    """

    trigger: Trigger
    workers: int
    sizes: dict[str, int]
    reward: float


@dataclass(frozen=True)
class TaskStanding:
    """How a task stands before the event.

    Attributes:
        sizes: worker counts it can be given, ascending, 0 (it waits) the first.
        waf: F(t, x') for each of them.
        held: x, the workers it has.
        held_waf: F(t, x).
        tensor: workers that belong into one node, for each size; None where the task's layouts say it.
        relaid: for each size, whether replicas there have another shape than at x; None where the shape is the same at
            all of them.
        doubt: for each size, what a plan must gain beyond its cost before it takes all of it from the task, in weighted
            FLOP/s; to take a part, the difference of two. Never falls from one size to the next; None where all is
            known exactly.
    """

    sizes: Ints
    waf: Floats
    held: int
    held_waf: float
    tensor: Ints | None = None
    relaid: Truths | None = None
    doubt: Floats | None = None

    def waf_of(self, size: int) -> float:
        """Return F(t, x') for one of its sizes."""
        return float(self.waf[np.searchsorted(self.sizes, size)])

    def only(self, keep: Truths) -> "TaskStanding":
        """Return the task with some of its sizes."""
        return replace(
            self,
            sizes=self.sizes[keep],
            waf=self.waf[keep],
            tensor=None if self.tensor is None else self.tensor[keep],
            relaid=None if self.relaid is None else self.relaid[keep],
            doubt=None if self.doubt is None else self.doubt[keep],
        )


@dataclass(frozen=True)
class Situation:
    """The cluster before the event.

    Attributes:
        tasks: by name, in order of submission.
        failure_rate: failures a second and worker.
        resize_s: D_transition of a task that is reconfigured without having lost anything.
        failure_s: D_transition of a task that lost workers.
        relayout_s: D_transition of a task whose layout changes, whether or not it lost workers.
    """

    tasks: Mapping[str, TaskStanding]
    failure_rate: float
    resize_s: float
    failure_s: float
    relayout_s: float = 0.0

    def running_s(self, workers: int) -> float:
        """Return D_running(n'): the expected time to the next failure among `workers`."""
        return 1.0 / (max(workers, 1) * self.failure_rate)


@dataclass(frozen=True)
class Event:
    """Something that may come next.

    Attributes:
        trigger: what it is called.
        workers: n' after it.
        lost: workers that it takes from tasks; these are hit.
        ended: task that it ends.
        launched: waiting task that must run after it.
    """

    trigger: Trigger
    workers: int
    lost: Mapping[str, int] = field(default_factory=dict)
    ended: str = ""
    launched: str = ""


Effect = tuple[int, frozenset[tuple[str, int]], str, str]


def effect(event: Event) -> Effect:
    """Return what an event does, whatever it is called: events with the same effect have the same answer."""
    return event.workers, frozenset(event.lost.items()), event.ended, event.launched


Sweeps = dict[int, Passes]
"""The passes over all tasks by n', kept from one table to the next, so that only what changed is done again."""


def table(situation: Situation, events: Iterable[Event], sweeps: Sweeps | None = None) -> dict[Effect, LookupRow]:
    """Return the answers to all `events`, less those that can't happen (a launch that needs more than there is).

    Args:
        situation: the cluster before the event.
        events: what may come next.
        sweeps: the passes that the last table was made with; holds those of this one afterwards.
    """
    problem = _Problem(situation)
    by_size: dict[int, dict[Touched, Event]] = {}
    for event in events:
        by_size.setdefault(event.workers, {}).setdefault(problem.touched(event), event)
    sweeps = {} if sweeps is None else sweeps
    older = dict(sweeps)
    sweeps.clear()
    rows: dict[Effect, LookupRow] = {}
    for workers, cases in by_size.items():
        passes = sweeps[workers] = program.prepare(problem.scores(workers), problem.units(workers), older.get(workers))
        single = sorted(touched[0] for touched in cases if len(touched) == 1)
        found = dict(zip(single, program.singles(passes, single), strict=True)) if any(cases) else {}
        for touched, event in cases.items():
            lost = problem.lost(touched)
            sizes = found[touched[0]] if len(touched) == 1 else program.several(passes, lost)
            if sizes is not None and (sizes[:1] >= 0).all():
                rows[effect(event)] = problem.row(event, sizes, lost)
    return rows


def answer(situation: Situation, event: Event) -> LookupRow:
    """Return what to do after one event that was not foreseen.

    Raises:
        ValueError: it can't happen: a task must run that finds no room.
    """
    problem = _Problem(situation)
    lost = problem.lost(problem.touched(event))
    sizes = program.solve(problem.scores(event.workers), lost, problem.units(event.workers))
    if sizes is None:
        raise ValueError(f"{event.launched} can't run on {event.workers} workers; it may wait, though")
    return problem.row(event, sizes, lost)


def runner_up(situation: Situation, event: Event, best: LookupRow) -> LookupRow | None:
    """Return the best other assignment after the same event; `best` is the optimal one."""
    problem = _Problem(situation, every_size=True)
    lost = problem.lost(problem.touched(event))
    sizes = np.array([best.sizes.get(name, 0) for name in situation.tasks], np.int64) // problem.unit
    other = program.second_best(problem.scores(event.workers), lost, problem.units(event.workers), sizes)
    return None if other is None else problem.row(event, other, lost)


def mixed_rows(situation: Situation, workers: int) -> int:
    """Return how many events that hit several tasks the table shall have answers for.

    Each costs up to a step of the program for every task. In a large cluster the table has no time for many: while it
    is made, the next event waits.
    """
    problem = _Problem(situation)
    return min(MIXED, int(STEPS / (problem.units(workers) * problem.choices + 1)))


def warm_up() -> None:
    """Have everything compiled, before somebody waits for an answer."""
    task = TaskStanding(np.arange(3), np.arange(3.0), 1, 1.0)
    given = Situation({"a": task, "b": task}, 1.0, 1.0, 1.0)
    none = Trigger(TriggerKind.WHAT_IF)
    event = Event(none, 4)
    table(given, [event, Event(none, 3, {"a": 1}), Event(none, 3, {"a": 1, "b": 1})])
    runner_up(given, event, answer(given, event))


Touched = tuple[tuple[int, float], ...]
"""Tasks, by number, and how many workers each loses, in units, or that it ends or must run."""


def _sensible(task: TaskStanding) -> TaskStanding:
    """Return the task without the sizes that no optimal plan has: those that earn less than a smaller one.

    Where the layout changes with the size, only sizes whose change costs the same and is as much in doubt are compared.
    """
    relaid = np.zeros(len(task.sizes), np.bool_) if task.relaid is None else task.relaid
    worth = task.waf
    if task.relaid is not None and task.doubt is not None:  # more in doubt counts as more, whatever it earns
        worth = worth + np.cumsum(np.diff(task.doubt, prepend=0.0) > 0) * 2 * worth.max()
    keep = task.sizes == task.held
    for alike in (relaid, ~relaid):
        before = np.maximum.accumulate(np.concatenate([[0.0], np.where(alike, worth, 0.0)[:-1]]))
        keep |= alike & (worth >= before)
    return task if keep.all() else task.only(keep)


class _Problem:
    """A situation in arrays, in units of workers: the largest number that all sizes are multiples of."""

    def __init__(self, situation: Situation, *, every_size: bool = False) -> None:
        self._situation = situation
        standings = [task if every_size else _sensible(task) for task in situation.tasks.values()]
        self._names = list(situation.tasks)
        self._index = {name: index for index, name in enumerate(self._names)}
        self.unit = (
            gcd(*(int(np.gcd.reduce(task.sizes)) for task in standings), *(task.held for task in standings)) or 1
        )
        self._tasks: Tasks = program.pack(
            [task.sizes // self.unit for task in standings],
            [task.waf for task in standings],
            [task.held // self.unit for task in standings],
            [task.held_waf for task in standings],
            [task.relaid for task in standings],
            [task.doubt for task in standings],
        )

    @property
    def choices(self) -> int:
        return len(self._tasks.sizes)

    def units(self, workers: int) -> int:
        return workers // self.unit

    def touched(self, event: Event) -> Touched:
        """Return what the event does to which tasks, by task."""
        what: list[tuple[int, float]] = [
            (self._index[name], count / self.unit) for name, count in event.lost.items() if count
        ]
        if event.ended:
            what = [(index, count) for index, count in what if index != self._index[event.ended]]
            what.append((self._index[event.ended], program.ENDED))
        if event.launched:
            what.append((self._index[event.launched], program.LAUNCHED))
        return tuple(sorted(what))

    def lost(self, touched: Touched) -> Floats:
        lost = np.zeros(len(self._names))
        for index, count in touched:
            lost[index] = count
        return lost

    def scores(self, workers: int) -> Scores:
        given = self._situation
        return program.score(
            self._tasks,
            self.units(workers),
            given.running_s(workers),
            given.resize_s,
            given.failure_s,
            given.relayout_s,
        )

    def row(self, event: Event, sizes: Ints, lost: Floats) -> LookupRow:
        given = self._situation
        running_s = given.running_s(event.workers)
        costs = given.resize_s, given.failure_s, given.relayout_s
        earned = program.reward(self._tasks, sizes, lost, running_s, *costs)
        there = zip(self._names, (sizes * self.unit).tolist(), lost.tolist(), strict=True)
        kept = {task: size for task, size, how in there if how != program.ENDED}
        return LookupRow(event.trigger, event.workers, kept, earned)
