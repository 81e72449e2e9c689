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
    ObserveOnlySwitched,
    PlanDecided,
    Regrouped,
    ScriptDrilled,
    StandbyDied,
    StandbyRevived,
    StateCopied,
    StateKept,
    StateUnprotected,
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
from unicron.contracts.plans import TaskShare
from unicron.contracts.worker import LONGEST_CAUSE
from unicron.errors import tells_lack
from unicron.exception_texts import cut
from unicron.healing import way_of
from unicron.service.core import Core, Handlers
from unicron_transition.deadlines import TIMEOUT_S, Deadline, WaitKind
from unicron_transition.doubts import find_contradiction
from unicron_transition.endings import end_task, finish_task
from unicron_transition.membership import WorkerRun, WorkerStage
from unicron_transition.moves import MoveCause, move_task
from unicron_transition.nodes import admit_node, lose_worker, release_nodes, remove_node, remove_strays, stop_if_stray
from unicron_transition.orders import drop_order
from unicron_transition.reconcile import (
    UNTRIED,
    begin_anew,
    end_trial,
    move_snapshots,
    order_again,
    reconcile,
    rewind,
    stop_worker,
)
from unicron_transition.snapshots.snapshots import SnapshotFact
from unicron_transition.state import TaskRun, TransitionState
from unicron_transition.validation import inconsistencies
from unicron_transition.withheld import Withheld
from unicron_transition.withholding import due_orders


