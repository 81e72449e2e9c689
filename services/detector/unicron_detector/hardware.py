"""Device health: reports of a node's kernel, of the drivers of its GPUs and of its workers (section 4, table 1)."""

from msgspec.structs import replace

from unicron.contracts.base import Message
from unicron.contracts.events import FailureDetected
from unicron.contracts.failures import DetectionMethod, Severity
from unicron.contracts.hardware import FaultLogged
from unicron.rules import LONGEST_LINE, Rules
from unicron_detector.report import Reporter
from unicron_detector.state import LoggedLine


class HardwareFaults:
    """Classifies the hardware faults that nodes report."""

    def __init__(self, reporter: Reporter, rules: Rules) -> None:
        self._reporter = reporter
        self._state = reporter.state
        self._rules = rules

    def judge_fault(self, fault: FaultLogged) -> list[Message]:
        """Fail the node or the worker that a fault concerns, or remember the fault as evidence."""
        if fault.printed:
            return self._record_line(fault)
        ruling = self._rules.rule_for_hardware(fault.text[:LONGEST_LINE])
        if ruling is None or fault.node not in self._state.nodes:
            return []
        verdict = ruling.verdict
        if verdict.gpu is not None and fault.slot >= 0:
            verdict = replace(verdict, severity=verdict.gpu)
        failure = FailureDetected(
            severity=verdict.severity,
            method=DetectionMethod.DEVICE_HEALTH,
            status=verdict.status,
            node=fault.node,
            slot=fault.slot,
            reason=fault.text,
        )
        if verdict.severity is Severity.SEV1:
            return self._reporter.report(failure)
        worker = self._state.workers.get(fault.worker)
        if fault.worker and (worker is None or (worker.task, worker.node) != (fault.task, fault.node)):
            return []  # a node speaks of its own
        if verdict.severity is Severity.SEV2 and worker is not None:
            failure = replace(failure, task=worker.task, worker=fault.worker, slot=worker.slot)
            return self._reporter.fail(failure, echo=verdict.echo)
        self._state.said[fault.node] = LoggedLine(text=fault.text, at=self._state.now)
        return []

    def _record_line(self, fault: FaultLogged) -> list[Message]:
        """Remember the first matching line that a worker wrote; it explains a later failure, and is none itself."""
        if self._rules.rule_for_output(fault.text[:LONGEST_LINE]) is not None and self._reporter.is_about_known_worker(
            fault
        ):
            self._reporter.worker(fault.worker, fault.task, fault.node, fault.slot)
            self._state.wrote.setdefault(fault.worker, LoggedLine(text=fault.text, at=self._state.now))
        return []
