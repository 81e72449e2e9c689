"""The demo's report of each fault, worked out from the journal and the telemetry alone. Pure."""

from collections.abc import Sequence

from rich.console import Group
from rich.text import Text
from unicron_chaos.injection import Injection

from unicron.contracts.base import Message, Record
from unicron.contracts.events import FailureDetected, IterationFinished, NodeAdmitted, Regrouped
from unicron.observe.accounts.goodput import Goodput
from unicron.observe.incidents import Incidents, chain_of
from unicron_cli.views import plain_table

TOLERANCE = 1e-5
"""Largest difference of the parameters from those of the failure-free run, relative to the largest parameter."""


class FaultReport(Record, kw_only=True, frozen=True):
    """How one fault was healed. Seconds count from the fault; None where it did not come to that.

    Attributes:
        severity: of the failure as it was detected; None for a node that comes back.
        detected_s: until FailureDetected (for a node that comes back, until it was admitted).
        resumed_s: until all survivors of the tasks that were hit computed again.
        first_iteration_s: until each of those tasks had finished an iteration.
        restored_s: until each of them had all the workers that the plan gives it.
        iterations_redone: iterations that were finished more than once.
        microbatches_kept: microbatches of the interrupted iterations that were not computed again.
        microbatches_recomputed: microbatches that others took over from the lost ranks.
    """

    kind: str
    target: str
    severity: int | None = None
    detected_s: float | None = None
    resumed_s: float | None = None
    first_iteration_s: float | None = None
    restored_s: float | None = None
    iterations_redone: int = 0
    microbatches_kept: int = 0
    microbatches_recomputed: int = 0


class TaskReport(Record, kw_only=True, frozen=True):
    """How one task ended.

    Attributes:
        state: as the registry has it.
        iterations: finished ones, of those in the task file.
        max_rel_diff: over tensors, the largest |a-b| over the largest |b|, where b is the failure-free run.
    """

    name: str
    weight: float
    state: str
    iterations: int
    first_loss: float | None
    final_loss: float | None
    max_rel_diff: float | None


class DemoReport(Record, kw_only=True, frozen=True):
    """The demo's result.

    Attributes:
        ok: every fault was detected and healed, every task finished all its iterations, each of them once, and no
            parameters differ by more than `TOLERANCE`.
        seconds: the whole demo.
    """

    ok: bool
    faults: list[FaultReport]
    tasks: list[TaskReport]
    seconds: float
    machine: str


def fault_reports(
    injections: Sequence[Injection], journal: Sequence[Message], iterations: Sequence[IterationFinished]
) -> list[FaultReport]:
    """Work out one report an injection; each one's time ends where the next begins.

    Args:
        injections: in their order.
        journal: all facts and commands, in order.
        iterations: all finished iterations, in any order.
    """
    iterations = sorted(iterations, key=lambda message: message.at)  # agents held back what the bus could not take
    accounts = Goodput()
    for message in journal:
        accounts.handle(message)
    ends = [injection.at for injection in injections[1:]] + [float("inf")]
    return [
        _report(
            injection,
            [message for message in journal if message.at >= injection.at],
            [message for message in iterations if message.at >= injection.at],
            accounts.incidents,
            _redone(iterations, injection.at, end),
        )
        for injection, end in zip(injections, ends, strict=True)
    ]


