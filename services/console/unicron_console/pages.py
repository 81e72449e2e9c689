"""The pages, made from the picture of the cluster as it is. Pure."""

from collections.abc import Iterable, Iterator, Sequence

from msgspec import structs

from unicron.contracts.answers import PlanView, StragglerView
from unicron.contracts.hardware import Gpu
from unicron.contracts.tasks import UNCOUNTED, NodeState, TaskState
from unicron.healing import shown_shape
from unicron.observe.accounts.chains import ChainCost
from unicron.observe.accounts.eta import time_left
from unicron.observe.accounts.report import Report
from unicron.observe.cluster import ClusterPicture
from unicron.observe.incidents import Failure
from unicron.observe.state import JournalLine, NodePicture, Story, TaskPicture, ThinnedSeries
from unicron.observe.words.configuration import configuration
from unicron.observe.words.explain import changes, comes, explain
from unicron.observe.words.headline import headline_of
from unicron.observe.words.signs import Sign, words
from unicron.observe.words.units import KNOWN_FLOPS
from unicron_console.views import (
    ClusterPage,
    FailureLine,
    FailurePage,
    GpuLine,
    Mark,
    NodePage,
    NodeSquare,
    PlanPage,
    PlanRow,
    StragglerPage,
    TaskLine,
    TaskPage,
    WorkerLine,
)

LAST_FAILURES = 20
"""Failures in a list that is not only of failures."""

LAST_EVENTS = 200
"""Changes that the cluster's page shows."""

HISTORY = 200
"""Changes that a node's page shows."""

SAID = 6
"""Most messages of one mark whose texts are shown."""


