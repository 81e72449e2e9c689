"""The core of a cluster that only observes: users are obeyed, and what the cluster decides by itself is only said.

What somebody ordered may take many messages: a worker that gets ready, a membership that forms, a state that is saved.
These go on (`OBEYED`). Whatever else would start, stop or interrupt a worker holds its task: no order about it leaves
until a user resumes, pauses, stops or submits it.
"""

from typing import get_args

from unicron.contracts.base import Message, Started, TimerFired
from unicron.contracts.commands import Regroup, StartWorker, StopWorker
from unicron.contracts.events import (
    CheckpointOrdered,
    NodeDrained,
    ObserveOnlySwitched,
    OrdersWithheld,
    PlanDecided,
    Regrouped,
    StateCopied,
    StateKept,
    TaskPaused,
    TaskRemoved,
    TaskRewound,
    TaskSubmitted,
    WorkerAway,
    WorkerExited,
    WorkerFinished,
    WorkerReady,
)
from unicron.contracts.plans import Plan, TriggerKind
from unicron.contracts.stragglers import StragglerDetected
from unicron_transition.core import TransitionCore
from unicron_transition.deadlines import TIMEOUT_S, Deadline, WaitKind
from unicron_transition.snapshots.snapshots import SnapshotFact
from unicron_transition.state import TaskRun, TransitionState
from unicron_transition.withholding import is_held, withhold, withhold_share

USERS = (TaskSubmitted, TaskRemoved, TaskPaused, TaskRewound)
"""A user decides what becomes of a task, also of one that is held."""

OBEYED = (
    *(*USERS, *get_args(SnapshotFact)),
    *(CheckpointOrdered, NodeDrained, PlanDecided, Regrouped, Started, StateCopied, StateKept),
    *(WorkerAway, WorkerExited, WorkerFinished, WorkerReady),
)
"""What follows from these was ordered by a user. Of a plan only those shares are taken up of which that is so."""

INTRUSIVE = (StartWorker, StopWorker, Regroup)
"""Orders that change a process; that an agent is released is what it waits for, and the rest concerns states."""


class ObservingCore(TransitionCore):
    """A transition service that gives no order of its own accord."""

    def __init__(self, state: TransitionState | None = None, idle_s: float = TIMEOUT_S[WaitKind.IDLE]) -> None:
        super().__init__(state, idle_s)
        self.handlers = {**self.handlers, StragglerDetected: self._straggler}

    def handle(self, message: Message) -> list[Message]:
        """Take one message in; return what follows from it, and what would follow."""
        if isinstance(message, TimerFired) and self._keep_timer(message):
            return []
        withheld = self.state.withheld.pop(message.key, None) if isinstance(message, USERS) else None
        out = super().handle(message)
        due: list[Message] = []
        if withheld is not None:
            if isinstance(message, TaskRemoved | TaskSubmitted) or getattr(message, "paused", False):
                withheld.share = None
            due = self._order_withheld(message.key, withheld, message.at)
        own = {order.key for order in out if isinstance(order, INTRUSIVE) and not self._is_ordered(message)}
        held = {task for task in self.state.withheld if is_held(self.state, task)}
        sent = withhold(self.state, out, sorted(own | held))
        self._forget_ended()
        return due + sent

    def _keep_timer(self, fired: TimerFired) -> bool:
        """Keep a timer for later that waits for what was not ordered; return whether it is such a one."""
        task = Deadline.read(fired.name).task
        if not is_held(self.state, task):
            return False
        timers = self.state.withheld[task].timers
        timers += [fired.name] * (fired.name not in timers)
        return True

    def _is_ordered(self, message: Message) -> bool:
        """Return whether what follows from a message is what a user ordered."""
        if isinstance(message, TimerFired):
            return Deadline.read(message.name).wait is not WaitKind.VERDICT
        if isinstance(message, NodeDrained):
            return message.node not in self.state.leaving
        return isinstance(message, OBEYED)

    def _activated(self, started: Started) -> list[Message]:
        self.state.token = started.token
        was, self.state.observe_only = self.state.observe_only, True
        return [] if was else [ObserveOnlySwitched(on=True)]

    def _plan(self, decided: PlanDecided) -> list[Message]:
        plan = decided.plan
        if plan.number <= self.state.plan:
            return []
        self.state.plan = plan.number
        obeyed, said = [], list[Message]()
        for share in plan.shares:
            run = self.state.tasks.get(share.task)
            if run is None or run.state.ended or run.paused:
                continue
            if self._is_wanted(run, plan):
                self.state.withheld.pop(share.task, None)
                obeyed.append(share)
            else:
                said += withhold_share(self.state, run, share)
        return self._apply_shares(obeyed, plan.trigger, decided.at) + said

    def _is_wanted(self, run: TaskRun, plan: Plan) -> bool:
        """Return whether a user has ordered what a plan gives a task: its start, or that it leaves a drained node."""
        if is_held(self.state, run.spec.name):
            return False
        if not (run.target and run.workers):
            return True
        nodes = {name for names in plan.cause.whom for name in names.named} - set(self.state.leaving)
        there = {slot.node for slot in run.target}
        return plan.cause.kind is TriggerKind.NODE_DRAINED and not nodes.isdisjoint(there)

    def _straggler(self, detected: StragglerDetected) -> list[Message]:
        text = f"drain {detected.node}: {detected.diagnosis}"
        return [OrdersWithheld(node=detected.node, orders=[text])] if detected.drain and detected.node else []

    def _forget_ended(self) -> None:
        """Forget what a plan would have given tasks that have ended."""
        for task in list(self.state.withheld):
            run = self.state.tasks.get(task)
            if not is_held(self.state, task) and (
                run is None or run.state.ended or not self.state.withheld[task].share
            ):
                del self.state.withheld[task]
