"""What an agent tells Prometheus, beside what it says to others: its workers, its GPUs, and whether it keeps up."""

from collections import Counter
from collections.abc import Callable, Iterator

from unicron.contracts.base import Message
from unicron.contracts.events import NodeHeartbeat
from unicron.contracts.hardware import Gpu, GpusSampled
from unicron.metric_definitions import Sample
from unicron.service.metrics import Metrics
from unicron_agent.core import AgentCore
from unicron_agent.outbox import Outbox

GPU: dict[str, Callable[[Gpu], float | None]] = {
    "unicron_gpu_temperature_celsius": lambda gpu: gpu.temperature_c,
    "unicron_gpu_power_watts": lambda gpu: gpu.power_w,
    "unicron_gpu_memory_used_bytes": lambda gpu: gpu.memory_used,
    "unicron_gpu_throttled": lambda gpu: gpu.throttled,
    "unicron_gpu_ecc_corrected_total": lambda gpu: gpu.ecc_corrected,
    "unicron_gpu_ecc_uncorrected_total": lambda gpu: gpu.ecc_uncorrected,
    "unicron_gpu_rows_remapped_total": lambda gpu: gpu.rows_remapped,
    "unicron_gpu_pcie_replays_total": lambda gpu: gpu.pcie_replays,
    "unicron_gpu_nvlink_errors_total": lambda gpu: _sum(gpu.nvlink_replays, gpu.nvlink_recoveries, gpu.nvlink_crc),
}
"""What is told of each GPU, where its driver tells it."""


class Measured:
    """The metrics of an agent.

    Args:
        core: of it.
        outbox: of it.
        now: Unix seconds.
    """

    def __init__(self, core: AgentCore, outbox: Outbox, now: Callable[[], float]) -> None:
        self._core, self._outbox, self._now = core, outbox, now
        self._beat_at = 0.0
        self._gpus: list[Gpu] = []
        self.metrics = Metrics(core.node, self._read)

    def observe(self, message: Message) -> None:
        """Take note of what the agent's core says."""
        if isinstance(message, NodeHeartbeat):
            self._beat_at = self._now()
        elif isinstance(message, GpusSampled):
            self._gpus = message.gpus
        else:
            self.metrics.tell(message, message)

    def fetched(self, seconds: float) -> None:
        """Note how long it took to get a state for a worker here; of which task is not told, as no task ends here."""
        self.metrics.phase("fetch", "", seconds)

    def _read(self) -> Iterator[Sample]:
        node = self._core.node
        yield Sample("unicron_queue_depth", (node,), self._outbox.unpublished)
        yield Sample("unicron_agent_heartbeat_timestamp_seconds", (node,), self._beat_at)
        workers = self._core.workers.values()
        for task, count in Counter(worker.task for worker in workers).items():
            yield Sample("unicron_agent_workers", (node, task), count)
            highest = max(worker.iteration for worker in workers if worker.task == task)
            yield Sample("unicron_agent_iteration", (node, task), highest)
        for gpu in self._gpus:
            for name, reading in GPU.items():
                if (value := reading(gpu)) is not None:
                    yield Sample(name, (node, str(gpu.slot)), value)


def _sum(*counts: int | None) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None