class Pages:
    """The pages made from the picture of a cluster.

    Args:
        picture: of the cluster.

    Attributes:
        report: of the goodput, as it was when `account` was called last.
    """

    def __init__(self, picture: ClusterPicture) -> None:
        self._picture = picture
        self.report: Report = picture.goodput.report()
        self._costs: dict[str, ChainCost] = {}

    def account(self, now: float) -> None:
        """Work out anew where the time went; it looks at each slot, so not for each answer."""
        self.report, costs = self._picture.goodput.statement(now)
        self._costs = {cost.chain: cost for cost in costs if cost.chain in self._picture.failures}

    # --- lines -------------------------------------------------------------------------------------------------------

    def square(self, node: NodePicture, now: float) -> NodeSquare:
        """Return a node in one square."""
        suspected = node.state is NodeState.UP and node.suspected_until > now
        slots = [node.tasks.get(index, "") for index in range(node.slots)]
        state = "suspected" if suspected else str(node.state)
        return NodeSquare(state=state, slots=slots, alarm=node.alarm or node.standby)

    def task_line(self, task: TaskPicture) -> TaskLine:
        """Return a task in one line."""
        spec, row = task.spec, self.report.row(task.spec.name)
        planned = task.share.waf if task.share else 0.0
        return TaskLine(
            name=spec.name,
            colour=task.colour,
            state=str(task.state),
            reason=task.reason,
            weight=spec.weight,
            workers=len(task.members),
            min_workers=spec.min_workers,
            max_workers=spec.max_workers,
            iteration=task.iteration,
            iterations=spec.iterations if spec.iterations < UNCOUNTED else None,
            iteration_s=task.iteration_s,
            loss=task.loss,
            waf=task.waf if task.waf >= KNOWN_FLOPS else 0.0,
            planned_waf=planned if planned >= KNOWN_FLOPS else 0.0,
            goodput=row.goodput if row and row.total_s else None,
            left=None
            if task.state is not TaskState.RUNNING
            else time_left(spec, task.iteration, task.recent, row.wall_s if row else {}),
            slow=task.slow,
            drill=task.drill,
            paused=task.paused,
            withheld=task.withheld,
        )

    def failure_line(self, failure: Failure, cost: ChainCost | None = None) -> FailureLine:
        """Return a failure in one line, by what it cost; None: as was worked out last."""
        chain, first = failure.cause.chain, failure.first
        cost = cost or self._costs.get(chain)
        return FailureLine(
            chain=chain,
            at=first.at,
            severity=failure.severity,
            status=str(first.status),
            node=first.node,
            worker=first.worker,
            tasks=list(failure.tasks),
            recovered_s=failure.took_s(),
            over=not failure.is_open,
            cost_s=cost.whole_s if cost else 0.0,
            text=first.reason,
        )

    def failures(self, of: Iterable[Failure] | None = None) -> list[FailureLine]:
        """Return failures, newest first; None: all that are known."""
        known = self._picture.failures.values() if of is None else of
        return [self.failure_line(failure) for failure in reversed(list(known))]

    # --- cluster -----------------------------------------------------------------------------------------------------

    def cluster(self, now: float, behind: int = 0) -> ClusterPage:
        """Return the whole cluster at a glance."""
        of = self._picture
        events = [entry for entry, _, _ in list(of.events)[-LAST_EVENTS:]]
        nodes, tasks = list(of.nodes), list(of.tasks)
        return self._cluster(now, behind, nodes, tasks, events, self._course())

    def changes(self, now: float, changed: set[tuple[str, str]], after: int) -> ClusterPage:
        """Return what changed.

        Args:
            now: Unix seconds.
            changed: kinds and names of what did.
            after: position of the last change that is known already.
        """
        events: list[JournalLine] = []
        if ("event", "") in changed:
            for entry, _, _ in reversed(self._picture.events):
                if entry.position <= after or len(events) >= LAST_EVENTS:
                    break
                events.append(entry)
        names: dict[str, list[str]] = {"node": [], "task": []}
        for kind, name in changed:
            if kind in names and name:
                names[kind].append(name)
        names["task"].sort(key=lambda name: self._picture.tasks[name].number if name in self._picture.tasks else -1)
        course = self._course() if ("course", "") in changed else []
        return self._cluster(now, 0, names["node"], names["task"], events[::-1], course)

    def _cluster(
        self,
        now: float,
        behind: int,
        nodes: Sequence[str],
        tasks: Sequence[str],
        events: list[JournalLine],
        course: list[tuple[float, float]],
    ) -> ClusterPage:
        of = self._picture
        squares = {}
        for name in nodes:
            node = of.nodes.get(name)
            squares[name] = NodeSquare(state="") if node is None else self.square(node, now)
        lines = []
        for name in tasks:
            task = of.tasks.get(name)
            gone = TaskLine(name=name, colour=-1, state=str(TaskState.REMOVED))
            lines.append(gone if task is None else self.task_line(task))
        rows = [row for row in self.report.tasks if row.name]
        whole = sum(row.total_s for row in rows)
        waf, possible = of.waf, of.plan.waf if of.plan else 0.0
        last = [
            failure
            for place, failure in enumerate(of.failures.values(), LAST_FAILURES - len(of.failures))
            if place >= 0 or failure.is_open
        ]
        return ClusterPage(
            now=now,
            position=of.position,
            behind=behind,
            waf=waf if waf >= KNOWN_FLOPS else 0.0,
            possible_waf=possible if possible >= KNOWN_FLOPS else 0.0,
            goodput=sum(row.seconds["training"] for row in rows) / whole if whole else None,
            course=course,
            slots=of.slots,
            spares=of.spares,
            observe_only=of.observe_only,
            nodes=squares,
            tasks=lines,
            failures=self.failures(last),
            events=events,
        )

    def _course(self) -> list[tuple[float, float]]:
        found, before = [], (0.0, 0.0)
        for at, trained, whole in self._picture.course.points():
            if whole > before[1]:
                found.append((at, (trained - before[0]) / (whole - before[1])))
            before = (trained, whole)
        return found

    # --- one of them -------------------------------------------------------------------------------------------------

    def task(self, name: str, now: float) -> TaskPage | None:
        """Return a task; None where there is none."""
        task = self._picture.tasks.get(name)
        if task is None:
            return None
        row = self.report.row(name)
        hit = [failure for failure in self._picture.failures.values() if name in failure.tasks]
        return TaskPage(
            now=now,
            line=self.task_line(task),
            progress=_progress(task.progress),
            layout=shown_shape(task.spec, len(task.members)).degrees,
            workers=list(self._workers(task)),
            attempts=list(task.attempts)[::-1],
            failures=self.failures(hit[-LAST_FAILURES:]),
            seconds=_nonzero(row.seconds) if row else {},
            whole_s=row.whole_s if row else 0.0,
            kept=task.kept,
            recomputed=task.recomputed,
            traceback=task.traceback,
            configuration=configuration(task.spec),
            causes=row.causes if row else {},
            struck=row.failures if row else 0,
            earlier=[_progress(each) for each in task.earlier],
        )

    def _workers(self, task: TaskPicture, node: str = "") -> Iterator[WorkerLine]:
        layout = shown_shape(task.spec, len(task.members))
        for rank, member in enumerate(task.members):
            if not node or member.node == node:
                replica, place = layout.seat(rank)
                yield WorkerLine(
                    worker=member.worker, node=member.node, slot=member.slot, rank=rank, replica=replica, place=place
                )

    def failure(self, chain: str, now: float) -> FailurePage | None:
        """Return a failure; None where there is none, or it is too long ago."""
        failure = self._picture.failures.get(chain)
        if failure is None:
            return None
        cost, story = self._picture.goodput.chain(chain, now), self._picture.stories.get(chain)
        line = self.failure_line(failure, cost)
        messages = story.entries if story else []
        return FailurePage(
            now=now,
            line=line,
            headline=self._picture.names.explain(headline_of(failure, failure.first)),
            begun=failure.begun,
            wall={each.task: _nonzero(each.seconds) for each in cost.courses} if cost else {},
            seconds=_nonzero(cost.seconds) if cost else {},
            bars=cost.spans if cost else [],
            more=cost.more if cost else 0,
            marks=_marks(story) if story else [],
            messages=messages,
            unheard=story.unheard if story else 0,
            evidence=story.evidence if story else [],
            plan=story.plan if story else [],
        )

    def node(self, name: str, now: float) -> NodePage | None:
        """Return a node; None where there is none."""
        node = self._picture.nodes.get(name)
        if node is None:
            return None
        hit = [failure for failure in self._picture.failures.values() if failure.first.node == name]
        row = next((row for row in self.report.nodes if row.name == name), None)
        history = [entry for entry, whose, _ in self._picture.events if whose == name]
        here = {task for task in node.tasks.values() if task in self._picture.tasks}
        return NodePage(
            now=now,
            node=name,
            square=self.square(node, now),
            host=node.host,
            rack=node.rack,
            domain=node.domain,
            since=node.since,
            kind=node.kind,
            workers=[line for task in sorted(here) for line in self._workers(self._picture.tasks[task], name)],
            gpus=[_gpu(gpu) for gpu in node.gpus.gpus] if node.gpus else [],
            failures=self.failures(hit[-LAST_FAILURES:]),
            cost_s=row.total_s if row else 0.0,
            history=history[: -HISTORY - 1 : -1],
        )


