"""The transition service's core: failures, plans and reports in; fenced commands out (paper section 6)."""

from collections.abc import Iterable

from unicron.contracts.base import CancelTimer, Message, Started, TimerFired
from unicron.contracts.commands import StopWorker
from unicron.contracts.events import (
    AttemptFailed,
    CommandRefused,
    FailureDetected,
    NodeAdmitted,
    NodeGone,
    PlanDecided,
    Regrouped,
    Severity,
    TaskBroken,
    TaskRecovered,
    TaskRemoved,
    TaskStateChanged,
    TaskSubmitted,
    WorkerExited,
    WorkerFinished,
    WorkerReady,
)
from unicron.contracts.failures import Cure
from unicron.contracts.tasks import SlotRef, TaskState, WorkerStatus
from unicron.core import Core, Handlers
from unicron_transition.reconcile import members_of, settle, stop
from unicron_transition.state import NodeRun, TaskRun, TransitionState, WorkerRun


class TransitionCore(Core):
    """One state machine a task."""

    def __init__(self, state: TransitionState | None = None) -> None:
        self.state: TransitionState = state or TransitionState()
        self.handlers: Handlers = {
            CommandRefused: self._refused,
            FailureDetected: self._failure,
            NodeAdmitted: self._admitted,
            NodeGone: lambda gone: self._lose_node(gone.node, gone.at),
            PlanDecided: self._plan,
            Regrouped: self._regrouped,
            Started: self._activated,
            TaskBroken: lambda broken: self._end(broken.task, TaskState.FAILED, broken.reason, broken.traceback),
            TaskRemoved: lambda removed: self._end(removed.task, TaskState.REMOVED, "removed by its user"),
            TaskSubmitted: self._submitted,
            TimerFired: self._timer,
            WorkerExited: self._exited,
            WorkerFinished: self._finished,
            WorkerReady: self._ready,
        }

    # --- the world ---------------------------------------------------------------------------------------------------

    def _activated(self, started: Started) -> list[Message]:
        self.state.token = started.token
        return []

    def _submitted(self, submitted: TaskSubmitted) -> list[Message]:
        old = self.state.tasks.get(submitted.task)
        if old is not None and not old.state.ended:
            return []
        count = old.started if old else 0
        self.state.tasks[submitted.task] = TaskRun(spec=submitted.spec, started=count, before=count)
        return []

    def _admitted(self, node: NodeAdmitted) -> list[Message]:
        """A node is new, or its agent came back: believe what it says about its workers."""
        self.state.nodes[node.node] = NodeRun(
            incarnation=node.incarnation, rendezvous=node.rendezvous, state_server=node.state_server
        )
        alive = {status.worker: status for status in node.workers}
        for run in self.state.tasks.values():
            for worker in [worker for worker in run.workers.values() if worker.place.node == node.node]:
                status = alive.pop(worker.worker, None)
                if status is None:
                    self._lose_worker(run, worker.worker, node.at)
                else:
                    self._catch_up(run, status)
        unknown = [status for status in alive.values() if not self._take_back(node.node, status)]
        out: list[Message] = [
            StopWorker(
                node=node.node,
                token=self.state.token,
                incarnation=node.incarnation,
                slot=status.slot,
                worker=status.worker,
                task=status.task,
                reason="the node was held to be lost, and its place in the membership is taken",
            )
            for status in unknown
        ]
        # a task without a slot waits for the plan that this node's coming brings: it may have a worker here
        return out + self._settle(name for name, run in self.state.tasks.items() if run.target)

    def _catch_up(self, run: TaskRun, status: WorkerStatus) -> None:
        """A worker outlived its agent: see what was said on either side while the agent was away."""
        worker = run.workers[status.worker]
        if status.ready and worker.phase == "starting":
            worker.phase = "ready"
        worker.computed = worker.computed or status.epoch >= 0
        if status.worker in run.group and status.epoch != run.epoch:
            run.broken = True

    def _take_back(self, node: str, status: WorkerStatus) -> bool:
        """Take in a worker that was given up with its node, where nobody else has its task's state any more."""
        run = self.state.tasks.get(status.task)
        if run is None or run.state.ended or not (status.ready and status.epoch >= 0):
            return False
        number = status.worker.rpartition("-")[2]
        earlier = not number.isdecimal() or int(number) <= run.before
        if earlier or any(worker.computed for worker in run.workers.values()):
            return False
        place = SlotRef(node=node, slot=status.slot)
        run.workers[status.worker] = WorkerRun(worker=status.worker, place=place, phase="ready", computed=True)
        return True

    def _lose_node(self, name: str, at: float) -> list[Message]:
        node = self.state.nodes.get(name)
        if node is None:
            return []
        out: list[Message] = []
        for run in self.state.tasks.values():
            for worker in [worker for worker in run.workers.values() if worker.place.node == name]:
                out += stop(self.state, run, worker, f"{name} is taken out of use")
                self._lose_worker(run, worker.worker, at)
        node.alive = False
        return out + self._settle_all()

    def _lose_worker(self, run: TaskRun, name: str, at: float) -> None:
        run.workers.pop(name, None)
        if name in run.group:
            run.broken = True
        if run.failed_at is None:
            run.failed_at = at

    # --- failures and plans ------------------------------------------------------------------------------------------

    def _failure(self, failure: FailureDetected) -> list[Message]:
        if failure.severity is Severity.SEV1 and failure.node:
            changed = [
                run
                for run in self.state.tasks.values()
                if any(worker.place.node == failure.node for worker in run.workers.values())
            ]
            out = self._lose_node(failure.node, failure.at)
            return out + [
                message for run in changed for message in self._moved(run, TaskState.RECOVERING, failure.reason)
            ]
        run = self.state.tasks.get(failure.task)
        if run is None or run.state.ended:
            return []
        out = []
        if failure.severity is Severity.SEV3:
            if 0 <= failure.epoch < run.epoch:
                return []  # what broke was given up meanwhile: its members were told to form a new one
            run.broken = True  # reattempt in place: the same members, a new epoch
        elif failure.worker in run.workers:
            out += stop(self.state, run, run.workers[failure.worker], failure.reason)
        elif failure.worker not in run.group:
            return []  # that process was replaced already
        if run.failed_at is None:
            run.failed_at = failure.at
        return out + self._settle([failure.task]) + self._moved(run, TaskState.RECOVERING, failure.reason)

    def _plan(self, decided: PlanDecided) -> list[Message]:
        if decided.plan.number <= self.state.plan:
            return []
        self.state.plan = decided.plan.number
        changed = []
        for share in decided.plan.shares:
            run = self.state.tasks.get(share.task)
            if run is None or run.state.ended or run.target == share.slots:
                continue
            run.target = list(share.slots)
            if run.failed_at is None:
                run.failed_at = decided.at
            changed.append((run, share.reason))
        out = self._settle_all()
        for run, reason in changed:
            if self._as_wanted(run):  # an earlier plan is taken back before anybody moved
                out += self._complete(run, decided.at)
                continue
            state = TaskState.WAITING if not run.target else TaskState.RECONFIGURING
            if run.epoch < 0 and run.target:
                state = TaskState.STARTING
            if run.state is not TaskState.RECOVERING or not run.target:
                out += self._moved(run, state, reason or decided.plan.trigger)
        return out

    def _end(self, task: str, state: TaskState, reason: str, traceback: str = "") -> list[Message]:
        run = self.state.tasks.get(task)
        if run is None or run.state.ended:
            return []
        out = self._moved(run, state, reason, traceback)
        run.target, run.group = [], []
        return out + settle(self.state, [task]) + [CancelTimer(name=f"regroup.{task}")]

    # --- reports of workers ------------------------------------------------------------------------------------------

    def _ready(self, ready: WorkerReady) -> list[Message]:
        run = self.state.tasks.get(ready.task)
        if run is None or ready.worker not in run.workers:
            return []
        run.workers[ready.worker].phase = "ready"
        timer = CancelTimer(name=f"start.{ready.task}.{ready.worker}")
        return [timer, *self._settle([ready.task])]

    def _regrouped(self, report: Regrouped) -> list[Message]:
        run = self.state.tasks.get(report.task)
        if run is not None and report.worker in run.workers:
            run.workers[report.worker].computed = True
        if run is None or report.epoch != run.epoch or report.worker not in run.group:
            return []
        run.joined.add(report.worker)
        run.met = run.group
        if run.broken or not self._all_joined(run):
            return []
        return self._complete(run, report.at) + settle(self.state, [report.task])

    def _complete(self, run: TaskRun, at: float) -> list[Message]:
        """Say that the newest membership computes, and whether it is all that the plan wants."""
        out: list[Message] = [CancelTimer(name=f"regroup.{run.spec.name}")]
        out += self._moved(run, TaskState.RUNNING, f"{len(run.group)} workers in epoch {run.epoch}")
        if run.failed_at is not None and len(run.group) >= len(run.target):
            seconds = max(0.0, at - run.failed_at)
            run.failed_at = None
            out.append(TaskRecovered(task=run.spec.name, epoch=run.epoch, workers=len(run.group), seconds=seconds))
        return out

    def _as_wanted(self, run: TaskRun) -> bool:
        """Whether the newest membership computes in the very slots of the plan."""
        if run.broken or not run.group or not self._all_joined(run):
            return False
        places = [run.workers[name].place for name in run.group if name in run.workers]
        return len(places) == len(run.group) and set(places) == set(run.target)

    def _finished(self, finished: WorkerFinished) -> list[Message]:
        run = self.state.tasks.get(finished.task)
        if run is None or finished.worker not in run.workers:
            return []
        run.workers[finished.worker].phase = "finished"
        run.through.add(finished.worker)
        return self._after_the_end(run)

    def _after_the_end(self, run: TaskRun) -> list[Message]:
        """A member is through, and maybe gone: whoever missed the end of the last iteration must finish it without."""
        needed = run.broken or not self._all_joined(run) or self._is_over(run)
        return self._settle([run.spec.name]) if needed else []

    def _is_over(self, run: TaskRun) -> bool:
        """Whether the last iteration is done and no living member of the newest membership can still be busy with it.

        A member that is gone can't be replaced any more: whoever has the state is through, and on its way out.
        """
        if not run.through:
            return False
        left = {name for name in run.group if name in run.workers} - run.through
        # through before they could join the newest membership: who was not in the one before waits there in vain
        in_vain = not run.through & run.joined and left.isdisjoint(run.met)
        return not left or in_vain

    def _finish(self, run: TaskRun) -> list[Message]:
        """End the task; those that are through may still be writing their results: let them go, and stop the rest."""
        silent = [name for name in run.group if name not in run.workers and name not in run.through]
        for name in run.through & run.workers.keys():
            del run.workers[name]
        reason = f"all {run.spec.iterations} iterations are done"
        if silent:
            reason += f"; {', '.join(silent)} ended without saying so: what it was to write then may be missing"
        return self._end(run.spec.name, TaskState.FINISHED, reason)

    def _all_joined(self, run: TaskRun) -> bool:
        return run.joined.issuperset(run.group)

    def _exited(self, exited: WorkerExited) -> list[Message]:
        """A process is gone. Whether that is a failure is for the detector to say; an expected end frees the slot."""
        run = self.state.tasks.get(exited.task)
        if run is None or exited.worker not in run.workers:
            return []
        if exited.worker in run.through:
            del run.workers[exited.worker]
            return self._after_the_end(run)
        if not exited.expected:
            return []
        self._lose_worker(run, exited.worker, exited.at)
        return self._settle([exited.task])

    # --- what does not come back -------------------------------------------------------------------------------------

    def _refused(self, refused: CommandRefused) -> list[Message]:
        run = self.state.tasks.get(refused.task)
        if run is None or refused.worker not in run.workers or run.workers[refused.worker].phase != "starting":
            return []
        return [self._attempt_failed(run, Cure.RESTART, refused.worker, refused.reason)]

    def _timer(self, fired: TimerFired) -> list[Message]:
        kind, _, rest = fired.name.partition(".")
        task, _, worker = rest.partition(".")
        run = self.state.tasks.get(task)
        if run is None or run.state.ended:
            return []
        if kind == "start" and worker in run.workers and run.workers[worker].phase == "starting":
            return [self._attempt_failed(run, Cure.RESTART, worker, "its model was not built in time")]
        missing = [name for name in run.group if name not in run.joined and name in run.workers]
        if kind == "regroup" and missing:
            reason = f"{', '.join(missing)} did not join epoch {run.epoch} in time"
            return [self._attempt_failed(run, Cure.REGROUP, missing[0], reason)]
        return []

    def _attempt_failed(self, run: TaskRun, action: Cure, name: str, reason: str) -> AttemptFailed:
        place = run.workers[name].place
        return AttemptFailed(
            task=run.spec.name, action=action, reason=reason, node=place.node, slot=place.slot, worker=name
        )

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _settle(self, names: Iterable[str]) -> list[Message]:
        """Return what brings these tasks nearer to their targets, or to their end."""
        runs = [run for name in names if not (run := self.state.tasks[name]).state.ended]
        out = [message for run in runs if self._is_over(run) for message in self._finish(run)]
        return out + settle(self.state, [run.spec.name for run in runs if not run.state.ended])

    def _settle_all(self) -> list[Message]:
        return self._settle(self.state.tasks)

    def _moved(self, run: TaskRun, state: TaskState, reason: str, traceback: str = "") -> list[Message]:
        """Note a new state of the task, and say so."""
        if run.state.ended or (state is TaskState.WAITING and run.state is state):
            return []
        run.state = state
        return [
            TaskStateChanged(
                task=run.spec.name,
                state=state,
                epoch=run.epoch,
                members=members_of(self.state, run),
                reason=reason,
                traceback=traceback,
            )
        ]
