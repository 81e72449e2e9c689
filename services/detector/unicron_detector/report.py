"""Reports failures, each of them once.

Most of what is heard after a failure is its consequence. So a worker process fails once, a node fails once until it
joins again, a membership of a task breaks once, and a task whose own program is at fault is not spoken of again.
"""

import re
from collections.abc import Iterable

from msgspec.structs import replace

from unicron.contracts.base import CancelTimer, Message, SetTimer
from unicron.contracts.events import FailureDetected, TaskBroken, WorkerFact
from unicron.contracts.failures import FailureStatus, Severity
from unicron.contracts.hardware import FaultLogged
from unicron_detector.books import RecordIndex
from unicron_detector.ladder import LONGEST_S
from unicron_detector.state import (
    ECHOES_S,
    DetectorLimits,
    DetectorState,
    LostNode,
    RecentCause,
    TaskRecord,
    WatchedWorker,
    worker_number,
)
from unicron_detector.timers import DetectorTimer, TimerKind

LASTED_S = 600.0
"""A program that reports no iterations has come further where it fails that long after its ranks met."""

OF_MACHINES = {
    *(FailureStatus.LOST_CONNECTION, FailureStatus.CONNECTION_REFUSED, FailureStatus.CONNECTION_RESET),
    *(FailureStatus.LINK_FLAPPING, FailureStatus.OTHER_NETWORK_ERROR, FailureStatus.STATE_TRANSFER_FAILED),
    *(FailureStatus.ECC_ERROR, FailureStatus.NVLINK_ERROR, FailureStatus.GPU_DRIVER_ERROR),
    *(FailureStatus.OUT_OF_MEMORY, FailureStatus.OUT_OF_RESOURCES, FailureStatus.IO_ERROR, FailureStatus.UNKNOWN),
}
"""What no program does by itself: however often it comes, it ends no task."""

_NUMBERS = re.compile(r"\d+")

LONGEST_CAUSE = 500
"""Characters of a failure that are repeated with its echoes."""


