"""What is told to others of what the kernel, the GPUs' drivers and workers tell: once, and about whom. Pure."""

from collections.abc import Collection, Iterable

from unicron.contracts.base import Message
from unicron.contracts.hardware import FaultLogged, GpusSampled
from unicron_agent.stimuli import Logged, Out, Sampled
from unicron_agent.workers.workers import Worker

AGAIN_S = 5.0
"""The same fault of the same GPU or worker is told so often at most; a driver may log one a thousand times."""


class Hardware:
    """What was told of late, of the node of that name."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._told: dict[tuple[str, str, int, str], float] = {}

    def hear(self, stimulus: Logged | Sampled, workers: Collection[Worker], now: float) -> Out:
        """Return the fact that follows, if it is news.

        Args:
            stimulus: what was told here.
            workers: of this node.
            now: monotonic seconds.
        """
        if isinstance(stimulus, Sampled):
            return [GpusSampled(node=self._node, gpus=list(stimulus.gpus))]
        worker = _concerned(stimulus, workers)
        if stimulus.author and worker is None:
            return []  # it is gone
        what = (stimulus.status, stimulus.author, stimulus.slot, worker.worker if worker else "")
        self._told = {each: at for each, at in self._told.items() if at > now - AGAIN_S}
        if what in self._told:
            return []
        self._told[what] = now
        fact: Message = FaultLogged(
            node=self._node,
            text=stimulus.text,
            slot=worker.slot if worker else stimulus.slot,
            task=worker.task if worker else "",
            worker=worker.worker if worker else "",
            printed=bool(stimulus.author),
        )
        return [fact]


def _concerned(logged: Logged, workers: Iterable[Worker]) -> Worker | None:
    """Return the worker that wrote it, or whose process is named, or else the one that has the GPU."""
    if logged.author:
        return next((worker for worker in workers if worker.worker == logged.author), None)
    living = [worker for worker in workers if worker.pid]
    named = (worker for worker in living if worker.pid == logged.pid)
    return next(named, None) or next((worker for worker in living if worker.slot == logged.slot), None)
