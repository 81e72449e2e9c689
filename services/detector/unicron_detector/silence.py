"""Hangs of programs without a session: none of their ranks shows any sign of life."""

from unicron.contracts.base import Message
from unicron.contracts.events import FailureDetected, WorkerStalled
from unicron.contracts.failures import DetectionMethod, FailureStatus, Severity
from unicron_detector.report import Reporter
from unicron_detector.state import SilentWorker, TaskRecord

WHERE = 300
"""Characters of a stack that a failure's reason holds; the fact behind it has all."""

NAMED = 8
"""Ranks whose stacks a reason holds."""

RUNS = " < _run_code (<frozen runpy>:"
"""Behind that, a stack shows only how its script was started."""

AWAITS = "await_membership ("
"""Where a worker without a membership waits: the transition service knows of it, and why there is none."""

WAITS = (
    AWAITS,
    "read (rendezvous.py:",  # for what the other ranks are to leave there
    "read (unicron/train/groups/rendezvous.py:",
    "torch/distributed/distributed_c10d.py:",
    "torch/distributed/rendezvous.py:",
    "torch/distributed/_functional_collectives.py:",
    "torch/autograd/graph.py:",  # a backward pass, in which gradients are reduced
)
"""Calls in which a rank waits for others."""


class SilentPrograms:
    """Finds them in the agents' reports of silent workers."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._state = reporter.state

    def record_silence(self, stalled: WorkerStalled) -> list[Message]:
        """Record a silent worker; report a hang when all workers of its task have been silent for the limit.

        Agents repeat the report while a worker stays silent. So its silence is known to have lasted until the last
        report, and no report is needed when it shows signs of life again.
        """
        task, books = self._reporter.task(stalled.task), self._reporter.books
        if task.closed:
            return []
        task.silent[stalled.worker] = SilentWorker(
            since=max(0.0, self._state.now - stalled.waited_s),
            at=self._state.now,
            stopped=not stalled.responsive,
            where=stalled.stacks[0].partition(" ")[2].partition(RUNS)[0] if stalled.stacks else "",
        )
        living = {name for name in books.watched_in_task(stalled.task) if not self._state.workers[name].finished}
        task.silent = {name: each for name, each in task.silent.items() if name in living}
        begun = max((each.since for each in task.silent.values()), default=0.0)
        known = min((each.at for each in task.silent.values()), default=0.0)
        if task.silent.keys() != living or self._state.awaits_start(stalled.task) or known - begun < stalled.limit_s:
            return []
        silent, task.silent = task.silent, {}
        return self._report_hang(stalled, task, silent, known - begun)

    def _report_hang(
        self, stalled: WorkerStalled, task: TaskRecord, silent: dict[str, SilentWorker], lasted_s: float
    ) -> list[Message]:
        """Report the ranks that block the others, where they are known, else the membership, which then restarts.

        A script that is healed in place hears of no new membership where it is, so all its ranks are replaced.
        """
        if all(AWAITS in each.where for each in silent.values()):
            return []
        workers = self._state.workers
        named = [name for name in sorted(silent, key=len) if silent[name].where or silent[name].stopped]
        stacks = [f"{name} on {workers[name].node} {_place(silent[name])}" for name in named[:NAMED]]
        what = f"all {len(silent)} workers of {stalled.task} have written nothing and waited"
        reason = "; ".join([f"{what} for {lasted_s:.2f} s, where {stalled.limit_s:.2f} s are allowed", *stacks])
        blamed = find_blocking_ranks(silent)
        if task.restarts and len(blamed) != 1:
            return self._report(Severity.SEV3, stalled, stalled.worker, reason, lasted_s)
        out: list[Message] = []
        for number, name in enumerate(blamed or sorted(silent)):
            where = f"{name} {_place(silent[name])}; {reason}" if blamed else reason
            out += self._report(Severity.SEV2, stalled, name, where, lasted_s, echo=number > 0)
        return out

    def _report(
        self, severity: Severity, stalled: WorkerStalled, name: str, reason: str, lasted_s: float, *, echo: bool = False
    ) -> list[Message]:
        worker = self._state.workers[name]
        failure = FailureDetected(
            severity=severity,
            method=DetectionMethod.ONLINE_STATISTICS,
            status=FailureStatus.TASK_HANG,
            task=stalled.task,
            node=worker.node,
            slot=worker.slot,
            worker=name,
            reason=reason,
            epoch=self._reporter.task(stalled.task).epoch,
        )
        return self._reporter.fail(failure, stalled.iteration, echo=echo, idle_s=lasted_s)


def find_blocking_ranks(silent: dict[str, SilentWorker]) -> list[str]:
    """Return the ranks that the others wait for: the stopped ones, else those that wait in no collective.

    A rank that waits on a GPU, in `loss.item()` say, is seen in no collective. So a rank is only named if it is alone
    in that, or others are seen to wait.
    """
    if stopped := sorted(name for name, each in silent.items() if each.stopped):
        return stopped
    outside = sorted(name for name, each in silent.items() if each.where and not _waits(each))
    return outside if any(map(_waits, silent.values())) else []


def _waits(silent: SilentWorker) -> bool:
    return any(call in silent.where for call in WAITS)


def _place(silent: SilentWorker) -> str:
    return "is stopped" if silent.stopped else f"is at {silent.where[:WHERE]}"
