"""Reports of the accounts: by task, by cause, by node."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from unicron.contracts.base import Record
from unicron.observe.accounts.book import Book
from unicron.observe.accounts.chains import ChainCost, TaskCourse
from unicron.observe.accounts.holdings import NOTHING, Lost
from unicron.observe.accounts.phases import ESTIMATES, Phase
from unicron.observe.accounts.spans import Accounts, Key
from unicron.observe.incidents import Incident

USED = {Phase.TRAINING, Phase.IDLE}
"""Phases that are no cost of any cause."""


class CostRow(Record, kw_only=True, frozen=True):
    """Slot-seconds of one task, cause or node.

    Attributes:
        name: of it; the task is empty for slots that no task had.
        seconds: by phase, all of them; of causes and nodes only what they cost.
        failures: that were detected, once for each task that had slots there.
    """

    name: str
    seconds: dict[str, float]
    failures: int = 0

    @property
    def total_s(self) -> float:
        """Slot-seconds of all phases."""
        return sum(self.seconds.values())

    def share(self, phase: Phase) -> float:
        """Return which part of its time is of a phase, 0 to 1."""
        return self.seconds[phase] / self.total_s if self.total_s else 0.0


class TaskRow(CostRow, kw_only=True, frozen=True):
    """The time of a task, by phase.

    Attributes:
        whole_s: wall time times slots, counted apart from the phases, which must add up to it.
        wall_s: seconds from its submission to its end, by what the task as a whole did.
        goodput: share of the GPU time that was training, and was not lost since.
        effective_time: likewise of the wall time, on however many slots.
        at_most: it was less where the program, which was run again, did not go on from its very end.
        causes: slot-seconds that were neither training nor idle, by what they were lost to; "" is nothing's fault.
    """

    whole_s: float
    wall_s: dict[str, float]
    goodput: float
    effective_time: float
    at_most: bool = False
    causes: dict[str, float] = {}


class Report(Record, kw_only=True, frozen=True):
    """The time of all slots, by phase.

    Attributes:
        since, until: Unix seconds.
        tasks: in the order of their names; the first may be that of no task.
        causes: what time was lost to, most first: a failure's status, what a plan answered, or "slowdown".
        nodes: on which failures or slowdowns were, most first.
        estimates: what is no measure, and why.
    """

    since: float
    until: float
    tasks: list[TaskRow]
    causes: list[CostRow]
    nodes: list[CostRow]
    estimates: tuple[str, ...] = ESTIMATES

    def row(self, task: str) -> TaskRow | None:
        """Return the row of a task; None where nothing is known of it."""
        return next((row for row in self.tasks if row.name == task), None)

    def records(self) -> list[dict[str, Any]]:
        """Return all rows alike, for a table: scope, name, failures, slot-seconds in all and by phase, shares."""
        found = []
        for scope, rows in (("task", self.tasks), ("cause", self.causes), ("node", self.nodes)):
            for row in rows:
                shares = {"whole_s": None, "goodput": None, "effective_time": None}
                if isinstance(row, TaskRow):
                    shares = {name: getattr(row, name) for name in shares}
                head = {"scope": scope, "name": row.name, "failures": row.failures, "total_s": row.total_s}
                found.append(head | shares | {f"{phase}_s": row.seconds[phase] for phase in Phase})
        return found


def make(
    span: tuple[float, float],
    accounts: Accounts,
    wall: Accounts,
    whole: Mapping[str, float],
    failures: Mapping[Key, int],
    lost: Mapping[str, Lost],
    only: str | None = None,
) -> Report:
    """Return the report of these accounts.

    Args:
        span: since when and until when, in Unix seconds.
        accounts: slot-seconds.
        wall: seconds of tasks as a whole.
        whole: slot-seconds that each task held slots.
        failures: how many were detected.
        lost: by task, what is in the accounts as training, and in vain.
        only: a task; None for all.
    """
    found = {key: account for key, account in accounts.items() if only in {None, key.task}}
    counts = {key: count for key, count in failures.items() if only in {None, key.task}}
    of_tasks, of_walls = _sums(found, lambda key: key.task), _sums(wall, lambda key: key.task)
    of_causes: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for key, account in found.items():
        if cost_s := sum(seconds for phase, seconds in account.items() if phase not in USED):
            of_causes[key.task][key.cause.what] += cost_s
    failed = _counts(counts, lambda key: key.task)
    tasks = [
        TaskRow(
            name=name,
            seconds=of_tasks.get(name, _nothing()),
            failures=failed[name],
            whole_s=whole[name],
            wall_s=of_walls.get(name, _nothing()),
            goodput=_share(of_tasks.get(name, _nothing()), lost.get(name, NOTHING).slot_s),
            effective_time=_share(of_walls.get(name, _nothing()), lost.get(name, NOTHING).wall_s),
            at_most=lost.get(name, NOTHING).unseen,
            causes=dict(sorted(of_causes[name].items(), key=lambda each: -each[1])),
        )
        for name in sorted(whole)
        if only in {None, name} and (name or whole[name])
    ]
    costs = {key: {p: s for p, s in account.items() if p not in USED} for key, account in found.items()}
    return Report(
        since=span[0],
        until=span[1],
        tasks=tasks,
        causes=_rows(costs, counts, lambda key: key.cause.what),
        nodes=_rows(costs, counts, lambda key: key.cause.node),
    )


def cost(incident: Incident, slots: Book, wall: Book) -> ChainCost:
    """Return what a chain cost, by accounts and spans of slots and of tasks as a whole, seconds of wall time."""
    name = incident.cause.chain
    spans = wall.spans.get(name, [])
    times = _sums(wall.accounts[name], lambda key: key.task)
    concerned = sorted(incident.tasks.keys() | times.keys() | {key.task for key in slots.accounts[name]})
    courses = []
    for task in concerned:
        seconds = times.get(task, _nothing())
        courses.append(
            TaskCourse(
                task=task,
                recovered_at=incident.tasks[task].over_at if task in incident.tasks else None,
                seconds=seconds,
                whole_s=sum(seconds.values()),
                spans=[span for span in spans if span.task == task],
                more=wall.more[name],
            )
        )
    seconds = _sums(slots.accounts[name], lambda _: name).get(name, _nothing())
    return ChainCost(
        chain=name,
        what=incident.cause.what,
        node=incident.cause.node,
        tasks=concerned,
        begun=incident.begun,
        detected_at=incident.detected_at,
        decided_at=incident.decided_at,
        recovered_at=incident.recovered_at(),
        ended=incident.ended(),
        seconds=seconds,
        whole_s=sum(seconds.values()),
        spans=slots.spans.get(name, []),
        more=slots.more[name],
        courses=courses,
    )


def _rows(costs: Accounts, failures: Mapping[Key, int], name: Callable[[Key], str]) -> list[CostRow]:
    sums, counts = _sums(costs, name), _counts(failures, name)
    names = {each for each in [*sums, *counts] if each}
    rows = [CostRow(name=each, seconds=sums.get(each, _nothing()), failures=counts[each]) for each in names]
    return sorted(rows, key=lambda row: (-row.total_s, row.name))


def _sums(accounts: Accounts, name: Callable[[Key], str]) -> dict[str, dict[str, float]]:
    """Return the seconds by phase of all accounts that have a name in common."""
    found: dict[str, dict[str, float]] = {}
    for key, account in accounts.items():
        seconds = found.setdefault(name(key), _nothing())
        for phase, more in account.items():
            seconds[str(phase)] += more
    return found


def _counts(failures: Mapping[Key, int], name: Callable[[Key], str]) -> Counter[str]:
    found: Counter[str] = Counter()
    for key, count in failures.items():
        found[name(key)] += count
    return found


def _nothing() -> dict[str, float]:
    return dict.fromkeys(map(str, Phase), 0.0)


def _share(seconds: Mapping[str, float], lost: float) -> float:
    total = sum(seconds.values())
    return max(0.0, seconds[Phase.TRAINING] - lost) / total if total else 0.0