def _marks(story: Story) -> list[Mark]:
    """Return what is marked of a story: once what several did, in the order in which it began."""
    groups: dict[str, list[tuple[JournalLine, Sign]]] = {}
    for entry, sign in zip(story.entries, story.signs, strict=True):
        if sign is not None:
            groups.setdefault(sign.group or str(entry.position), []).append((entry, sign))
    named = len({sign.task for sign in story.signs if sign is not None and sign.task}) > 1
    return [
        Mark(
            at=max(entry.at for entry, _ in group),
            position=group[0][0].position,
            kind=group[0][0].kind,
            text=words([sign for _, sign in group], named=named),
            said=[f"{entry.source}: {entry.text}" for entry, _ in group[:SAID]],
            more=len(group[SAID:]),
        )
        for group in groups.values()
    ]


def _progress(series: ThinnedSeries) -> list[tuple[float, int, float, float]]:
    return [(at, int(iteration), loss, seconds) for at, iteration, loss, seconds in series.points()]


def _nonzero(seconds: dict[str, float]) -> dict[str, float]:
    return {phase: each for phase, each in seconds.items() if each}


def _gpu(gpu: Gpu) -> GpuLine:
    counters = {
        name: float(value) for name, value in structs.asdict(gpu).items() if name != "slot" and value is not None
    }
    return GpuLine(slot=gpu.slot, counters=counters)


def plan_page(view: PlanView, now: float) -> PlanPage:
    """Return a plan, or what one would be, in words and figures."""
    plan = view.plan
    before = {share.task: len(share.slots) for share in plan.shares} if plan else {}
    table = [
        PlanRow(
            event=comes(row.trigger),
            workers=row.workers,
            changes=changes(before, row.changes),
            waf=row.waf if row.waf >= KNOWN_FLOPS else 0.0,
        )
        for row in view.table
    ]
    return PlanPage(
        now=now,
        words=explain(view),
        shares=before,
        before={share.task: share.before for share in plan.shares} if plan else {},
        table=table,
        view=view,
    )


def straggler_page(task: TaskPicture, view: StragglerView | None, now: float) -> StragglerPage:
    """Return the stragglers of a task."""
    ranks, columns = sorted(task.heat.workers), task.heat.columns
    return StragglerPage(
        now=now,
        view=view,
        heat=[[column.get(rank) for column in columns.values()] for rank in ranks],
        iterations=list(columns),
        workers=[task.heat.workers[rank] for rank in ranks],
    )
