"""The planner's decisions: after each event that changes the cluster, which task gets which slots (paper section 5).

The answer is read from the lookup table where the event was foreseen, and computed where not. The table for the next
events is made after the plan has gone out: the core asks for a timer.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import StrEnum

from msgspec import structs

from unicron.contracts.answers import PlanView, Reply, TableRow
from unicron.contracts.base import Message, SetTimer, Started, TimerFired
from unicron.contracts.events import (
    FailureDetected,
    IterationFinished,
    NodeAdmitted,
    NodeDrained,
    NodeGone,
    PlanDecided,
    TaskBroken,
    TaskPaused,
    TaskRecovered,
    TaskRemoved,
    TaskStateChanged,
    TaskSubmitted,
)
from unicron.contracts.failures import Severity
from unicron.contracts.plans import Plan, Trigger, TriggerKind
from unicron.contracts.queries import GetCurve, GetPlan, WhatIf
from unicron.contracts.ranges import SHORTEST_S
from unicron.contracts.tasks import SlotRef, TaskState
from unicron.errors import InvalidInputError
from unicron.service.core import Answers, Core, Handlers
from unicron_planner import estimates, lookup, nodes, situation, throughput, what_if
from unicron_planner.confinement import planned
from unicron_planner.doubts import find_contradiction
from unicron_planner.estimates import FAILURE, KINDS, PlannerOptions
from unicron_planner.holdings import PlannedSlots, Slots
from unicron_planner.lookup import Effect, Event, LookupRow, Situation, Sweeps
from unicron_planner.neighbours import Neighbours
from unicron_planner.plans import changes_layout, differs, disturbance
from unicron_planner.state import AdmittedNode, PlannerState
from unicron_planner.throughput import MeasuredSize
from unicron_planner.weighing import Decision


class PlannerTimer(StrEnum):
    """The timers of the core."""

    REFRESH = "refresh"
    ADMISSIONS = "admissions"


REFRESH = SetTimer(name=PlannerTimer.REFRESH, after_s=0.02)
"""Not at once: a plan on its way shall not have to share a core with this, and a burst of events makes one table."""

ADMISSIONS = SetTimer(name=PlannerTimer.ADMISSIONS, after_s=0.03)
"""Nodes that join one after the other are planned for together. A loss never waits."""

ENDS = {
    TaskState.FINISHED: TriggerKind.TASK_FINISHED,
    TaskState.FAILED: TriggerKind.TASK_FAILED,
    TaskState.REMOVED: TriggerKind.TASK_REMOVED,
}

UNTIMED = (IterationFinished, TimerFired, Started)
"""Messages that are no facts of the journal."""


def _no_time() -> float:
    return 0.0


class PlannerCore(Core):
    """Keeps the plan optimal, and the next ones ready.

    Args:
        state: of an earlier run.
        options: what an administrator set.
        stopwatch: seconds from any beginning, to measure how long a plan took; a core has no clock of its own.
    """

    doubts = staticmethod(find_contradiction)

    def __init__(
        self,
        state: PlannerState | None = None,
        options: PlannerOptions | None = None,
        stopwatch: Callable[[], float] = _no_time,
    ) -> None:
        self.state: PlannerState = state or PlannerState()
        self._options = options or PlannerOptions()
        self._stopwatch = stopwatch
        self._held = PlannedSlots(_slots(self.state.plan))
        self._table: dict[Effect, LookupRow] = {}
        self._sweeps: Sweeps = {}
        self._situation: Situation | None = None
        self._near: Neighbours | None = None
        self._awaited = False
        self._refresh_s = 0.0
        self._decided: Decision | None = None
        self.handlers: Handlers = {
            NodeAdmitted: self._admit,
            NodeDrained: self._drain,
            NodeGone: self._gone,
            FailureDetected: self._failure,
            TaskSubmitted: self._submit,
            TaskPaused: self._pause,
            TaskRemoved: lambda removed: self._end(removed.task, TriggerKind.TASK_REMOVED),
            TaskBroken: lambda broken: self._end(broken.task, TriggerKind.TASK_FAILED),
            TaskRecovered: self._recovered,
            TaskStateChanged: lambda now: self._end(now.task, ENDS[now.state]) if now.state.ended else [],
            **({IterationFinished: self._measure} if self._options.use_measured else {}),
            TimerFired: self._timer_fired,
            Started: self._start,
            PlanDecided: self._read_back,
        }
        self.answers: Answers = {
            GetPlan: lambda _: (Reply(plan=self._in_force()), []),
            WhatIf: lambda query: (Reply(plan=self._what_if(query)), []),
            GetCurve: self._curve,
        }

    def handle(self, message: Message) -> list[Message]:
        """Take a fact, a piece of telemetry or a timer in; return what follows from it.

        Raises:
            InvalidInputError: a task was submitted that can't be planned for; nothing was changed.
        """
        if not isinstance(message, UNTIMED):
            self._count_time(message.at)
        return super().handle(message)

    def _curve(self, query: GetCurve) -> tuple[Reply, list[Message]]:
        believed = situation.curve(self.state, *self._task_and_size(query.task))
        return Reply(curve=structs.replace(believed, measures=self._options.use_measured)), []

    def _start(self, started: Started) -> list[Message]:
        """Make a table; count the exposure to failure anew where the newest fact is said to lie in times to come."""
        if self.state.clock > started.at:
            self.state.clock, self.state.worker_seconds, self.state.believed_rate = 0.0, 0.0, 0.0
        return self._request_refresh()

    def _timer_fired(self, timer: TimerFired) -> list[Message]:
        if timer.name == PlannerTimer.ADMISSIONS:
            joined = self.state.joined
            return self._decide(Trigger.of(TriggerKind.NODE_JOINED, joined)) if joined else []
        self._awaited = False
        if not self.state.joined:  # else a plan is about to follow, which asks for a table of its own
            self._refresh()
        return []

    # --- nodes -------------------------------------------------------------------------------------------------------

    def _admit(self, admitted: NodeAdmitted) -> list[Message]:
        name, slots = admitted.node, [slot.index for slot in admitted.slots]
        node = AdmittedNode(slots=slots, rack=admitted.rack, domain=admitted.domain)
        if self.state.nodes.get(name) == node:
            return []  # its agent was started again
        was_up, first = self._is_up(name), not self.state.joined
        self.state.nodes[name], self._near = node, None
        self.state.joined.append(name)
        if was_up:  # it lost slots, or has others now: workers may be where none can be
            return self._decide(Trigger.of(TriggerKind.NODE_JOINED, self.state.joined))
        return [ADMISSIONS] if first else []

    def _drain(self, message: NodeDrained) -> list[Message]:
        name, drain = message.node, message.drain
        if drain == (name in self.state.drained):
            return []
        (self.state.drained.append if drain else self.state.drained.remove)(name)
        if not self._is_up(name):
            return []
        if drain:
            return self._decide(Trigger.of(TriggerKind.NODE_DRAINED, [name]), lost=self._held.lost_with([name]))
        return self._decide(Trigger.of(TriggerKind.NODE_UNDRAINED, [name]))

    def _gone(self, gone: NodeGone) -> list[Message]:
        return self._take_out(gone.node, TriggerKind.NODE_LEFT) if self._is_up(gone.node) else []

    def _failure(self, failure: FailureDetected) -> list[Message]:
        if failure.severity is Severity.SEV1:
            was_up = self._is_up(failure.node)
            out = self._take_out(failure.node, TriggerKind.NODE_LOST, owed=True)
            self.state.failures += was_up  # only now: a prepared and a computed answer come from the same rate
            return out
        if failure.task in self.state.tasks:
            estimates.record_disturbance(self.state, failure.task, FAILURE)
        return []

    def _take_out(self, name: str, kind: TriggerKind, *, owed: bool = False) -> list[Message]:
        """Take a node out of use; with `owed` there is an answer even if nothing changes, for the cure of a failure."""
        if self._is_up(name):
            self.state.nodes[name] = structs.replace(self.state.nodes[name], up=False)
        return self._decide(Trigger.of(kind, [name]), lost=self._held.lost_with([name]), owed=owed)

    def _is_up(self, name: str) -> bool:
        return name in self.state.nodes and self.state.nodes[name].up

    # --- tasks -------------------------------------------------------------------------------------------------------

    def _recovered(self, recovered: TaskRecovered) -> list[Message]:
        if math.isfinite(recovered.seconds) and recovered.seconds >= 0:
            estimates.record_transition(self.state, recovered.task, recovered.seconds)
        return []

    def _submit(self, submitted: TaskSubmitted) -> list[Message]:
        throughput.check(submitted.spec)
        if self.state.tasks.get(submitted.task) == submitted.spec:
            return []
        self.state.paused.pop(submitted.task, None)
        self._forget(submitted.task)
        self.state.tasks[submitted.task] = submitted.spec
        self._table = {}  # nothing in it foresaw this task
        return self._decide(Trigger.of(TriggerKind.TASK_SUBMITTED, [submitted.task]))

    def _pause(self, message: TaskPaused) -> list[Message]:
        """Plan without a task, or with it again; it gets the plan in any case, for it gives its slots up itself."""
        task, pause = message.task, message.paused
        come, go = (self.state.paused, self.state.tasks) if pause else (self.state.tasks, self.state.paused)
        if task not in go:
            return []
        come[task] = go.pop(task)
        self._table = {}  # nothing in it foresaw this
        if pause:
            self._held.drop(task)
            return self._decide(Trigger.of(TriggerKind.TASK_PAUSED, [task]), ended=task, owed=True)
        return self._decide(Trigger.of(TriggerKind.TASK_RESUMED, [task]))

    def _end(self, task: str, how: TriggerKind) -> list[Message]:
        self.state.paused.pop(task, None)
        if task not in self.state.tasks:
            return []
        del self.state.tasks[task]
        self._held.drop(task)
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
        sound = math.isfinite(done.seconds) and done.seconds >= SHORTEST_S
        if spec is None or not sound or not 1 <= done.world_size <= spec.max_workers:
            return []
        if self._held.on.get(done.node, {}).get(done.slot) != done.task:
            return []  # it is nobody's who is there
        if changes_layout(spec, len(self._held.slots_of(done.task)), done.world_size):
            return []  # after a failure, fewer compute for a while in the shape that they had
        if self.state.epochs.get(done.task) != done.epoch:
            self.state.epochs[done.task] = done.epoch
            return []  # the first iteration of a membership holds its start, or the cure of a failure
        by_size = self.state.measured.setdefault(done.task, {})
        now = by_size[done.world_size] = throughput.added(by_size.get(done.world_size, MeasuredSize()), done.seconds)
        moved = abs(now.mean_s - now.believed_s) > estimates.DRIFT * max(now.mean_s, now.believed_s)
        return self._request_refresh() if moved else []

    # --- plans -------------------------------------------------------------------------------------------------------

    def _decide(
        self, trigger: Trigger, *, lost: Mapping[str, int] | None = None, ended: str = "", owed: bool = False
    ) -> list[Message]:
        """Answer a change of the cluster. A plan that says nothing new is not sent, unless somebody is `owed` one."""
        began, before, there = self._stopwatch(), self.state.plan, self._usable()
        event = Event(trigger, sum(map(len, there.values())), lost or {}, ended=ended)
        self.state.exposed, self.state.joined = event.workers, []
        given, row = self._situation, self._table.get(lookup.effect(event))
        prepared = row is not None
        if given is None or row is None:
            given = self._situate()
            event = replace(event, lost={task: count for task, count in event.lost.items() if task != ended}, ended="")
            row = lookup.answer(given, event)
        number = before.number + 1 if before else 1
        near = self._near = self._near or Neighbours.among(self.state.nodes)
        plan, given, event, row, anew = planned(
            event, row, given, self._situate, number, self.state.tasks, self._held, there, near
        )
        plan = structs.replace(
            plan, prepared=prepared and not anew, lookup_s=self._stopwatch() - began, refresh_s=self._refresh_s
        )
        self._table, self._situation = {}, None
        if not (owed or differs(plan, before)):
            return self._request_refresh()
        for share in plan.shares:
            kind = disturbance(share, self.state.tasks[share.task], event)
            if kind:
                estimates.record_disturbance(self.state, share.task, kind, anew=not (share.before and share.slots))
        self.state.plan, self._decided = plan, Decision(given, event, row)
        self._held.replace(_slots(plan))
        return [PlanDecided(plan=plan.news(before)), *self._request_refresh()]

    def _read_back(self, decided: PlanDecided) -> list[Message]:
        """Read the own plans back; one that this service never made is overruled, else it would outrank all to come."""
        mine = self.state.plan
        if mine is None or decided.plan.number <= mine.number:
            return []
        self.state.plan = structs.replace(mine, number=decided.plan.number)
        _, *then = self._decide(Trigger(TriggerKind.UNKNOWN), owed=True)
        return [PlanDecided(plan=self.state.plan), *then]

    def _request_refresh(self) -> list[Message]:
        """Ask for a new table, unless that was asked for: a timer that is set again and again never fires."""
        asked, self._awaited = self._awaited, True
        return [] if asked else [REFRESH]

    def _refresh(self) -> None:
        """Make the lookup table for the cluster as it is."""
        began, options = self._stopwatch(), self._options
        estimates.update_beliefs(self.state, options)
        for by_size in self.state.measured.values():
            for size, one in by_size.items():
                by_size[size] = structs.replace(one, believed_s=one.mean_s)
        self._situation, there = self._situate(), self._usable()
        mixed = lookup.mixed_rows(self._situation, sum(map(len, there.values())))
        events = nodes.next_events(self.state, there, self._held, options.spare_nodes, mixed)
        self._table = lookup.table(self._situation, events, self._sweeps)
        self._refresh_s = self._stopwatch() - began

    def _usable(self) -> Slots:
        return nodes.usable(self.state, self._held, self._options.spare_nodes)

    def _situate(self) -> Situation:
        return situation.situate(self.state, self._held, self._options)

    def _count_time(self, at: float) -> None:
        """Add the time since the last fact to the workers' exposure to failure."""
        if not math.isfinite(at) or at <= self.state.clock:
            return
        if self.state.clock:
            self.state.worker_seconds += (at - self.state.clock) * self.state.exposed
        self.state.clock = at

    # --- answers -----------------------------------------------------------------------------------------------------

    def _in_force(self) -> PlanView:
        if self._situation is None:
            self._refresh()
        return structs.replace(self._view(), table=[self._line(row) for row in self._table.values()])

    def _view(self) -> PlanView:
        """Return the plan, what else it could have been, and what it rests on."""
        decided = self._decided
        other = decided.runner_up if decided else None
        return PlanView(
            plan=self.state.plan,
            runner_up=None if other is None else self._line(other),
            failures=self.state.failures,
            failure_rate=estimates.failure_rate(self.state, self._options),
            transitions={kind: estimates.transition_s(self.state, self._options, kind) for kind in KINDS},
            taken=decided.taken if decided else None,
            held_back=decided.held_back if decided else None,
            guessed=situation.guessed(self.state),
        )

    def _what_if(self, query: WhatIf) -> PlanView:
        """Let a copy of this planner decide.

        Raises:
            InvalidInputError: a node or task is not in use, or the task can't be planned for.
        """
        state = what_if.changed(self.state, query)
        lost = self._held.lost_with(query.lose)
        copy = PlannerCore(state, self._options, self._stopwatch)
        for task in query.finish:
            copy._held.drop(task)
            lost.pop(task, None)
        copy._decide(Trigger(TriggerKind.WHAT_IF), lost=lost, owed=True)
        return copy._view()

    def _line(self, row: LookupRow) -> TableRow:
        changes = {task: size for task, size in row.sizes.items() if size != len(self._held.slots_of(task))}
        tasks = self._situation.tasks if self._situation else {}
        waf = sum(tasks[task].waf_of(size) for task, size in row.sizes.items() if task in tasks)
        return TableRow(event=str(row.trigger), workers=row.workers, changes=changes, reward=row.reward, waf=waf)

    def _task_and_size(self, task: str) -> tuple[str, int]:
        """Return the task and how many workers it has.

        Raises:
            InvalidInputError: there is no such task.
        """
        if task not in self.state.tasks:
            raise InvalidInputError(f"no task {task!r}; there are: {', '.join(self.state.tasks) or 'none'}")
        return task, len(self._held.slots_of(task))


def _slots(plan: Plan | None) -> dict[str, list[SlotRef]]:
    return {share.task: share.slots for share in plan.shares} if plan else {}
