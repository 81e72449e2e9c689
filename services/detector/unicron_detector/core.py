"""The detector's decisions, pure: facts in, failures out (paper section 4).

Five methods find failures: node health (a connection or the heartbeats of a node end), process supervision (a process
ends), exception propagation (a process says why it ends), online statistics (a process makes no progress), and device
health (the kernel or a GPU's driver tells of a fault).
"""

from msgspec.structs import replace

from unicron.contracts.base import (
    BusReconnected,
    ConnectionLost,
    Message,
    SetTimer,
    Started,
    TelemetryDropped,
    TimerFired,
)
from unicron.contracts.commands import Regroup, StartWorker
from unicron.contracts.events import (
    Alert,
    AttemptFailed,
    CollectiveFailed,
    FailureDetected,
    IterationFinished,
    NodeAdmitted,
    NodeGone,
    NodeHeartbeat,
    NodeLeft,
    NodePaced,
    Regrouped,
    StateDiverged,
    TaskStateChanged,
    TaskSubmitted,
    WorkerAsleep,
    WorkerAway,
    WorkerExited,
    WorkerFact,
    WorkerFinished,
    WorkerRaised,
    WorkerReady,
    WorkerStalled,
)
from unicron.contracts.failures import Cure, DetectionMethod, FailureStatus, Severity
from unicron.contracts.hardware import FaultLogged
from unicron.contracts.slowdowns import ComputeTimed
from unicron.contracts.tasks import WorkerPhase
from unicron.rules import Rules
from unicron.service.core import Core, Handlers
from unicron_detector.doubts import doubt
from unicron_detector.hardware import Hardware
from unicron_detector.memberships import Memberships
from unicron_detector.nodes import TICK_S, Nodes
from unicron_detector.processes import Processes
from unicron_detector.report import Reporter
from unicron_detector.silence import Silence
from unicron_detector.state import Limits, State
from unicron_detector.timers import Timer, TimerKind
from unicron_detector.validation import inconsistencies

STALL_S = 2.0
"""A timer this much later than the one before it means that the detector itself was held up."""


