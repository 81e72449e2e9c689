"""What is said, and said once: every failure goes out through here.

Most of what is heard after a failure is its consequence. So a worker process fails once, a node fails once until it
joins again, a membership of a task breaks once, and a task whose own program is at fault is not spoken of again.
"""

from collections.abc import Iterable

from msgspec.structs import replace

from unicron.contracts.base import CancelTimer, Message, SetTimer
from unicron.contracts.events import FailureDetected, Severity, TaskBroken
from unicron_detector.state import Limits, Lost, State, Task, Worker


class Reporter:
    """Turns findings into messages and keeps the books on what has been said."""

    def __init__(self, state: State, limits: Limits) -> None:
        self.state = state
        self.limits = limits

    def task(self, name: str) -> Task:
        """Return the record of a task, made if there is none."""
        return self.state.tasks.setdefault(name, Task())

    def worker(self, name: str, task: str, node: str, slot: int) -> Worker:
        """Return the record of a worker process, made if there is none."""
        found = self.state.workers.get(name)
        if found is None:
            over = node in self.state.lost or self.task(task).closed
            found = Worker(task=task, node=node, slot=slot, gone_at=self.state.now if over else None)
            self.state.workers[name] = found
        return found

    def arm(self, out: list[Message], prefix: str, after_s: float) -> str:
        """Add a request for a timer to `out`, under a name never used before; return the name."""
        self.state.timers += 1
        timer = SetTimer(name=f"{prefix}:{self.state.timers}", after_s=after_s)
        out.append(timer)
        return timer.name

    def fail(self, failure: FailureDetected) -> list[Message]:
        """Report the failure of a worker, at the severity to which its predecessors have raised it."""
        now, window_s, attempts = self.state.now, self.limits.window_s, self.limits.attempts
        task = self.task(failure.task)
        if task.closed or failure.node in self.state.lost or self.gone(failure.worker):
            return []
        climbed = False
        if failure.severity is Severity.SEV3:
            failure = replace(failure, attempt=task.ladder.reattempt(now, window_s))
            if failure.attempt > attempts:
                failure = replace(failure, severity=Severity.SEV2, escalated=Severity.SEV3)
                climbed = True
        if failure.severity is Severity.SEV2:
            attempt = task.ladder.restart(failure.node, now, window_s)
            if attempt > attempts:
                failure = replace(failure, severity=Severity.SEV1, escalated=Severity.SEV2, attempt=attempt)
            elif not climbed:
                failure = replace(failure, attempt=attempt)
        gives_up_node = failure.severity is Severity.SEV1 and failure.escalated is not None
        if gives_up_node and task.ladder.climb(failure.node, now, window_s):
            nodes = ", ".join(sorted(task.ladder.climbs))
            return self.break_task(failure.task, f"fails again and again on several nodes ({nodes}): {failure.reason}")
        task.last = failure
        return self.report(failure)

    def report(self, failure: FailureDetected) -> list[Message]:
        """Say it, and take whatever follows from it as said."""
        state = self.state
        touched = {failure.task} if failure.task else set()
        out: list[Message] = [failure]
        if failure.severity is Severity.SEV1:
            touched |= {w.task for w in state.workers.values() if w.node == failure.node and w.gone_at is None}
            state.lost[failure.node] = Lost(at=state.now)
            out += self.drop_node(failure.node)
        if failure.severity is not Severity.SEV3 and failure.worker:
            worker = self.worker(failure.worker, failure.task, failure.node, failure.slot)
            worker.failed, worker.gone_at = True, state.now
        for name in sorted(touched):
            task = self.task(name)
            task.failed_epoch = max(task.failed_epoch, task.epoch)
            out += self.drop_pending(task)
        return out

    def break_task(self, name: str, reason: str, traceback: str = "") -> list[Message]:
        """Say that the task's own program is at fault; nothing more will be said about it."""
        task = self.task(name)
        task.broken, task.seen = True, {}
        self.drop_workers(name)
        return [TaskBroken(task=name, reason=reason, traceback=traceback), *self.drop_pending(task)]

    def drop_node(self, name: str) -> list[Message]:
        """Forget a node; nothing more is expected of its workers."""
        node = self.state.nodes.pop(name, None)
        self._all_gone(worker for worker in self.state.workers.values() if worker.node == name)
        return [CancelTimer(name=node.suspect)] if node and node.suspect else []

    def drop_workers(self, task: str) -> None:
        """Expect nothing more of the workers of a task."""
        self._all_gone(worker for worker in self.state.workers.values() if worker.task == task)

    def drop_pending(self, task: Task) -> list[Message]:
        """Forget a broken collective that has found its explanation."""
        pending, task.pending = task.pending, None
        return [CancelTimer(name=pending.timer)] if pending else []

    def expect(self, worker: str) -> None:
        """Take back that nothing is expected of a process that was never reported: somebody waits for it."""
        found = self.state.workers.get(worker)
        if found is not None and not found.failed:
            found.gone_at = None

    def gone(self, worker: str) -> bool:
        """Return whether everything has been said about this process."""
        found = self.state.workers.get(worker)
        return found is not None and found.gone_at is not None

    def _all_gone(self, workers: Iterable[Worker]) -> None:
        for worker in workers:
            if worker.gone_at is None:
                worker.gone_at = self.state.now
