"""The planner's decisions: after each event that changes the cluster, which task gets which slots (paper section 5).

The answer is read from the lookup table where the event was foreseen, and computed where not. The table for the next
events is made after the plan has gone out: the core asks for a timer.
"""

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace

import numpy as np
from msgspec import structs

from unicron.checks import check_task
from unicron.contracts.base import Message, SetTimer, Started, TimerFired
from unicron.contracts.events import (
    FailureDetected,
    IterationFinished,
    NodeAdmitted,
    NodeDrained,
    NodeGone,
    PlanDecided,
    Severity,
    TaskBroken,
    TaskRecovered,
    TaskRemoved,
    TaskStateChanged,
    TaskSubmitted,
)
from unicron.contracts.plans import Trigger, TriggerKind
from unicron.contracts.queries import Curve, CurvePoint, GetCurve, GetPlan, PlanView, Query, Reply, TableRow, WhatIf
from unicron.contracts.tasks import SlotRef, TaskState
from unicron.core import Core
from unicron.errors import InvalidInputError
from unicron_planner import estimates, lookup, nodes, throughput
from unicron_planner.estimates import FAILURE, RESIZE, Options
from unicron_planner.lookup import Effect, Event, Row, Situation, Standing, Sweeps
from unicron_planner.plans import differs, make_plan, slots_of
from unicron_planner.state import Node, PlannerState
from unicron_planner.throughput import Estimate, Measured

REFRESH = SetTimer(name="refresh", after_s=0.02)
"""Not at once: a plan on its way shall not have to share a core with this, and a burst of events makes one table."""

ENDS = {
    TaskState.FINISHED: TriggerKind.TASK_FINISHED,
    TaskState.FAILED: TriggerKind.TASK_FAILED,
    TaskState.REMOVED: TriggerKind.TASK_REMOVED,
}


def _no_time() -> float:
    return 0.0