def _report(
    injection: Injection,
    journal: Sequence[Message],
    iterations: Sequence[IterationFinished],
    incidents: Incidents,
    redone: int,
) -> FaultReport:
    cause = next((message for message in journal if _is_cause(injection, message)), None)
    if cause is None:
        return FaultReport(kind=injection.fault, target=injection.target, iterations_redone=redone)
    chain = [message for message in journal if chain_of(message) == chain_of(cause)]
    joined = [message for message in chain if isinstance(message, Regrouped)]
    first: dict[str, int] = {}
    for message in joined:
        first.setdefault(message.task, message.epoch)
    reunion = [message for message in joined if message.epoch == first[message.task]]
    incident = incidents.known.get(chain_of(cause))
    restored = incident.recovered_at() if incident else None
    after = [
        next((done.at for done in iterations if done.task == task and done.at >= cause.at), None) for task in first
    ]
    leaders = {message.task: message for message in reunion}
    return FaultReport(
        kind=injection.fault,
        target=injection.target,
        severity=int(cause.severity) if isinstance(cause, FailureDetected) else None,
        detected_s=cause.at - injection.at,
        resumed_s=_last([message.at for message in reunion], injection.at),
        first_iteration_s=_last(after, injection.at),
        restored_s=None if restored is None else restored - injection.at,
        iterations_redone=redone,
        microbatches_kept=sum(message.kept for message in leaders.values()),
        microbatches_recomputed=sum(message.recomputed for message in leaders.values()),
    )


def _is_cause(injection: Injection, message: Message) -> bool:
    if injection.fault == "restart-node":
        return isinstance(message, NodeAdmitted) and message.node == injection.node
    if not isinstance(message, FailureDetected):
        return False
    return message.worker == injection.worker if injection.worker else message.node == injection.node


def _redone(iterations: Sequence[IterationFinished], start: float, end: float) -> int:
    """Count iterations finished between `start` and `end` that had been finished before.

    One and the same message may come twice, which is not done twice.
    """
    finished: dict[tuple[str, int], str] = {}
    redone = 0
    for done in iterations:
        first = finished.setdefault((done.task, done.iteration), done.id)
        redone += first != done.id and start <= done.at < end
    return redone


def _last(times: Sequence[float | None], start: float) -> float | None:
    known = [time for time in times if time is not None]
    return max(known) - start if known and len(known) == len(times) else None


def is_ok(faults: Sequence[FaultReport], tasks: Sequence[TaskReport], wanted: dict[str, int]) -> bool:
    """Return whether the demo showed what it promises; `wanted` holds each task's iterations."""
    healed = all(fault.detected_s is not None and fault.first_iteration_s is not None for fault in faults)
    finished = all(task.state == "finished" and task.iterations == wanted[task.name] for task in tasks)
    same = all(task.max_rel_diff is not None and task.max_rel_diff <= TOLERANCE for task in tasks)
    once = all(fault.iterations_redone == 0 for fault in faults)
    return healed and finished and same and once


def report_view(report: DemoReport) -> Group:
    """Return the report as tables."""
    times, counts = ("detected", "resumed", "iterated", "restored"), ("redone", "kept", "taken")
    faults = plain_table("fault", "target", "sev", *times, *counts)
    faults.collapse_padding = True  # so that it fits 80 columns
    for column in faults.columns[2:]:
        column.justify = "right"
    for fault in report.faults:
        faults.add_row(
            fault.kind,
            fault.target,
            str(fault.severity or "-"),
            *(
                _seconds(value)
                for value in (fault.detected_s, fault.resumed_s, fault.first_iteration_s, fault.restored_s)
            ),
            str(fault.iterations_redone),
            str(fault.microbatches_kept),
            str(fault.microbatches_recomputed),
        )
    tasks = plain_table("task", "state", "weight", "iterations", "first loss", "final loss", "difference")
    for column in tasks.columns[2:]:
        column.justify = "right"
    for task in report.tasks:
        difference = "-" if task.max_rel_diff is None else f"{task.max_rel_diff:.1e}"
        losses = ["-" if loss is None else f"{loss:.3f}" for loss in (task.first_loss, task.final_loss)]
        tasks.add_row(task.name, task.state, f"{task.weight:g}", str(task.iterations), *losses, difference)
    verdict = ("ok", "green") if report.ok else ("not ok", "red")
    notes = (
        "times in seconds after the fault; restored: all workers were back",
        "redone: iterations computed twice; kept, and taken by others: microbatches",
        "difference: the largest to the parameters of a run without faults",
    )
    first, second, third = (Text(line, "dim") for line in notes)
    end = Text.assemble(verdict, f" after {report.seconds:.0f} s on {report.machine}")
    return Group(faults, first, second, Text(), tasks, third, Text(), end)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