class DetectorCore(Core):
    """Turns facts into failures.

    Args:
        state: what an earlier instance remembered, None at the very first start.
        rules: what exceptions say about their cause.
        limits: how patient to be.
    """

    doubts = staticmethod(doubt)

    def __init__(self, state: State | None, rules: Rules, limits: Limits | None = None) -> None:
        self.state: State = state or State()
        self._reporter = Reporter(self.state, limits or Limits())
        self._processes = Processes(self._reporter, rules)
        self._silence = Silence(self._reporter)
        self._memberships = Memberships(self._reporter)
        self._hardware = Hardware(self._reporter, rules)
        self._nodes = Nodes(self._reporter, self._processes, self._memberships)
        self.handlers: Handlers = {
            Started: self._renew,
            BusReconnected: self._renew,
            TimerFired: self._fired,
            ConnectionLost: self._nodes.connection_lost,
            TelemetryDropped: self._dropped,
            NodeAdmitted: self._nodes.admitted,
            NodePaced: self._nodes.paced,
            NodeGone: self._nodes.gone,
            NodeLeft: self._nodes.left,
            NodeHeartbeat: self._nodes.heard,
            WorkerReady: self._processes.ready,
            WorkerFinished: self._processes.finished,
            WorkerExited: self._processes.exited,
            WorkerRaised: self._processes.raised,
            WorkerStalled: self._stalled,
            WorkerAsleep: self._processes.sleeps,
            WorkerAway: self._memberships.away,
            CollectiveFailed: self._memberships.broke,
            StateDiverged: self._memberships.diverged,
            ComputeTimed: lambda _: [],  # the statistics beside this overhear it
            FaultLogged: self._hardware.logged,
            StartWorker: self._processes.ordered,
            Regroup: self._memberships.ordered,
            Regrouped: self._memberships.regrouped,
            IterationFinished: self._memberships.iterated,
            TaskStateChanged: self._memberships.changed,
            TaskSubmitted: self._memberships.submitted,
            AttemptFailed: self._attempt_failed,
        }

    def believes(self, message: Message) -> bool:
        """Return whether what a message tells of is known to be, or to have been, where it says."""
        if isinstance(message, ComputeTimed):
            known = (self.state.workers.get(each.worker) for each in message.workers)
            place = (message.task, message.node)
            return all(worker is not None and (worker.task, worker.node) == place for worker in known)
        return not isinstance(message, WorkerFact) or self._reporter.concerns(message)

    def handle(self, message: Message) -> list[Message]:
        """Take one message in; return what follows from it. All has been said of a worker that is not known."""
        if isinstance(message, WorkerFact):
            if not self.believes(message):
                return []
            self._reporter.worker(message.worker, message.task, message.node, message.slot)
        return super().handle(message)

    def validate(self) -> list[str]:
        """Return what contradicts itself in the state, in words."""
        return list(inconsistencies(self.state, self._reporter.books))

    # --- time --------------------------------------------------------------------------------------------------------

    def _renew(self, message: Started | BusReconnected) -> list[Message]:
        """Start all waits anew: silence while this service was away says nothing about a node."""
        self.state.now = message.at
        self._nodes.forgive()
        return [
            SetTimer(name=str(Timer(TimerKind.TICK)), after_s=TICK_S),
            *self._nodes.renew(),
            *self._memberships.renew(),
        ]

    def _dropped(self, _: TelemetryDropped) -> list[Message]:
        """Count all silence from now on: whoever seems silent may have spoken."""
        self._nodes.forgive()
        return []

    def _fired(self, fired: TimerFired) -> list[Message]:
        held_up = fired.at - self.state.now > STALL_S
        self.state.now = fired.at
        timer = Timer.read(fired.name)
        out: list[Message] = [SetTimer(name=fired.name, after_s=TICK_S)] if timer.kind is TimerKind.TICK else []
        if held_up:  # facts of the time that it missed may still be on their way here
            out += [*self._nodes.renew(), *self._memberships.renew()]
        if timer.kind is TimerKind.TICK:
            self._reporter.forget()
            return out + self._nodes.tick()  # however long the stall was, it counts as one tick of silence
        ended = self._nodes.grace_ended if timer.kind is TimerKind.GRACE else self._memberships.hold_ended
        return out + ended(timer.about, fired.name)

    # --- workers -----------------------------------------------------------------------------------------------------

    def _stalled(self, stalled: WorkerStalled) -> list[Message]:
        if stalled.silent:
            return self._silence.told(stalled)
        if stalled.responsive and stalled.phase == WorkerPhase.REDUCE:
            return self._memberships.waits(stalled)
        return self._processes.slept(stalled) if stalled.asleep else self._processes.hangs(stalled)

    def _attempt_failed(self, failed: AttemptFailed) -> list[Message]:
        """Report the failure that the attempt was to cure again, one severity higher."""
        task = self._reporter.task(failed.task)
        if task.closed:
            return []
        restart = failed.action == Cure.RESTART
        last = task.last or FailureDetected(
            severity=Severity.SEV3,
            method=DetectionMethod.ONLINE_STATISTICS,
            status=FailureStatus.TASK_HANG,
            task=failed.task,
        )
        failure = replace(
            last,
            severity=Severity.SEV1 if restart else Severity.SEV2,
            escalated=Severity.SEV2 if restart else Severity.SEV3,
            node=failed.node or last.node,
            slot=failed.slot if failed.node else last.slot,
            worker=failed.worker or ("" if failed.node else last.worker),
            reason=f"{failed.action} failed: {failed.reason}",
            attempt=1,
            epoch=-1,
        )
        if not (failure.node if restart else failure.worker):
            return [Alert(text=f"task {failed.task}: {failure.reason}; on whom to act is not known", task=failed.task)]
        if restart and self._reporter.books.gone(failure.worker):
            failure = replace(failure, worker="", slot=-1)  # this is about the node; the process was reported before
        else:
            self._reporter.expect(failure.worker)
        return self._reporter.fail(failure)