class TransitionCore(Core):
    """One state machine a task."""

    doubts = staticmethod(find_contradiction)

    def __init__(self, state: TransitionState | None = None, idle_s: float = TIMEOUT_S[WaitKind.IDLE]) -> None:
        self.state: TransitionState = state or TransitionState()
        self.state.idle_s = idle_s
        self.handlers: Handlers = {
            **dict.fromkeys(get_args(SnapshotFact), self._handle_snapshot_fact),
            CommandRefused: self._command_refused,
            FailureDetected: self._failure,
            NodeAdmitted: self._node_admitted,
            NodeDrained: self._node_drained,
            NodeGone: lambda gone: self._lose_node(gone.node, gone.at),
            NodeLeaving: self._node_leaving,
            PlanDecided: self._plan,
            Regrouped: self._regrouped,
            StandbyDied: self._extend_starts,
            StandbyRevived: self._extend_starts,
            Started: self._activated,
            StateCopied: self._state_copied,
            StateKept: self._state_kept,
            ScriptDrilled: self._drilled,
            StateUnprotected: self._held_up,
            StateUnusable: self._state_unusable,
            TaskBroken: lambda broken: end_task(
                self.state, broken.task, MoveCause.OWN_FAULT, broken.reason, broken.traceback
            ),
            TaskPaused: self._pause,
            TaskRemoved: lambda removed: end_task(self.state, removed.task, MoveCause.USER, "removed by its user"),
            TaskSubmitted: self._submitted,
            TimerFired: self._timer_fired,
            WorkerAway: self._worker_away,
            WorkerExited: self._exited,
            WorkerFinished: self._finished,
            WorkerReady: self._ready,
        }

    def handle(self, message: Message) -> list[Message]:
        """Take one message in; return what follows from it."""
        self.state.now = message.at or self.state.now
        out = super().handle(message)
        return out + release_nodes(self.state) if self.state.leaving else out

    def validate(self) -> list[str]:
        """Return what contradicts itself in the state, in words."""
        return list(inconsistencies(self.state))

    # --- the world ---------------------------------------------------------------------------------------------------

    def _activated(self, started: Started) -> list[Message]:
        self.state.token = started.token
        if not self.state.observe_only:
            return []
        self.state.observe_only = False
        kept, self.state.withheld = self.state.withheld, {}
        left = [message for task, each in kept.items() for message in self._order_withheld(task, each, started.at)]
        return [ObserveOnlySwitched(on=False), *left]

    def _order_withheld(self, task: str, withheld: Withheld, at: float) -> list[Message]:
        """Order what was only said of a task."""
        shares = [withheld.share] if withheld.share else []
        later = self._apply_shares(shares, "what was withheld is ordered", at)
        return [*due_orders(self.state, task, withheld), *later]

    def _submitted(self, submitted: TaskSubmitted) -> list[Message]:
        old = self.state.tasks.get(submitted.task)
        if old is not None and not old.state.ended:
            return []
        count = old.started if old else 0
        self.state.tasks[submitted.task] = TaskRun(
            spec=submitted.spec, started=count, before=count, submitted_at=submitted.at
        )
        return []

    def _node_admitted(self, node: NodeAdmitted) -> list[Message]:
        """Record a node that is new or whose agent has restarted, and reconcile the tasks that this concerns."""
        out = admit_node(self.state, node) + self._adjust_to_node(node.node)
        return out + remove_strays(self.state, node.node, node.kept)

    def _adjust_to_node(self, node: str) -> list[Message]:
        """Reconcile the tasks that are affected when a node can keep copies, or no longer can."""
        # a task without a slot waits for the plan that this node's coming brings: it may have a worker here
        hit = {run.spec.name: None for run in self.state.tasks_on(node) if run.target}
        short = {name: None for name, run in self.state.tasks.items() if run.snapshots.saves.short}
        parked = [run for run in self.state.tasks.values() if run.snapshots.parked]
        return self._reconcile(hit | short) + move_snapshots(self.state, parked)

    def _node_leaving(self, fact: NodeLeaving) -> list[Message]:
        """Record that a node will leave; its agent waits for `ReleaseNode`, sent when no task needs the node."""
        node = self.state.nodes.get(fact.node)
        if node is not None and node.alive and node.incarnation == fact.incarnation:
            self.state.set_leaving(fact.node, waits=True)
        return []

    def _node_drained(self, fact: NodeDrained) -> list[Message]:
        """Record that a node is drained or no longer drained, and move the states that lie only on it."""
        node = self.state.nodes.get(fact.node)
        if node is None or node.drained == fact.drain:
            return []
        node.drained = fact.drain
        if not node.drained:
            self.state.set_leaving(fact.node, waits=False)
        self.state.invalidate_partners()
        return self._adjust_to_node(fact.node)

    def _lose_node(self, name: str, at: float) -> list[Message]:
        hit = self.state.tasks_on(name)
        return remove_node(self.state, name, at) + self._reconcile(run.spec.name for run in hit)

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
            run.begin_recovery(failure.at, _cause(failure))
        elif failure.worker in run.workers:
            run.failed[failure.worker] = failure.node
            run.wait_s, run.waits_for = failure.wait_s, failure.reason[:LONGEST_CAUSE] if failure.wait_s else ""
            run.begin_recovery(failure.at, _cause(failure))
            for worker in run.lost_with(failure.worker):
                out += stop_worker(self.state, run, worker, failure.reason)
        elif failure.worker not in run.membership.group:
            return []  # that process was replaced already
        run.snapshots.storage.failures += 1
        return out + self._reconcile([failure.task]) + move_task(self.state, run, MoveCause.FAILURE, failure.reason)

    def _node_failure(self, failure: FailureDetected) -> list[Message]:
        hit = [
            run
            for run in self.state.tasks_on(failure.node)
            if any(worker.slot.node == failure.node for worker in run.workers.values())
        ]
        for run in hit:
            run.snapshots.storage.failures += 1
            run.begin_recovery(failure.at, _cause(failure))
        out = self._lose_node(failure.node, failure.at)
        return out + [
            message for run in hit for message in move_task(self.state, run, MoveCause.FAILURE, failure.reason)
        ]

    def _plan(self, decided: PlanDecided) -> list[Message]:
        if decided.plan.number <= self.state.plan:
            return []
        self.state.plan = decided.plan.number
        return self._apply_shares(decided.plan.shares, decided.plan.trigger, decided.at)

    def _apply_shares(self, shares: Iterable[TaskShare], trigger: str, at: float) -> list[Message]:
        """Give tasks the slots of a plan that was made for `trigger`."""
        changed = []
        for share in shares:
            run = self.state.tasks.get(share.task)
            if run is None or run.state.ended or run.paused:
                continue
            shape = share.layout if share.slots and share.layout.replicas else run.shape
            if run.target == share.slots and shape.is_like(run.shape):
                continue
            self.state.set_target(run, share.slots)
            run.aimed = shape.with_workers(0)
            reason = share.reason or trigger
            run.begin_recovery(at, reason if run.membership.epoch >= 0 else "")
            changed.append((run, reason))
        out = self._reconcile(
            [*self._tasks_in_the_way(run for run, _ in changed), *(run.spec.name for run, _ in changed)]
        )
        for run, reason in changed:
            if run.as_planned:  # an earlier plan is taken back before anybody moved
                out += self._report_complete(run, at)
            else:
                out += move_task(self.state, run, MoveCause.SLOTS if run.target else MoveCause.NO_SLOTS, reason)
        return out

    def _pause(self, fact: TaskPaused) -> list[Message]:
        run = self.state.tasks.get(fact.task)
        if run is None or run.state.ended or run.paused == fact.paused:
            return []
        run.paused = fact.paused
        if not run.paused:
            return []  # a plan follows
        self.state.set_target(run, [])
        return self._reconcile([fact.task]) + move_task(self.state, run, MoveCause.NO_SLOTS, "paused by a user")

    def _tasks_in_the_way(self, runs: Iterable[TaskRun]) -> list[str]:
        """Return the tasks without a slot that have a worker, come back with its node, in a slot of one of `runs`."""
        there = (self.state.occupied.get(slot) for run in runs for slot in run.target)
        found = {other.task: None for other in there if other and not self.state.tasks[other.task].target}
        return list(found)

    # --- reports of workers ------------------------------------------------------------------------------------------

    def _ready(self, ready: WorkerReady) -> list[Message]:
        run = self.state.tasks.get(ready.task)
        if run is None or ready.worker not in run.workers:
            return stop_if_stray(self.state, run, ready)
        run.workers[ready.worker].stage = WorkerStage.READY
        newest_first = reversed(run.workers.values())  # those get ready last
        waited_for = any(worker.stage is WorkerStage.STARTING for worker in newest_first)
        # nothing changes until the last is ready, and thousands need not each look whether it does
        idle = waited_for and (not run.membership.group or run.membership.intact(run.workers))
        then = [] if idle else self._reconcile([ready.task])
        return [Deadline(WaitKind.START, ready.task, ready.worker).cancel(), *then]

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
            out += run.snapshots.release_parked(self.state, run)
            run.trained_since = run.trained_since or report.at
            for name in membership.group:
                if worker := run.workers.get(name):
                    run.record_state(name, worker.place, report.iteration, worker.slot.node)
        membership.record_join(report.worker)
        if membership.broken or not membership.complete:
            return out
        return out + self._report_complete(run, report.at) + reconcile(self.state, [report.task])

    def _state_kept(self, kept: StateKept) -> list[Message]:
        """Record an exported state; when all members have exported theirs, the task continues in its new layout."""
        run = self.state.tasks.get(kept.task)
        membership = run.membership if run and not run.state.ended else None
        due = (
            membership is not None and kept.epoch == membership.epoch and kept.worker in membership.exporting_members()
        )
        if run is None or membership is None or not (due and run.snapshots.worker_was_on(run, kept.worker, kept.node)):
            counted_on = run.snapshots.usable_states(run, kept.node) if run else []
            twice = kept.state.location.name in {ref.location.name for ref in counted_on}
            there = self.state.is_there(kept.node) and not twice
            return [drop_order(self.state, kept.task, kept.node, [kept.state.location.name])] if there else []
        membership.left[kept.worker] = kept.state
        return self._reconcile([kept.task]) if membership.exported_snapshot() else []

    def _held_up(self, fact: StateUnprotected) -> list[Message]:
        """Say what a task waits for of which a member can't leave its state behind: nobody else has that state."""
        run = self.state.tasks.get(fact.task)
        if run is None or run.state.ended or fact.worker not in run.workers or not tells_lack(fact.reason):
            return []
        if fact.worker in run.membership.left or fact.worker not in run.membership.exporting_members():
            return []
        return move_task(self.state, run, MoveCause.HELD, f"it is tried again until there is room: {fact.reason}")

    def _state_copied(self, fact: StateCopied) -> list[Message]:
        """Record that a draining node has copied a state to another node, or failed to."""
        run = self.state.tasks.get(fact.task)
        return run.snapshots.record_copy(self.state, run, fact) + self._reconcile([fact.task]) if run else []

    def _handle_snapshot_fact(self, fact: SnapshotFact) -> list[Message]:
        run = self.state.tasks.get(fact.task)
        if run is None or run.state.ended:
            return []
        out = run.snapshots.handle(self.state, run, fact)
        return out + rewind(self.state, run) + self._reconcile([fact.task])

    def _state_unusable(self, fact: StateUnusable) -> list[Message]:
        """Rule out the snapshot that a task restored from, and look for an older one."""
        run = self.state.tasks.get(fact.task)
        if run is None or run.state.ended or fact.epoch != run.membership.epoch or fact.worker not in run.workers:
            return []
        if run.membership.broken and fact.iteration == run.snapshots.before:
            return []  # others said so before; but a worker that missed that may have brought it in again
        run.snapshots.rule_out(run, fact)
        reason = f"iteration {fact.iteration} from {fact.copies} is no good: {fact.reason}"
        run.begin_recovery(fact.at, reason)
        out = list[Message]()
        if fact.uncarried and way_of(run.spec).may_be_uncarried:
            run.uncarried, out = cut(fact.reason, LONGEST_CAUSE), run.snapshots.drop_saved(self.state, run)
        return out + self._reconcile([fact.task]) + move_task(self.state, run, MoveCause.FAILURE, reason)

    def _drilled(self, fact: ScriptDrilled) -> list[Message]:
        """Have processes go on with what ranks leave from now on, or none where a trial has shown that none can.

        Nobody is stopped for that, unless nothing of the script can be had in place: then it is run as it is.
        """
        run = self.state.tasks.get(fact.task)
        if run is None or run.state.ended or not way_of(run.spec).may_be_uncarried:
            return []
        if fact.worker not in run.workers and fact.worker != run.trial:
            return []
        if fact.under_way:
            run.trial, run.trial_node, run.awaits_trial = fact.worker, fact.node, False
            return []
        if not fact.problem:
            run.tried |= not fact.undecided
            ended = [] if fact.undecided else end_trial(self.state, run)
            return ended + self._reconcile([fact.task])  # now it saves its state
        run.uncarried = cut(fact.problem, LONGEST_CAUSE)
        out = run.snapshots.drop_saved(self.state, run)
        if run.is_untried and run.trial:
            out += end_trial(self.state, run, run.uncarried) + self._reconcile([fact.task])
        if not fact.as_is or run.as_is:
            return out
        run.as_is, run.failed_at = True, None  # what began before, such as its start, is over
        run.begin_recovery(fact.at, run.uncarried)
        return [*out, *begin_anew(self.state, run, run.uncarried), *self._reconcile([fact.task])]

    def _report_complete(self, run: TaskRun, at: float) -> list[Message]:
        """Report that the newest membership computes; the task has recovered if it is as large as the plan wants."""
        task, epoch, size = run.spec.name, run.membership.epoch, len(run.membership.group)
        compute = f"{size} workers compute" if size > 1 else "1 worker computes"
        out: list[Message] = [Deadline(WaitKind.REGROUP, task).cancel()]
        if run.membership.leaving:
            return out  # it computes for one iteration at most
        run.wait_s = 0.0
        run.waits_for = run.waits_for if size < len(run.target) else ""
        lacks = f"; {len(run.target) - size} more to come: {run.waits_for}" if run.waits_for else ""
        out += move_task(self.state, run, MoveCause.COMPLETE, f"{compute}{run.describe_waiting()}{lacks}")
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
        return self._reconcile_last_iteration(run)

    def _reconcile_last_iteration(self, run: TaskRun) -> list[Message]:
        """Regroup the members that missed the end of the last iteration, as one that finished it never joins again."""
        membership = run.membership
        needed = membership.broken or not membership.complete or run.has_ended
        return self._reconcile([run.spec.name]) if needed else []

    def _exited(self, exited: WorkerExited) -> list[Message]:
        """Free the slot of a process that ended as expected. The detector decides which ends are failures."""
        run = self.state.tasks.get(exited.task)
        if run is not None and run.failed.get(exited.worker) == exited.node:
            del run.failed[exited.worker]
        if run is None or exited.worker not in run.workers:
            return []
        if exited.worker in run.membership.through:
            self.state.drop_worker(run, exited.worker)
            return self._reconcile_last_iteration(run)
        if not exited.expected:
            return []
        lose_worker(self.state, run, exited.worker, exited.at)
        return self._reconcile([exited.task])

    # --- refusals and timeouts ---------------------------------------------------------------------------------------

    def _extend_starts(self, fact: StandbyDied | StandbyRevived) -> list[Message]:
        """Give the workers that start on a node their time anew: without a standby it can't start any."""
        return [
            timer
            for run in self.state.tasks_on(fact.node)
            for worker in run.workers.values()
            if worker.slot.node == fact.node and worker.stage is WorkerStage.STARTING
            for timer in run.request_timer(WaitKind.START, worker.worker)
        ]

    def _command_refused(self, refused: CommandRefused) -> list[Message]:
        run = self.state.tasks.get(refused.task)
        worker = run.workers.get(refused.worker) if run else None
        if run is None or worker is None or worker.stage is not WorkerStage.STARTING:
            return []
        if 0 <= refused.token < self.state.token:  # an earlier instance gave it, and it came late: nothing was tried
            return order_again(self.state, run, worker) if worker.token < self.state.token else []
        return [_attempt_failed(refused.task, Cure.RESTART, worker, refused.reason)]

    def _timer_fired(self, fired: TimerFired) -> list[Message]:
        deadline = Deadline.read(fired.name)
        run = self.state.tasks.get(deadline.task)
        if run is None or run.state.ended:
            return []
        if deadline.wait in {WaitKind.STATES, WaitKind.IDLE, WaitKind.AGAIN}:
            return run.snapshots.expire(self.state, run, deadline.wait) + self._reconcile([deadline.task])
        if deadline.wait is WaitKind.START:
            late = run.workers.get(deadline.about)
            if late is None or late.stage is not WorkerStage.STARTING:
                return []
            return [_attempt_failed(deadline.task, Cure.RESTART, late, "its model was not built in time")]
        if deadline.wait is WaitKind.TRIAL:
            waited = run.awaits_trial
            return end_trial(self.state, run, UNTRIED) + self._reconcile([deadline.task]) if waited else []
        return self._join_timed_out(run, deadline)

    def _worker_away(self, away: WorkerAway) -> list[Message]:
        """Record that a member's script is busy, with an evaluation for example, and will join the membership later."""
        run = self.state.tasks.get(away.task)
        if run is not None and away.worker in run.workers and away.epoch == run.membership.epoch:
            run.membership.away[away.worker] = None
        return []

    def _join_timed_out(self, run: TaskRun, deadline: Deadline) -> list[Message]:
        """Report the members that did not join in time; replace the first of them if the detector reports no failure.

        That process had ended, say, before its node was admitted on an older word by which it lived.
        """
        membership = run.membership
        missing = [name for name in membership.group if name not in membership.joined and name in run.workers]
        if not missing:
            return []
        if any(name in membership.away for name in missing):  # so the others wait for it, too
            return [deadline.set()]  # how long a script may be busy its agent knows
        first, reason = (
            run.workers[missing[0]],
            f"{', '.join(missing)} did not join membership {membership.epoch} in time",
        )
        verdict = Deadline(WaitKind.VERDICT, deadline.task, str(membership.epoch))
        if deadline.wait is WaitKind.REGROUP:
            return [_attempt_failed(deadline.task, Cure.REGROUP, first, reason), verdict.set()]
        return (
            stop_worker(self.state, run, first, reason) + self._reconcile([deadline.task])
            if deadline == verdict
            else []
        )

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _reconcile(self, names: Iterable[str]) -> list[Message]:
        """Reconcile these tasks; end those that have finished, and those whose copies are all unusable."""
        runs = [run for name in names if not (run := self.state.tasks[name]).state.ended]
        out = [message for run in runs if run.has_ended for message in finish_task(self.state, run)]
        out += reconcile(self.state, [run.spec.name for run in runs if not run.state.ended])
        vain = [(run.spec.name, why) for run in runs if (why := run.snapshots.exhausted_reason(run))]
        return out + [message for name, why in vain for message in end_task(self.state, name, MoveCause.OWN_FAULT, why)]


def _cause(failure: FailureDetected) -> str:
    """Return the cause of a failure in words, which restarted programs can read."""
    who = failure.node if failure.severity is Severity.SEV1 else failure.worker
    named = failure.severity is Severity.SEV3 or failure.reason.startswith(who)
    return failure.reason if named else f"{who}: {failure.reason}"


def _attempt_failed(task: str, action: Cure, worker: WorkerRun, reason: str) -> AttemptFailed:
    slot = worker.slot
    return AttemptFailed(task=task, action=action, reason=reason, node=slot.node, slot=slot.slot, worker=worker.worker)
