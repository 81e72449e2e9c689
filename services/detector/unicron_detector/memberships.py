"""Broken collectives and failed state transfers: usually consequences of a failure that is reported a moment later."""

import math

from msgspec.structs import replace

from unicron.contracts.base import CancelTimer, Message
from unicron.contracts.commands import Regroup
from unicron.contracts.events import (
    Alert,
    CollectiveFailed,
    FailureDetected,
    IterationFinished,
    Regrouped,
    StateDiverged,
    TaskStateChanged,
    TaskSubmitted,
    WorkerAway,
    WorkerStalled,
)
from unicron.contracts.failures import DetectionMethod, FailureStatus, Severity
from unicron.contracts.tasks import Breakage
from unicron.errors import tells_lack
from unicron.healing import way_of
from unicron_detector.processes import describe_stall, first_collective
from unicron_detector.report import Reporter
from unicron_detector.state import PendingFailure, TaskRecord
from unicron_detector.timers import TimerKind

NOT_FINITE = 20
"""Iterations in a row without a finite loss after which that is reported. Scalers of losses need fewer to settle."""

STALE = "Stale Connection"
"""The server's reason where a client did not answer its pings; a process that ends is another reason."""


class Memberships:
    """Follows the memberships of the tasks, and holds broken collectives back until their cause is known."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._state = reporter.state
        self._books = reporter.books

    def record_order(self, order: Regroup) -> list[Message]:
        """Record a membership that was ordered; workers can be in no other."""
        self._known(self._reporter.task(order.task), order.epoch)
        for member in order.members:
            worker = self._state.workers.get(member.worker)
            if worker is None:  # its node was away for so long that it was forgotten
                worker = self._reporter.watch(member.worker, order.task, order.node, member.slot)
            if worker.gone_at is None:
                worker.ordered = max(worker.ordered, order.epoch)
        return []

    def _known(self, task: TaskRecord, epoch: int) -> None:
        task.ordered = epoch if task.ordered is None else max(task.ordered, epoch)

    def record_regroup(self, regrouped: Regrouped) -> list[Message]:
        """Record the slot and the epoch in which a worker computes."""
        worker = self._reporter.worker(regrouped.worker, regrouped.task, regrouped.node, regrouped.slot)
        if worker.gone_at is not None:
            return []  # maybe of an earlier task of this name, whose epochs were others
        if regrouped.epoch > worker.epoch:
            worker.epoch = regrouped.epoch
            self._state.wrote.pop(regrouped.worker, None)  # it is over what it wrote about
        task = self._reporter.task(regrouped.task)
        task.standstill.record_progress(regrouped.iteration, regrouped.kept)
        task.standstill.met_at = self._state.now
        return self._advance(task, regrouped.epoch)

    def record_iteration(self, finished: IterationFinished) -> list[Message]:
        """Record how far a task has come; report once that its loss stays no number, whatever that means to it.

        One whose loss never is a number may train without it, such as on batches that have no target.
        """
        task = self._reporter.task(finished.task)
        if task.closed or finished.epoch < task.epoch:
            return []
        task.standstill.record_progress(finished.iteration + 1)
        if task.not_finite == NOT_FINITE:
            return []
        task.not_finite = 0 if math.isfinite(finished.loss) else task.not_finite + 1
        if task.not_finite < NOT_FINITE:
            return []
        first, last = finished.iteration + 1 - NOT_FINITE, finished.iteration
        text = f"task {finished.task}: its loss was {finished.loss} in all of the iterations {first} to {last}"
        advice = f"it goes on: see what it learns, or end it by `unicron remove {finished.task}`"
        return [Alert(text=f"{text}; {advice}", task=finished.task)]

    def reset_task(self, submitted: TaskSubmitted) -> list[Message]:
        """Forget an earlier task of this name. Facts about the new task's workers come later than this one."""
        spec = submitted.spec
        self._state.tasks[submitted.task] = TaskRecord(
            ordered=-1, started=-1, iterations=spec.iterations, restarts=way_of(spec).runs_again
        )
        return []

    def follow_state(self, changed: TaskStateChanged) -> list[Message]:
        """Record the state of a task; when it ends, nothing more is expected of its workers."""
        task = self._reporter.task(changed.task)
        if not changed.state.ended:
            self._known(task, changed.epoch)
            return [] if task.closed else self._advance(task, changed.epoch)
        self._state.tasks[changed.task] = TaskRecord(ended_at=self._state.now, started=task.started)
        self._reporter.drop_workers(changed.task)
        return self._reporter.drop_pending(task)

    def _advance(self, task: TaskRecord, epoch: int) -> list[Message]:
        """Record that the task is in `epoch`, and forget what broke in earlier ones."""
        task.epoch = max(task.epoch, epoch)
        overtaken = task.pending is not None and task.pending.epoch < task.epoch
        return self._reporter.drop_pending(task) if overtaken else []

    def hold_broken(self, failed: CollectiveFailed) -> list[Message]:
        """Hold a broken collective or a failed state transfer back, unless it shows that a suspect node is lost.

        The other workers form a new membership, in which the one without a state asks all that have it again.
        """
        of_state = failed.broke is not Breakage.GROUP
        failure = FailureDetected(
            severity=Severity.SEV3,
            method=DetectionMethod.EXCEPTION_PROPAGATION,
            status=FailureStatus.STATE_TRANSFER_FAILED if of_state else FailureStatus.CONNECTION_RESET,
            task=failed.task,
            node=failed.node,
            slot=failed.slot,
            worker=failed.worker,
            reason=failed.error,
            epoch=failed.epoch,
        )
        if failed.broke is Breakage.LACK:
            return self._go_on_without(failure)
        return self._hold(failure, failed.epoch, failed.iteration, collective=not of_state)

    def _go_on_without(self, failure: FailureDetected) -> list[Message]:
        """Have the others go on without a worker for whose state a machine has no room, say; another comes later."""
        task = self._reporter.task(failure.task)
        if failure.epoch < task.epoch or failure.epoch <= task.failed_epoch:
            return []
        lacking = replace(failure, severity=Severity.SEV2, status=FailureStatus.OUT_OF_RESOURCES)
        return self._advance(task, failure.epoch) + self._reporter.fail(lacking)

    def regroup_diverged(self, fact: StateDiverged) -> list[Message]:
        """Have a task regroup at once whose replicas' states differ; the wrong ones are replaced by copies.

        A process to which that happens once more is replaced, and the ladder counts that for its node.
        """
        worker, task = (
            self._reporter.worker(fact.worker, fact.task, fact.node, fact.slot),
            self._reporter.task(fact.task),
        )
        again, worker.diverged = worker.diverged, True
        if (
            task.closed
            or self._books.is_closed(fact.worker)
            or (not again and (fact.epoch < task.epoch or fact.epoch <= task.failed_epoch))
        ):
            return []
        failure = FailureDetected(
            severity=Severity.SEV2 if again else Severity.SEV3,
            method=DetectionMethod.ONLINE_STATISTICS,
            status=FailureStatus.STATE_DIVERGED,
            task=fact.task,
            node=fact.node,
            slot=fact.slot,
            worker=fact.worker,
            reason=f"{fact.worker} has another state of iteration {fact.iteration} than other replicas",
            escalated=Severity.SEV3 if again else None,
            epoch=fact.epoch,
        )
        return self._advance(task, fact.epoch) + self._reporter.fail(failure, fact.iteration)

    def record_away(self, away: WorkerAway) -> list[Message]:
        """Record that a worker's script is busy; other workers that wait for it do not hang."""
        task = self._reporter.task(away.task)
        if task.away and next(iter(task.away.values()))[0] < away.epoch:
            task.away = {}  # they are of an earlier membership; thousands may say so at once, so none is looked for
        task.away[away.worker] = away.epoch, away.iteration
        return []

    def hold_waiting(self, stalled: WorkerStalled) -> list[Message]:
        """Hold the report of a worker that waits in a collective back; the worker it waits for may be reported.

        Where it waits for one whose script is busy, there is nothing to report.
        """
        task = self._reporter.task(stalled.task)
        task.away.pop(stalled.worker, None)  # it is back
        if (stalled.epoch, stalled.iteration) in task.away.values():
            return []
        failure = FailureDetected(
            severity=Severity.SEV3,
            method=DetectionMethod.ONLINE_STATISTICS,
            status=FailureStatus.NCCL_TIMEOUT,
            task=stalled.task,
            node=stalled.node,
            slot=stalled.slot,
            worker=stalled.worker,
            reason=describe_stall(stalled) + first_collective(stalled.collectives),
            epoch=stalled.epoch,
        )
        return self._hold(failure, stalled.epoch, stalled.iteration, collective=False)

    def _hold(self, failure: FailureDetected, epoch: int, iteration: int, *, collective: bool) -> list[Message]:
        task = self._reporter.task(failure.task)
        if task.closed or epoch < task.epoch or epoch <= task.failed_epoch or self._books.is_closed(failure.worker):
            return []
        out = self._advance(task, epoch)
        pending = task.pending
        if pending is None:
            timer = self._held(out, failure.task)
            task.pending = pending = PendingFailure(failure=failure, epoch=epoch, timer=timer, collective=collective)
        elif collective and (not pending.collective or pending.failure.node in self._books.suspects(failure.task)):
            pending.failure, pending.collective = failure, True
        pending.iteration = max(pending.iteration, iteration)  # a new worker is in none yet
        return out + self.report_if_explained(failure.task)

    def _held(self, out: list[Message], task: str) -> str:
        return self._reporter.request_timer(out, TimerKind.HOLD, task, self._reporter.limits.collective_hold_s)

    def report_if_explained(self, name: str) -> list[Message]:
        """Report a suspect node as lost if it alone explains the task's broken collective.

        The crash of an agent breaks no collective: its workers live on. So where a collective with them breaks too,
        there is nothing to wait for. A stale connection is no such witness: the agent of a busy machine may have been
        too slow to answer the server, while the collective broke for another reason that is not reported yet.
        """
        task = self._reporter.task(name)
        if task.pending is None or not task.pending.collective:
            return []
        suspects = self._books.suspects(name)
        if len(suspects) != 1 or task.pending.failure.node in suspects:
            return []
        node = suspects.pop()
        if self._state.nodes[node].reason == STALE:
            return []
        why = f"its connection ended ({self._state.nodes[node].reason}) and a collective of {name} with it broke"
        return self._reporter.report(connection_failure(node, why))

    def report_all_explained(self) -> list[Message]:
        """Do `report_if_explained` for every task."""
        return [outcome for name in list(self._state.tasks) for outcome in self.report_if_explained(name)]

    def expire_hold(self, name: str, timer: str) -> list[Message]:
        """Report what is still unexplained, once no node with workers of the task is suspect.

        Where another membership was ordered meanwhile, that is why peers have left, and nothing is wrong.
        """
        task = self._state.tasks.get(name)
        if task is None or task.pending is None or task.pending.timer != timer:
            return []
        if task.ordered is not None and task.ordered > task.pending.epoch:
            task.pending = None
            return []
        if self._books.suspects(name):
            out: list[Message] = []
            task.pending.timer = self._held(out, name)
            return out
        failure, iteration, task.pending = task.pending.failure, task.pending.iteration, None
        if tells_lack(failure.reason):  # whose machine that is has not been heard: nobody climbs for it
            return self._reporter.report(replace(failure, status=FailureStatus.OUT_OF_RESOURCES))
        return self._reporter.fail(failure, iteration, echo=failure.status is not FailureStatus.STATE_TRANSFER_FAILED)

    def restart_holds(self) -> list[Message]:
        """Restart the timers of all held reports."""
        out: list[Message] = []
        for name, task in self._state.tasks.items():
            if task.pending:
                out.append(CancelTimer(name=task.pending.timer))
                task.pending.timer = self._held(out, name)
        return out


def connection_failure(node: str, reason: str) -> FailureDetected:
    """Return the failure of a node."""
    return FailureDetected(
        severity=Severity.SEV1,
        method=DetectionMethod.NODE_HEALTH,
        status=FailureStatus.LOST_CONNECTION,
        node=node,
        reason=reason,
    )
