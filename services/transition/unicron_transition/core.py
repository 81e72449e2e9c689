"""The transition service's core: failures, plans and reports in; fenced commands out (paper section 6)."""

from collections.abc import Iterable
from typing import get_args

from unicron.contracts.base import Message, Started, TimerFired
from unicron.contracts.events import (
    AttemptFailed,
    CommandRefused,
    FailureDetected,
    NodeAdmitted,
    NodeDrained,
    NodeGone,
    NodeLeaving,
    PlanDecided,
    Regrouped,
    StateCopied,
    StateKept,
    StateUnusable,
    TaskBroken,
    TaskPaused,
    TaskRecovered,
    TaskRemoved,
    TaskSubmitted,
    WorkerAway,
    WorkerExited,
    WorkerFinished,
    WorkerReady,
)
from unicron.contracts.failures import Cure, Severity
from unicron.contracts.worker import LONGEST_CAUSE
from unicron.service.core import Core, Handlers
from unicron_transition.deadlines import TIMEOUT_S, Deadline, Wait
from unicron_transition.doubts import doubt
from unicron_transition.membership import WorkerRun, WorkerStage
from unicron_transition.moves import Cause, move
from unicron_transition.nodes import admitted, lose_worker, lost, release_nodes, remove_strays, stray
from unicron_transition.orders import drop_order
from unicron_transition.reconcile import go_back, move_snapshots, settle, stop
from unicron_transition.snapshots.snapshots import SnapshotFact
from unicron_transition.state import TaskRun, TransitionState
from unicron_transition.validation import inconsistencies


