"""Turns faults that the kernel, GPU drivers and workers' output report into facts, without repeats. Pure."""

from collections.abc import Collection, Iterable

from unicron.contracts.base import Message
from unicron.contracts.hardware import FaultLogged, GpusSampled
from unicron_agent.effects import Out
from unicron_agent.stimuli import Logged, Sampled
from unicron_agent.workers.workers import LocalWorker

AGAIN_S = 5.0
"""Shortest time between two reports of the same fault of a GPU or worker; a driver may log it a thousand times."""


class HardwareReports:
    """Remembers which faults of a node were reported lately."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._reported_at: dict[tuple[str, str, int, str], float] = {}

    def report_new(self, stimulus: Logged | Sampled, workers: Collection[LocalWorker], now: float) -> Out:
        """Return the fact for a fault or a set of counters; nothing for a fault that was reported lately.

        Args:
            stimulus: fault or counters.
            workers: of this node.
            now: monotonic seconds.
        """
        if isinstance(stimulus, Sampled):
            return [GpusSampled(node=self._node, gpus=list(stimulus.gpus))]
        worker = _worker_concerned(stimulus, workers)
        if stimulus.author and worker is None:
            return []  # it is gone
        what = (stimulus.status, stimulus.author, stimulus.slot, worker.worker if worker else "")
        self._reported_at = {each: at for each, at in self._reported_at.items() if at > now - AGAIN_S}
        if what in self._reported_at:
            return []
        self._reported_at[what] = now
        fact: Message = FaultLogged(
            node=self._node,
            text=stimulus.text,
            slot=worker.slot if worker else stimulus.slot,
            task=worker.task if worker else "",
            worker=worker.worker if worker else "",
            printed=bool(stimulus.author),
        )
        return [fact]


def _worker_concerned(logged: Logged, workers: Iterable[LocalWorker]) -> LocalWorker | None:
    """Return the worker that wrote the line, or whose process it names, or else the one that has the GPU."""
    if logged.author:
        return next((worker for worker in workers if worker.worker == logged.author), None)
    living = [worker for worker in workers if worker.pid]
    named = (worker for worker in living if worker.pid == logged.pid)
    return next(named, None) or next((worker for worker in living if worker.slot == logged.slot), None)