class Reporter:
    """Turns findings into messages, and reports each failure once."""

    def __init__(self, state: DetectorState, limits: DetectorLimits) -> None:
        self.state = state
        self.limits = limits
        self.books = RecordIndex(state)

    def task(self, name: str) -> TaskRecord:
        """Return the record of a task, made if there is none."""
        return self.state.tasks.setdefault(name, TaskRecord())

    def worker(self, name: str, task: str, node: str, slot: int) -> WatchedWorker:
        """Return the record of a worker process, made if there is none."""
        return self.state.workers.get(name) or self._add(name, WatchedWorker(task=task, node=node, slot=slot))

    def watch(self, name: str, task: str, node: str, slot: int) -> WatchedWorker:
        """Return a new record of a worker process that is known to be there."""
        if name in self.state.workers:
            self.books.remove(name)
        return self._add(name, WatchedWorker(task=task, node=node, slot=slot))

    def _add(self, name: str, worker: WatchedWorker) -> WatchedWorker:
        if worker.node in self.state.lost or self.task(worker.task).closed:
            worker.gone_at = self.state.now
        self.books.add(name, worker)
        there = self.state.starting.get(worker.node, {})
        if worker.slot in there and there[worker.slot].worker == name:
            del there[worker.slot]
            if not there:
                del self.state.starting[worker.node]
        return worker

    def machine(self, node: str) -> str:
        """Return the address of the machine that a node is on; of one that is gone, its name."""
        record = self.state.nodes.get(node)
        return record.host if record is not None and record.host else node

    def machines_of_task(self, task: str) -> set[str]:
        """Return the machines with watched workers of a task."""
        return {self.machine(node) for node in self.books.nodes_of_task(task)}

    def is_about_known_worker(self, fact: WorkerFact | FaultLogged) -> bool:
        """Return whether the worker of a fact is or was where the fact says."""
        worker, place = self.state.workers.get(fact.worker), (fact.task, fact.node, fact.slot)
        if worker is not None:
            return (worker.task, worker.node, worker.slot) == place
        return self.state.may_exist(fact.worker, *place)

    def request_timer(self, out: list[Message], kind: TimerKind, about: str, after_s: float) -> str:
        """Add a request for a timer to `out`, under a name never used before; return the name."""
        self.state.timers += 1
        name = str(DetectorTimer(kind, about, self.state.timers))
        out.append(SetTimer(name=name, after_s=after_s))
        return name

    def fail(
        self,
        failure: FailureDetected,
        iteration: int = -1,
        *,
        echo: bool = False,
        own: bool = False,
        unexplained: bool = False,
        outside: bool = False,
        forced: bool = False,
        traceback: str = "",
        idle_s: float = 0.0,
    ) -> list[Message]:
        """Report the failure of a worker, at the severity to which its predecessors have raised it.

        Args:
            failure: as it would be met by itself.
            iteration: in which the worker was, -1 where that is not known.
            echo: by its nature it follows from another one, if the task has had one just before.
            own: by all that is known it is the program's own, so that it costs the task in the end, and no node.
            unexplained: no rule knows its cause: it costs no node, and the task only where that comes no further.
            outside: a server that is none of the cluster's refuses, so that no node is at fault, and a wait may help.
            forced: somebody else has ended it, or nobody knows who: no proof against the program, how often it may be.
            traceback: of its exception, if it is one.
            idle_s: for so long the task has not come further.
        """
        now, window_s = self.state.now, self.limits.window_s
        task = self.task(failure.task)
        if task.closed or failure.node in self.state.lost or self.books.is_closed(failure.worker):
            return []
        if failure.status is FailureStatus.OUT_OF_RESOURCES:
            return self.report(self._delayed(task, failure))
        if waits := self._report_outage(task, failure, iteration) if outside else []:
            return waits
        known = echo and task.outage.explains(now)
        tried, where = ([], "") if known else self._count(task, failure, iteration, idle_s)
        proof = self.limits.count_all or not (forced or failure.status in OF_MACHINES)
        stuck = len(tried) >= self._most_tries(failure.task, tried, unexplained=unexplained)
        if stuck and proof:
            return self.break_task(failure.task, _no_progress(tried, where), traceback)
        cause = self._recent_cause(failure.task) if echo else None
        failure = self._escalated(task, failure, cause, unexplained=unexplained)
        climbs = failure.severity is Severity.SEV1 and failure.escalated is not None
        alone = bool(failure.worker) and self.books.on_one_machine()  # on no other node would it fare better
        if climbs and (own or alone or not task.ladder.give_up_node(failure.node, now, window_s)):
            nodes = ", ".join(sorted({*task.ladder.climbs, failure.node}))
            where = "on the only machine" if alone else f"on several nodes ({nodes})"
            why = "fails again and again " + ("by itself" if own else where)
            if proof and (len(tried) > self.limits.attempts or not failure.worker):
                return self.break_task(failure.task, f"{why}: {failure.reason}", traceback)
            failure = self._delayed(task, failure, why) if failure.worker else failure
        elif stuck and failure.severity is Severity.SEV2:
            failure = self._delayed(task, failure, _no_progress(tried, where))
        task.last = failure
        return self.report(failure, echo=echo)

    def _escalated(
        self, task: TaskRecord, failure: FailureDetected, cause: RecentCause | None, *, unexplained: bool
    ) -> FailureDetected:
        """Return a failure at the severity to which its predecessors have raised it.

        Args:
            task: that it hit.
            failure: as it would be met by itself.
            cause: from which it follows, so that its node is not at fault.
            unexplained: nobody is known to be at fault: it is met by longer and longer waits, and climbs no further.
        """
        now, window_s, attempts, climbed = self.state.now, self.limits.window_s, self.limits.attempts, False
        if failure.severity is Severity.SEV3:
            failure = replace(failure, attempt=task.ladder.reattempt(now, window_s))
            if failure.attempt > attempts:
                failure = replace(failure, severity=Severity.SEV2, escalated=Severity.SEV3)
                climbed = True
        if failure.severity is not Severity.SEV2:
            return failure
        if cause is not None:
            return replace(failure, reason=f"{failure.reason}; echo of {cause.text}")
        attempt = task.ladder.restart(failure.node, now, window_s)
        if attempt > attempts and unexplained:
            wait_s = min(LONGEST_S, 2.0 ** (attempt - attempts - 1))
            reason = f"{failure.reason}; no rule knows the cause, so nobody is blamed; tried again in {wait_s:g} s"
            return replace(failure, reason=reason, attempt=attempt, wait_s=wait_s)
        if attempt > attempts:
            return replace(failure, severity=Severity.SEV1, escalated=Severity.SEV2, attempt=attempt)
        return failure if climbed else replace(failure, attempt=attempt)

    def _report_outage(self, task: TaskRecord, failure: FailureDetected, iteration: int) -> list[Message]:
        """Report a failure caused by a server outside of the cluster; None if that lasts too long."""
        number = worker_number(failure.worker, failure.task)
        wait_s = task.outage.count_failure(self.state.now, iteration, number, max(number, task.started or 0))
        if wait_s is None:
            return []
        again = f"; tried again in {wait_s:g} s" if wait_s else ""
        tries = task.outage.tries
        return self.report(replace(failure, reason=failure.reason + again, attempt=tries, wait_s=wait_s))

    def _delayed(self, task: TaskRecord, failure: FailureDetected, why: str = "") -> FailureDetected:
        """Return a failure whose worker is replaced after longer and longer waits; the others go on meanwhile."""
        number = worker_number(failure.worker, failure.task)
        wait_s = task.lack.count_lack(self.state.now, number, max(number, task.started or 0))
        reason = f"{failure.reason}{f'; {why}' if why else ''}; tried again in {wait_s:g} s"
        return replace(failure, severity=Severity.SEV2, reason=reason, attempt=task.lack.tries - 1, wait_s=wait_s)

    def _count(
        self, task: TaskRecord, failure: FailureDetected, iteration: int, idle_s: float
    ) -> tuple[list[str], str]:
        """Return what has ended the task since it came further, this failure included, and where that was."""
        worker = self.state.workers.get(failure.worker)
        if worker is None:
            return [], ""
        how = f"{failure.worker} on {failure.node}: {failure.reason.splitlines()[0][:300] if failure.reason else ''}"
        # of a membership that a failed handover broke, no report says that it was formed
        epoch = max(worker.epoch if worker.epoch >= 0 else worker.ordered, failure.epoch)
        if epoch < 0:
            slot = f"{failure.node}:{failure.slot}"
            tried, where = task.standstill.count_failed_start(slot, how), f"workers in a row failed to start on {slot}"
        else:
            lasted = task.restarts and self.state.now - task.standstill.met_at - idle_s > LASTED_S
            tried = task.standstill.count_failure(iteration, epoch, how, lasted=lasted)
            at = iteration if iteration >= 0 else task.standstill.iteration
            where = "attempts in a row failed " + (f"in iteration {at}" if at >= 0 else "before the first iteration")
            if task.restarts and at <= 0:  # it does not say how far it comes
                where = "starts of all ranks in a row failed"
        return tried, where

    def _most_tries(self, name: str, tried: list[str], *, unexplained: bool) -> int:
        """Return how often a task may fail in one iteration.

        Where it is on one machine alone, and always fails by the same, nobody else could tell whose fault that is: what
        nobody can explain need not be tried as often.
        """
        ways = {_NUMBERS.sub("0", each.partition(": ")[2]) for each in tried}
        alone = unexplained and len(ways) == 1 and len(self.machines_of_task(name)) <= 1
        return min(self.limits.attempts + 1, self.limits.no_progress) if alone else self.limits.no_progress

    def _recent_cause(self, name: str) -> RecentCause | None:
        """Return the recent failure of a task that others may follow from."""
        cause = self.task(name).cause
        return cause if cause is not None and self.state.now - cause.at <= ECHOES_S else None

    def _record_cause(self, failure: FailureDetected, tasks: Iterable[str]) -> None:
        """Remember the first failure of several for those that follow from it."""
        who = f"{failure.worker} on {failure.node}" if failure.worker else failure.node
        for name in tasks:
            if self._recent_cause(name) is None:
                line = failure.reason.partition("\n")[0]
                text = f"{who}: {failure.status}: {line}"[:LONGEST_CAUSE]
                self.task(name).cause = RecentCause(text=text, at=self.state.now)

    def report(self, failure: FailureDetected, *, echo: bool = False) -> list[Message]:
        """Report a failure, and note that its consequences need no report of their own."""
        state = self.state
        broken = self._broken_tasks(failure)
        if not echo and failure.severity is not Severity.SEV3:
            self._record_cause(failure, sorted({*broken, failure.task} - {""}))
        out: list[Message] = [self._with_evidence(failure, echo=echo)]
        if failure.severity is Severity.SEV1:
            state.lost[failure.node] = LostNode(at=state.now)
            out += self.drop_node(failure.node)
        if failure.severity is not Severity.SEV3 and failure.worker:
            self.worker(failure.worker, failure.task, failure.node, failure.slot).failed = True
            self.books.close(failure.worker)
        for name, epoch in sorted(broken.items()):
            task = self.task(name)
            task.failed_epoch = max(task.failed_epoch, epoch)
            if task.pending and task.pending.epoch <= task.failed_epoch:
                out += self.drop_pending(task)
        return out

    def _with_evidence(self, failure: FailureDetected, *, echo: bool) -> FailureDetected:
        """Return a failure with the evidence that nodes' kernels and its workers logged just before."""
        nodes = [failure.node] if failure.severity is not Severity.SEV3 else self.books.nodes_of_task(failure.task)
        said = [f"{node}'s kernel said: {self.state.said[node].text}" for node in nodes if node in self.state.said]
        said += self._evidence_lines(failure, echo=echo)
        return replace(failure, reason="; ".join([failure.reason, *said])) if said else failure

    def _evidence_lines(self, failure: FailureDetected, *, echo: bool) -> list[str]:
        """Return the logged lines that explain a failure: its worker's, and those of its first cause."""
        wrote, workers = self.state.wrote, self.state.workers
        known = {} if failure.severity is Severity.SEV3 else {failure.worker: None}
        if echo or failure.severity is Severity.SEV3:
            of_task = (name for name in wrote if name in workers and workers[name].task == failure.task)
            known = {next(of_task, ""): None, **known}
        found = [name for name in known if name in wrote and name in workers]
        return [f"{workers[name].node}'s {name} said: {wrote[name].text}" for name in found]

    def _broken_tasks(self, failure: FailureDetected) -> dict[str, int]:
        """Return the tasks that a failure breaks, and up to which epoch.

        A worker that had left a membership, or was in none yet, breaks none: its task goes on, and may still break.
        """
        if failure.severity is Severity.SEV3:
            return {failure.task: self.task(failure.task).epoch}
        gone = [failure.worker] if failure.worker else []
        if failure.severity is Severity.SEV1:
            gone += self.books.watched_on(failure.node)
        found: dict[str, int] = {}
        for name in gone:
            if worker := self.state.workers.get(name):
                found[worker.task] = max(found.get(worker.task, -1), worker.epoch, worker.ordered)
        return found

    def break_task(self, name: str, reason: str, traceback: str = "") -> list[Message]:
        """Report that the task's own program is at fault; nothing more is reported about it."""
        task = self.task(name)
        task.broken, task.seen = True, {}
        self.drop_workers(name)
        return [TaskBroken(task=name, reason=reason, traceback=traceback), *self.drop_pending(task)]

    def drop_node(self, name: str) -> list[Message]:
        """Forget a node; nothing more is expected of its workers."""
        out = self.books.clear_suspicion(name)
        self.books.remove_node(name)
        self.state.starting.pop(name, None)
        self.books.close_all(self.books.watched_on(name))
        return out

    def drop_workers(self, task: str) -> None:
        """Expect nothing more of the workers of a task."""
        self.books.close_all(self.books.watched_in_task(task))

    def forget(self) -> None:
        """Drop what lies before the window in which attempts are counted."""
        self.books.forget(self.state.now - self.limits.window_s)
        self.state.forget(self.limits.window_s)

    def drop_pending(self, task: TaskRecord) -> list[Message]:
        """Forget a held failure whose cause has been reported."""
        pending, task.pending = task.pending, None
        return [CancelTimer(name=pending.timer)] if pending else []

    def rewatch(self, worker: str) -> None:
        """Watch a process again that was closed without a report, as other workers wait for it."""
        found = self.state.workers.get(worker)
        if found is not None and not found.failed:
            self.books.reopen(worker)


def _no_progress(tried: list[str], where: str) -> str:
    return f"no progress: {len(tried)} {where}, the last by {'; '.join(tried[-3:])}"
