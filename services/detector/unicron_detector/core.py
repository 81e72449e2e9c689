"""The detector's decisions, pure: facts in, failures out (paper section 4).

Five methods find failures: node health (a connection or the heartbeats of a node end), process supervision (a process
ends), exception propagation (a process says why it ends), online statistics (a process makes no progress), and device
health (the kernel or a GPU's driver reports a fault).
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
    WorkerGrows,
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
from unicron_detector.doubts import find_contradiction
from unicron_detector.hardware import HardwareFaults
from unicron_detector.memberships import Memberships
from unicron_detector.nodes import TICK_S, Nodes
from unicron_detector.processes import Processes
from unicron_detector.report import Reporter
from unicron_detector.silence import SilentPrograms
from unicron_detector.state import DetectorLimits, DetectorState
from unicron_detector.timers import DetectorTimer, TimerKind
from unicron_detector.validation import inconsistencies


class DetectorCore(Core):
    """Turns facts into failures.

    Args:
        state: what an earlier instance remembered, None at the very first start.
        rules: what exceptions say about their cause.
        limits: how patient to be.
    """

    doubts = staticmethod(find_contradiction)

    def __init__(self, state: DetectorState | None, rules: Rules, limits: DetectorLimits | None = None) -> None:
        self.state: DetectorState = state or DetectorState()
        self._reporter = Reporter(self.state, limits or DetectorLimits())
        self._processes = Processes(self._reporter, rules)
        self._silence = SilentPrograms(self._reporter)
        self._memberships = Memberships(self._reporter)
        self._hardware = HardwareFaults(self._reporter, rules)
        self._nodes = Nodes(self._reporter, self._processes, self._memberships)
        self.handlers: Handlers = {
            Started: self._restart_waits,
            BusReconnected: self._restart_waits,
            TimerFired: self._timer_fired,
            ConnectionLost: self._nodes.suspect_disconnected,
            TelemetryDropped: self._restart_silence,
            NodeAdmitted: self._nodes.admit,
            NodePaced: self._nodes.record_interval,
            NodeGone: self._nodes.forget_unadmitted,
            NodeLeft: self._nodes.forget,
            NodeHeartbeat: self._nodes.record_heartbeat,
            WorkerReady: self._processes.record_ready,
            WorkerFinished: self._processes.record_finished,
            WorkerExited: self._processes.judge_exit,
            WorkerRaised: self._processes.classify_exception,
            WorkerStalled: self._stalled,
            WorkerAsleep: self._processes.record_sleep,
            WorkerGrows: self._processes.replace_growing,
            WorkerAway: self._memberships.record_away,
            CollectiveFailed: self._memberships.hold_broken,
            StateDiverged: self._memberships.regroup_diverged,
            ComputeTimed: lambda _: [],  # the statistics beside this overhear it
            FaultLogged: self._hardware.judge_fault,
            StartWorker: self._processes.expect,
            Regroup: self._memberships.record_order,
            Regrouped: self._memberships.record_regroup,
            IterationFinished: self._memberships.record_iteration,
            TaskStateChanged: self._memberships.follow_state,
            TaskSubmitted: self._memberships.reset_task,
            AttemptFailed: self._attempt_failed,
        }

    def is_credible(self, message: Message) -> bool:
        """Return whether the worker or node of a telemetry message is or was where the message says."""
        if isinstance(message, ComputeTimed):
            known = (self.state.workers.get(each.worker) for each in message.workers)
            place = (message.task, message.node)
            return all(worker is not None and (worker.task, worker.node) == place for worker in known)
        return not isinstance(message, WorkerFact) or self._reporter.is_about_known_worker(message)

    def handle(self, message: Message) -> list[Message]:
        """Apply one message, and return the messages that follow from it; reports of unknown workers are ignored."""
        if isinstance(message, WorkerFact):
            if not self.is_credible(message):
                return []
            self._reporter.worker(message.worker, message.task, message.node, message.slot)
        return super().handle(message)

    def validate(self) -> list[str]:
        """Return what contradicts itself in the state, in words."""
        return list(inconsistencies(self.state, self._reporter.books))

    # --- time --------------------------------------------------------------------------------------------------------

    def _restart_waits(self, message: Started | BusReconnected) -> list[Message]:
        """Restart all waits: silence while this service was away, or stood still, says nothing about a node."""
        self.state.now = message.at
        self._nodes.restart_silence()
        return [
            SetTimer(name=str(DetectorTimer(TimerKind.TICK)), after_s=TICK_S),
            *self._nodes.restart_grace(),
            *self._memberships.restart_holds(),
        ]

    def _restart_silence(self, _: TelemetryDropped) -> list[Message]:
        """Restart all counts of silence, as telemetry was dropped: nodes that seem silent may not have been."""
        self._nodes.restart_silence()
        return []

    def _timer_fired(self, fired: TimerFired) -> list[Message]:
        self.state.now = fired.at
        timer = DetectorTimer.read(fired.name)
        out: list[Message] = [SetTimer(name=fired.name, after_s=TICK_S)] if timer.kind is TimerKind.TICK else []
        if timer.kind is TimerKind.TICK:
            self._reporter.forget()
            return out + self._nodes.check_silence()
        ended = self._nodes.expire_grace if timer.kind is TimerKind.GRACE else self._memberships.expire_hold
        return out + ended(timer.about, fired.name)

    # --- workers -----------------------------------------------------------------------------------------------------

    def _stalled(self, stalled: WorkerStalled) -> list[Message]:
        if stalled.silent:
            return self._silence.record_silence(stalled)
        if stalled.responsive and stalled.phase == WorkerPhase.REDUCE:
            return self._memberships.hold_waiting(stalled)
        return self._processes.report_asleep(stalled) if stalled.asleep else self._processes.report_hang(stalled)

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
        if restart and self._reporter.books.is_closed(failure.worker):
            failure = replace(failure, worker="", slot=-1)  # this is about the node; the process was reported before
        else:
            self._reporter.rewatch(failure.worker)
        return self._reporter.fail(failure)