class TransitionCore(Core):
    """One state machine a task."""

    doubts = staticmethod(doubt)

    def __init__(self, state: TransitionState | None = None, idle_s: float = TIMEOUT_S[Wait.IDLE]) -> None:
        self.state: TransitionState = state or TransitionState()
        self.state.idle_s = idle_s
        self.handlers: Handlers = {
            **dict.fromkeys(get_args(SnapshotFact), self._about_snapshots),
            CommandRefused: self._refused,
            FailureDetected: self._failure,
            NodeAdmitted: self._admitted,
            NodeDrained: self._drained,
            NodeGone: lambda gone: self._lose_node(gone.node, gone.at),
            NodeLeaving: self._leaving,
            PlanDecided: self._plan,
            Regrouped: self._regrouped,
            Started: self._activated,
            StateCopied: self._copied,
            StateKept: self._kept,
            StateUnusable: self._unusable,
            TaskBroken: lambda broken: self._end(broken.task, Cause.OWN_FAULT, broken.reason, broken.traceback),
            TaskPaused: self._pause,
            TaskRemoved: lambda removed: self._end(removed.task, Cause.USER, "removed by its user"),
            TaskSubmitted: self._submitted,
            TimerFired: self._timer,
            WorkerAway: self._away,
            WorkerExited: self._exited,
            WorkerFinished: self._finished,
            WorkerReady: self._ready,
        }

    def handle(self, message: Message) -> list[Message]:
        """Take one message in; return what follows from it."""
        out = super().handle(message)
        return out + release_nodes(self.state) if self.state.leaving else out

    def validate(self) -> list[str]:
        """Return what contradicts itself in the state, in words."""
        return list(inconsistencies(self.state))

    # --- the world ---------------------------------------------------------------------------------------------------

    def _activated(self, started: Started) -> list[Message]:
        self.state.token = started.token
        return []

    def _submitted(self, submitted: TaskSubmitted) -> list[Message]:
        old = self.state.tasks.get(submitted.task)
        if old is not None and not old.state.ended:
            return []
        count = old.started if old else 0
        self.state.tasks[submitted.task] = TaskRun(
            spec=submitted.spec, started=count, before=count, submitted_at=submitted.at
        )
        return []

    def _admitted(self, node: NodeAdmitted) -> list[Message]:
        """A node is new, or its agent came back."""
        out = admitted(self.state, node) + self._place_anew(node.node)
        return out + remove_strays(self.state, node.node, node.kept)

    def _place_anew(self, node: str) -> list[Message]:
        """See what a node that can keep copies now, or can't any more, changes for whom."""
        # a task without a slot waits for the plan that this node's coming brings: it may have a worker here
        hit = {run.spec.name: None for run in self.state.on(node) if run.target}
        short = {name: None for name, run in self.state.tasks.items() if run.snapshots.saves.short}
        parked = [run for run in self.state.tasks.values() if run.snapshots.parked]
        return self._settle(hit | short) + move_snapshots(self.state, parked)

    def _leaving(self, fact: NodeLeaving) -> list[Message]:
        """A node is to go; the registry drains it, and it waits until nobody needs it any more."""
        node = self.state.nodes.get(fact.node)
        if node is not None and node.alive and node.incarnation == fact.incarnation:
            self.state.waits_to_go(fact.node, waits=True)
        return []

    def _drained(self, fact: NodeDrained) -> list[Message]:
        """Nothing more is to lie on a node that is to go, and nothing only there."""
        node = self.state.nodes.get(fact.node)
        if node is None or node.drained == fact.drain:
            return []
        node.drained = fact.drain
        if not node.drained:
            self.state.waits_to_go(fact.node, waits=False)
        self.state.place_copies_anew()
        return self._place_anew(fact.node)

    def _lose_node(self, name: str, at: float) -> list[Message]:
        hit = self.state.on(name)
        return lost(self.state, name, at) + self._settle(run.spec.name for run in hit)

    # --- failures and plans ------------------------------------------------------------------------------------------

    def _failure(self, failure: FailureDetected) -> list[Message]:
        if failure.severity is Severity.SEV1 and failure.node:
            return self._node_failure(failure)
        run = self.state.tasks.get(failure.task)
        if run is None or run.state.ended:
            return []
        out = []
        if failure.severity is Severity.SEV3:
            if 0 <= failure.epoch < run.membership.epoch:
                return []  # what broke was given up meanwhile: its members were ordered to form a new one
            run.membership.broken = True  # reattempt in place: the same members, a new epoch
            run.recovers(failure.at, _cause(failure))
        elif failure.worker in run.workers:
            run.failed[failure.worker] = failure.node
            run.wait_s = failure.wait_s
            run.recovers(failure.at, _cause(failure))
            out += stop(self.state, run, run.workers[failure.worker], failure.reason)
        elif failure.worker not in run.membership.group:
            return []  # that process was replaced already
        run.snapshots.storage.failures += 1
        return out + self._settle([failure.task]) + move(self.state, run, Cause.FAILURE, failure.reason)

    def _node_failure(self, failure: FailureDetected) -> list[Message]:
        hit = [
            run
            for run in self.state.on(failure.node)
            if any(worker.slot.node == failure.node for worker in run.workers.values())
        ]
        for run in hit:
            run.snapshots.storage.failures += 1
            run.recovers(failure.at, _cause(failure))
        out = self._lose_node(failure.node, failure.at)
        return out + [message for run in hit for message in move(self.state, run, Cause.FAILURE, failure.reason)]

    def _plan(self, decided: PlanDecided) -> list[Message]:
        if decided.plan.number <= self.state.plan:
            return []
        self.state.plan = decided.plan.number
        changed = []
        for share in decided.plan.shares:
            run = self.state.tasks.get(share.task)
            if run is None or run.state.ended or run.paused:
                continue
            shape = share.layout if share.slots and share.layout.replicas else run.shape
            if run.target == share.slots and shape.is_like(run.shape):
                continue
            self.state.aim(run, share.slots)
            run.aimed = shape.with_workers(0)
            reason = share.reason or decided.plan.trigger
            run.recovers(decided.at, reason if run.membership.epoch >= 0 else "")
            changed.append((run, reason))
        out = self._settle([*self._tasks_in_the_way(run for run, _ in changed), *(run.spec.name for run, _ in changed)])
        for run, reason in changed:
            if run.as_planned:  # an earlier plan is taken back before anybody moved
                out += self._complete(run, decided.at)
            else:
                out += move(self.state, run, Cause.SLOTS if run.target else Cause.NO_SLOTS, reason)
        return out

    def _pause(self, fact: TaskPaused) -> list[Message]:
        run = self.state.tasks.get(fact.task)
        if run is None or run.state.ended or run.paused == fact.paused:
            return []
        run.paused = fact.paused
        if not run.paused:
            return []  # a plan follows
        self.state.aim(run, [])
        return self._settle([fact.task]) + move(self.state, run, Cause.NO_SLOTS, "paused by a user")

    def _tasks_in_the_way(self, runs: Iterable[TaskRun]) -> list[str]:
        """Return the tasks without a slot that have a worker, come back with its node, in a slot of one of `runs`."""
        there = (self.state.occupied.get(slot) for run in runs for slot in run.target)
        found = {other.task: None for other in there if other and not self.state.tasks[other.task].target}
        return list(found)

    def _end(self, task: str, cause: Cause, reason: str, traceback: str = "") -> list[Message]:
        run = self.state.tasks.get(task)
        if run is None or run.state.ended:
            return []
        out = move(self.state, run, cause, reason, traceback)
        out += run.snapshots.release(self.state, run) + run.snapshots.drop_left(self.state, run)
        self.state.aim(run, [])
        out += settle(self.state, [task])  # then its workers are no more
        return out + run.snapshots.drop_saved(self.state, run) + [Deadline(Wait.REGROUP, task).cancel()]

    # --- reports of workers ------------------------------------------------------------------------------------------

    def _ready(self, ready: WorkerReady) -> list[Message]:
        run = self.state.tasks.get(ready.task)
        if run is None or ready.worker not in run.workers:
            return stray(self.state, run, ready)
        run.workers[ready.worker].stage = WorkerStage.READY
        newest_first = reversed(run.workers.values())  # those get ready last
        waited_for = any(worker.stage is WorkerStage.STARTING for worker in newest_first)
        # nothing changes until the last is ready, and thousands need not each look whether it does
        idle = waited_for and (not run.membership.group or run.membership.intact(run.workers))
        then = [] if idle else self._settle([ready.task])
        return [Deadline(Wait.START, ready.task, ready.worker).cancel(), *then]

    def _regrouped(self, report: Regrouped) -> list[Message]:
        run = self.state.tasks.get(report.task)
        if run is None or report.worker not in run.workers:
            return []
        membership = run.membership
        if report.epoch != membership.epoch or report.worker not in membership.group:
            place = run.workers[report.worker].place
            run.record_state(report.worker, place, report.iteration, report.node)
            return []
        out: list[Message] = []
        if not membership.joined:  # by the first report all have met, and who had no state has taken one
            out += run.snapshots.release(self.state, run)
            for name in membership.group:
                if worker := run.workers.get(name):
                    run.record_state(name, worker.place, report.iteration, worker.slot.node)
        membership.join(report.worker)
        if membership.broken or not membership.complete:
            return out
        return out + self._complete(run, report.at) + settle(self.state, [report.task])

    def _kept(self, kept: StateKept) -> list[Message]:
        """A worker has left its state behind; when all have who are to, the task can go on in its new layout."""
        run = self.state.tasks.get(kept.task)
        membership = run.membership if run and not run.state.ended else None
        due = membership is not None and kept.epoch == membership.epoch and kept.worker in membership.due()
        if run is None or membership is None or not (due and run.snapshots.was_on(run, kept.worker, kept.node)):
            counted_on = run.snapshots.counted_on(run, kept.node) if run else []
            twice = kept.state.location.name in {ref.location.name for ref in counted_on}
            there = self.state.is_there(kept.node) and not twice
            return [drop_order(self.state, kept.task, kept.node, [kept.state.location.name])] if there else []
        membership.left[kept.worker] = kept.state
        return self._settle([kept.task]) if membership.left_behind() else []

    def _copied(self, fact: StateCopied) -> list[Message]:
        """A node that is to go has handed a state over, or could not."""
        run = self.state.tasks.get(fact.task)
        return run.snapshots.copied(self.state, run, fact) + self._settle([fact.task]) if run else []

    def _about_snapshots(self, fact: SnapshotFact) -> list[Message]:
        run = self.state.tasks.get(fact.task)
        if run is None or run.state.ended:
            return []
        out = run.snapshots.handle(self.state, run, fact)
        return out + go_back(self.state, run) + self._settle([fact.task])

    def _unusable(self, fact: StateUnusable) -> list[Message]:
        """What a task went on from is no good: it is to go on from something older."""
        run = self.state.tasks.get(fact.task)
        if run is None or run.state.ended or fact.epoch != run.membership.epoch or fact.worker not in run.workers:
            return []
        if run.membership.broken and fact.iteration == run.snapshots.before:
            return []  # others said so before; but a worker that missed that may have brought it in again
        run.snapshots.rule_out(run, fact)
        reason = f"iteration {fact.iteration} from {fact.copies} is no good: {fact.reason}"
        run.recovers(fact.at, reason)
        out = list[Message]()
        if fact.uncarried and run.spec.way.fixes_ranks:
            run.uncarried, out = fact.reason[:LONGEST_CAUSE], run.snapshots.drop_saved(self.state, run)
        return out + self._settle([fact.task]) + move(self.state, run, Cause.FAILURE, reason)

    def _complete(self, run: TaskRun, at: float) -> list[Message]:
        """Say that the newest membership computes, and whether it is all that the plan wants."""
        task, epoch, size = run.spec.name, run.membership.epoch, len(run.membership.group)
        out: list[Message] = [Deadline(Wait.REGROUP, task).cancel()]
        if run.membership.leaving:
            return out  # it computes for one iteration at most
        run.wait_s = 0.0
        out += move(self.state, run, Cause.COMPLETE, f"{size} workers in epoch {epoch}{run.waiting_replicas()}")
        if run.failed_at is not None and size >= len(run.target):
            seconds = max(0.0, at - run.failed_at)
            run.failed_at = None
            out.append(TaskRecovered(task=task, epoch=epoch, workers=size, seconds=seconds))
        return out

    def _finished(self, finished: WorkerFinished) -> list[Message]:
        run = self.state.tasks.get(finished.task)
        if run is None or finished.worker not in run.workers:
            return []
        run.workers[finished.worker].stage = WorkerStage.FINISHED
        run.membership.through[finished.worker] = None
        return self._after_the_end(run)

    def _after_the_end(self, run: TaskRun) -> list[Message]:
        """A member is through, and maybe gone: who missed the end of the last iteration must finish it without."""
        membership = run.membership
        needed = membership.broken or not membership.complete or run.over
        return self._settle([run.spec.name]) if needed else []

    def _finish(self, run: TaskRun) -> list[Message]:
        """End the task; those that are through may still be writing their results: let them go, and stop the rest."""
        group, through = run.membership.group, run.membership.through
        silent = [name for name in group if name not in run.workers and name not in through]
        for name in through.keys() & run.workers.keys():
            self.state.drop(run, name)
        count = f"all {run.spec.iterations} iterations are done"
        reason = count if run.spec.way.counts_iterations else "its program is done"
        if silent:
            reason += f"; {', '.join(silent)} ended without saying so: what it was to write then may be missing"
        return self._end(run.spec.name, Cause.DONE, reason)

    def _exited(self, exited: WorkerExited) -> list[Message]:
        """A process is gone. Whether that is a failure is for the detector to say; an expected end frees the slot."""
        run = self.state.tasks.get(exited.task)
        if run is not None and run.failed.get(exited.worker) == exited.node:
            del run.failed[exited.worker]
        if run is None or exited.worker not in run.workers:
            return []
        if exited.worker in run.membership.through:
            self.state.drop(run, exited.worker)
            return self._after_the_end(run)
        if not exited.expected:
            return []
        lose_worker(self.state, run, exited.worker, exited.at)
        return self._settle([exited.task])

    # --- what does not come back -------------------------------------------------------------------------------------

    def _refused(self, refused: CommandRefused) -> list[Message]:
        run = self.state.tasks.get(refused.task)
        worker = run.workers.get(refused.worker) if run else None
        if worker is None or worker.stage is not WorkerStage.STARTING:
            return []
        return [_attempt_failed(refused.task, Cure.RESTART, worker, refused.reason)]

    def _timer(self, fired: TimerFired) -> list[Message]:
        deadline = Deadline.read(fired.name)
        run = self.state.tasks.get(deadline.task)
        if run is None or run.state.ended:
            return []
        if deadline.wait in {Wait.STATES, Wait.IDLE, Wait.AGAIN}:
            return run.snapshots.expire(self.state, run, deadline.wait) + self._settle([deadline.task])
        if deadline.wait is Wait.START:
            late = run.workers.get(deadline.about)
            if late is None or late.stage is not WorkerStage.STARTING:
                return []
            return [_attempt_failed(deadline.task, Cure.RESTART, late, "its model was not built in time")]
        return self._not_joined(run, deadline)

    def _away(self, away: WorkerAway) -> list[Message]:
        """Wait for a member whose script evaluates, say, before it can notice that there is a new membership."""
        run = self.state.tasks.get(away.task)
        if run is not None and away.worker in run.workers and away.epoch == run.membership.epoch:
            run.membership.away[away.worker] = None
        return []

    def _not_joined(self, run: TaskRun, deadline: Deadline) -> list[Message]:
        """Tell of who did not join in time; replace it where the detector has nothing to say of it.

        That process had ended, say, before its node was admitted on an older word by which it lived.
        """
        membership = run.membership
        missing = [name for name in membership.group if name not in membership.joined and name in run.workers]
        if not missing:
            return []
        if any(name in membership.away for name in missing):  # so the others wait for it, too
            return [deadline.set()]  # how long a script may be busy its agent knows
        first, reason = run.workers[missing[0]], f"{', '.join(missing)} did not join epoch {membership.epoch} in time"
        verdict = Deadline(Wait.VERDICT, deadline.task, str(membership.epoch))
        if deadline.wait is Wait.REGROUP:
            return [_attempt_failed(deadline.task, Cure.REGROUP, first, reason), verdict.set()]
        return stop(self.state, run, first, reason) + self._settle([deadline.task]) if deadline == verdict else []

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _settle(self, names: Iterable[str]) -> list[Message]:
        """Return what brings these tasks nearer to their targets, or to their end."""
        runs = [run for name in names if not (run := self.state.tasks[name]).state.ended]
        out = [message for run in runs if run.over for message in self._finish(run)]
        out += settle(self.state, [run.spec.name for run in runs if not run.state.ended])
        vain = [(run.spec.name, why) for run in runs if (why := run.snapshots.exhausted(run))]
        return out + [message for name, why in vain for message in self._end(name, Cause.OWN_FAULT, why)]


def _cause(failure: FailureDetected) -> str:
    """Return what programs that begin again read of a failure: whose it was, and what."""
    who = failure.node if failure.severity is Severity.SEV1 else failure.worker
    named = failure.severity is Severity.SEV3 or failure.reason.startswith(who)
    return failure.reason if named else f"{who}: {failure.reason}"


def _attempt_failed(task: str, action: Cure, worker: WorkerRun, reason: str) -> AttemptFailed:
    slot = worker.slot
    return AttemptFailed(task=task, action=action, reason=reason, node=slot.node, slot=slot.slot, worker=worker.worker)