class Planner(Core):
    """Keeps the plan optimal, and the next ones ready.

    Args:
        state: of an earlier run.
        options: what an administrator set.
        stopwatch: seconds from any beginning, to tell how long a plan took; a core has no clock of its own.
    """

    def __init__(
        self,
        state: PlannerState | None = None,
        options: Options | None = None,
        stopwatch: Callable[[], float] = _no_time,
    ) -> None:
        self.state: PlannerState = state or PlannerState()
        self._options = options or Options()
        self._stopwatch = stopwatch
        self._table: dict[Effect, Row] = {}
        self._sweeps: Sweeps = {}
        self._situation: Situation | None = None
        self._awaited = False
        self._refresh_s = 0.0
        self._decided: tuple[Situation, Event, Row] | None = None
        self._runner_up: Row | None = None

    def handle(self, message: Message) -> list[Message]:
        """Take a fact, a piece of telemetry or a timer in; return what follows from it.

        Raises:
            InvalidInputError: a task was submitted that can't be planned for; nothing was changed.
        """
        match message:
            case IterationFinished():
                return self._measure(message)
            case TimerFired():
                self._refresh()
                return []
            case Started():
                return self._soon()
        self._count_time(message.at)
        return self._on_node(message) or self._on_task(message)

    def answer(self, query: Query) -> tuple[Reply, list[Message]]:
        """Return the current plan and the lookup table, what would be planned, or what is believed of a task."""
        try:
            match query:
                case GetPlan():
                    if self._situation is None:
                        self._refresh()
                    return Reply(plan=self._view(table=True)), []
                case WhatIf():
                    return Reply(plan=self._what_if(query)), []
                case GetCurve(task=task):
                    return Reply(curve=self._curve(task)), []
        except InvalidInputError as error:
            return Reply(error=str(error)), []
        known = "GetPlan, WhatIf and GetCurve"
        return Reply(error=f"the planner does not answer {type(query).__name__}; it answers {known}"), []

    # --- nodes -------------------------------------------------------------------------------------------------------

    def _on_node(self, message: Message) -> list[Message]:
        match message:
            case NodeAdmitted():
                return self._admit(message)
            case NodeDrained():
                return self._drain(message)
            case NodeGone(node=node) if self._is_up(node):
                return self._take_out([node], Trigger.of(TriggerKind.NODE_LEFT, [node]))
            case FailureDetected(severity=Severity.SEV1, node=node):
                was_up = self._is_up(node)
                out = self._take_out([node], Trigger.of(TriggerKind.NODE_LOST, [node]), owed=True)
                self.state.failures += was_up  # only now: a prepared and a computed answer come from the same rate
                return out
            case FailureDetected(task=task) if task in self.state.tasks:
                self.state.disturbed[task] = FAILURE
        return []

    def _admit(self, admitted: NodeAdmitted) -> list[Message]:
        name, node = admitted.node, Node(slots=[slot.index for slot in admitted.slots])
        if self.state.nodes.get(name) == node:
            return []  # its agent was started again
        self.state.nodes[name] = node
        return self._decide(Trigger.of(TriggerKind.NODE_JOINED, [name]))

    def _drain(self, message: NodeDrained) -> list[Message]:
        name, drain = message.node, message.drain
        if drain == (name in self.state.drained):
            return []
        held = slots_of(self.state.plan)
        (self.state.drained.append if drain else self.state.drained.remove)(name)
        if not self._is_up(name):
            return []
        if drain:
            return self._decide(Trigger.of(TriggerKind.NODE_DRAINED, [name]), lost=nodes.lost_with([name], held))
        return self._decide(Trigger.of(TriggerKind.NODE_UNDRAINED, [name]))

    def _take_out(self, names: list[str], trigger: Trigger, *, owed: bool = False) -> list[Message]:
        """Take nodes out of use; whoever cures a failure waits for an answer, even if nothing changes."""
        for name in names:
            if self._is_up(name):
                self.state.nodes[name] = structs.replace(self.state.nodes[name], up=False)
        return self._decide(trigger, lost=nodes.lost_with(names, slots_of(self.state.plan)), owed=owed)

    def _is_up(self, name: str) -> bool:
        return name in self.state.nodes and self.state.nodes[name].up

    # --- tasks -------------------------------------------------------------------------------------------------------

    def _on_task(self, message: Message) -> list[Message]:
        match message:
            case TaskSubmitted():
                return self._submit(message)
            case TaskRecovered(task=task, seconds=seconds) if math.isfinite(seconds) and seconds >= 0:
                estimates.observe(self.state, task, seconds)
            case TaskRemoved(task=task):
                return self._end(task, TriggerKind.TASK_REMOVED)
            case TaskBroken(task=task):
                return self._end(task, TriggerKind.TASK_FAILED)
            case TaskStateChanged(task=task, state=state) if state.ended:
                return self._end(task, ENDS[state])
        return []

    def _submit(self, submitted: TaskSubmitted) -> list[Message]:
        check_task(submitted.spec)
        throughput.check(submitted.spec)
        if self.state.tasks.get(submitted.task) == submitted.spec:
            return []
        self._forget(submitted.task)
        self.state.tasks[submitted.task] = submitted.spec
        self._table = {}  # nothing in it foresaw this task
        return self._decide(Trigger.of(TriggerKind.TASK_SUBMITTED, [submitted.task]))

    def _end(self, task: str, how: TriggerKind) -> list[Message]:
        if task not in self.state.tasks:
            return []
        del self.state.tasks[task]
        self._forget(task)
        return self._decide(Trigger.of(how, [task]), ended=task)

    def _forget(self, task: str) -> None:
        """Forget what was measured: it holds for one configuration."""
        self.state.measured.pop(task, None)
        self.state.epochs.pop(task, None)
        self.state.disturbed.pop(task, None)

    def _measure(self, done: IterationFinished) -> list[Message]:
        """Add an iteration's time to the sums; ask for a new table where it changes what is believed."""
        spec = self.state.tasks.get(done.task)
        sound = math.isfinite(done.seconds) and done.seconds > 0
        if spec is None or not sound or not 1 <= done.world_size <= spec.max_workers or not self._options.use_measured:
            return []
        if self.state.epochs.get(done.task) != done.epoch:
            self.state.epochs[done.task] = done.epoch
            return []  # the first iteration of a membership holds its start, or the cure of a failure
        by_size = self.state.measured.setdefault(done.task, {})
        now = by_size[done.world_size] = throughput.added(by_size.get(done.world_size, Measured()), done.seconds)
        moved = abs(now.mean_s - now.believed_s) > estimates.DRIFT * max(now.mean_s, now.believed_s)
        return self._soon() if moved else []

    # --- plans -------------------------------------------------------------------------------------------------------

    def _decide(
        self, trigger: Trigger, *, lost: Mapping[str, int] | None = None, ended: str = "", owed: bool = False
    ) -> list[Message]:
        """Answer a change of the cluster. A plan that says nothing new is not sent, unless somebody is `owed` one."""
        began, before, there = self._stopwatch(), self.state.plan, self._usable()
        event = Event(trigger, sum(map(len, there.values())), lost or {}, ended=ended)
        self.state.exposed = event.workers
        situation, row = self._situation, self._table.get(lookup.effect(event))
        prepared = row is not None
        if situation is None or row is None:
            situation = self._situate()
            event = replace(event, lost={task: count for task, count in event.lost.items() if task != ended}, ended="")
            row = lookup.answer(situation, event)
        plan = make_plan(event, row, before, self.state.tasks, there, situation)
        plan = structs.replace(plan, prepared=prepared, lookup_s=self._stopwatch() - began, refresh_s=self._refresh_s)
        self._table, self._situation = {}, None
        if not (owed or differs(plan, before)):
            return self._soon()
        for share in plan.shares:
            if share.task in event.lost or len(share.slots) != share.before:
                self.state.disturbed[share.task] = FAILURE if share.task in event.lost else RESIZE
        self.state.plan = plan
        self._decided, self._runner_up = (situation, event, row), None
        return [PlanDecided(plan=plan), *self._soon()]

    def _soon(self) -> list[Message]:
        """Ask for a new table, unless that was asked for: a timer that is set again and again never fires."""
        asked, self._awaited = self._awaited, True
        return [] if asked else [REFRESH]

    def _refresh(self) -> None:
        """Make the lookup table for the cluster as it is; see what else the last plan could have been."""
        self._awaited = False
        self._find_runner_up()
        began = self._stopwatch()
        estimates.believe(self.state, self._options)
        for by_size in self.state.measured.values():
            for size, one in by_size.items():
                by_size[size] = structs.replace(one, believed_s=one.mean_s)
        self._situation = self._situate()
        events = nodes.next_events(self.state, self._usable(), self._held(), self._options.spare_nodes)
        self._table = lookup.table(self._situation, events, self._sweeps)
        self._refresh_s = self._stopwatch() - began

    def _find_runner_up(self) -> None:
        if self._decided is not None:
            self._runner_up, self._decided = lookup.runner_up(*self._decided), None

    def _usable(self) -> nodes.Slots:
        return nodes.usable(self.state, self._held(), self._options.spare_nodes)

    def _held(self) -> dict[str, list[SlotRef]]:
        return {task: slots for task, slots in slots_of(self.state.plan).items() if task in self.state.tasks}

    # --- what the program needs to know ------------------------------------------------------------------------------

    def _situate(self) -> Situation:
        held, reach = self._held(), self._reach()
        nominal = self._nominal(reach)
        standings = {}
        for task, spec in self.state.tasks.items():
            has = len(held.get(task, ()))
            known = self._estimate(task, nominal, max(has, reach))
            waf = np.concatenate([[0.0], spec.weight * known.flops])
            sizes = np.concatenate([[0], known.sizes])
            at = int(np.searchsorted(sizes, has))
            held_waf = float(waf[at]) if at < len(sizes) and sizes[at] == has else 0.0
            groups = None if known.curve is None else np.concatenate([[1], known.curve.choices[:, 0]])
            standings[task] = Standing(sizes, waf, has, held_waf, groups)
        return Situation(
            tasks=standings,
            failure_rate=estimates.failure_rate(self.state, self._options),
            resize_s=estimates.transition_s(self.state, self._options, RESIZE),
            failure_s=estimates.transition_s(self.state, self._options, FAILURE),
        )

    def _reach(self) -> int:
        """Return the slots of all nodes that were ever here, and of one more."""
        return sum(len(node.slots) for node in self.state.nodes.values()) + nodes.usual_slots(self.state)

    def _estimate(self, task: str, nominal: float, limit: int) -> Estimate:
        """Return T(t, x) for all feasible x up to `limit`."""
        return throughput.estimate(self.state.tasks[task], self.state.measured.get(task, {}), limit, nominal)

    def _nominal(self, reach: int) -> float:
        """Return the FLOP/s per worker to assume where nothing is known: the median of what the known tasks achieve."""
        found = []
        for task, spec in self.state.tasks.items():
            if throughput.known(spec, self.state.measured.get(task, {})):
                first = self._estimate(task, 1.0, reach)
                found += [first.flops[0] / first.sizes[0]] if len(first.sizes) else []
        return float(np.median(found)) if found else 1.0

    def _count_time(self, at: float) -> None:
        """Add the time since the last fact to the workers' exposure to failure."""
        if not math.isfinite(at) or at <= self.state.clock:
            return
        if self.state.clock:
            self.state.worker_seconds += (at - self.state.clock) * self.state.exposed
        self.state.clock = at

    # --- answers -----------------------------------------------------------------------------------------------------

    def _view(self, *, table: bool) -> PlanView:
        held = {share.task: len(share.slots) for share in self.state.plan.shares} if self.state.plan else {}
        return PlanView(
            plan=self.state.plan,
            runner_up=None if self._runner_up is None else _line(self._runner_up, held),
            table=[_line(row, held) for row in self._table.values()] if table else [],
            failures=self.state.failures,
            failure_rate=estimates.failure_rate(self.state, self._options),
            transitions={kind: estimates.transition_s(self.state, self._options, kind) for kind in (FAILURE, RESIZE)},
        )

    def _what_if(self, query: WhatIf) -> PlanView:
        """Let a copy of this planner decide.

        Raises:
            InvalidInputError: a node or task is not in use, or the task can't be planned for.
        """
        copy = Planner(deepcopy(self.state), self._options, self._stopwatch)
        lost = nodes.lost_with(query.lose, copy._held())
        for name in query.lose:
            if not copy._is_up(name):
                up = ", ".join(name for name, node in self.state.nodes.items() if node.up)
                raise InvalidInputError(f"node {name!r} is not up; these are: {up or 'none'}")
            copy.state.nodes[name] = structs.replace(copy.state.nodes[name], up=False)
        for number in range(query.join):
            slots = list(range(nodes.usual_slots(self.state)))
            copy.state.nodes[f"new-{number + 1}"] = Node(slots=slots)
        for task in query.finish:
            if copy.state.tasks.pop(task, None) is None:
                raise InvalidInputError(
                    f"no task {task!r} to finish; there are: {', '.join(self.state.tasks) or 'none'}"
                )
        if query.submit is not None:
            check_task(query.submit)
            throughput.check(query.submit)
            copy.state.tasks[query.submit.name] = query.submit
        copy._decide(
            Trigger(TriggerKind.WHAT_IF),
            lost={task: count for task, count in lost.items() if task in copy.state.tasks},
            owed=True,
        )
        copy._find_runner_up()
        return copy._view(table=False)

    def _curve(self, task: str) -> Curve:
        """Return what is believed of a task.

        Raises:
            InvalidInputError: there is no such task.
        """
        spec = self.state.tasks.get(task)
        if spec is None:
            raise InvalidInputError(f"no task {task!r}; there are: {', '.join(self.state.tasks) or 'none'}")
        reach = self._reach()
        known, measured = self._estimate(task, self._nominal(reach), reach), self.state.measured.get(task, {})
        points = [
            CurvePoint(
                workers=size,
                flops=flops,
                waf=spec.weight * flops,
                source=source,
                spread=measured[size].spread if source == throughput.MEASURED else 0.0,
                text="" if known.curve is None else str(known.curve.configuration(at)),
            )
            for at, (size, flops, source) in enumerate(
                zip(known.sizes.tolist(), known.flops.tolist(), known.sources, strict=True)
            )
        ]
        return Curve(task=task, held=len(self._held().get(task, ())), points=points)


def _line(row: Row, held: Mapping[str, int]) -> TableRow:
    changes = {task: size for task, size in row.sizes.items() if size != held.get(task, 0)}
    return TableRow(event=str(row.trigger), workers=row.workers, changes=changes, reward=row.reward)
