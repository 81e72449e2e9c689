"""The metrics of an agent for Prometheus: its workers, its GPUs, and its backlog."""

from collections import Counter
from collections.abc import Callable, Iterator

from unicron.contracts.base import Message
from unicron.contracts.events import NodeHeartbeat
from unicron.contracts.hardware import Gpu, GpusSampled
from unicron.metric_definitions import MetricSample
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
"""Metrics of each GPU; left out where the driver does not know the value."""


class AgentMetrics:
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
        """Record a message of the agent's core."""
        if isinstance(message, NodeHeartbeat):
            self._beat_at = self._now()
        elif isinstance(message, GpusSampled):
            self._gpus = message.gpus
        else:
            self.metrics.count_sent(message, message)

    def record_fetch(self, seconds: float) -> None:
        """Record how long fetching a state took; without the task, whose series no agent would know to end."""
        self.metrics.observe_phase("fetch", "", seconds)

    def _read(self) -> Iterator[MetricSample]:
        node = self._core.node
        yield MetricSample("unicron_queue_depth", (node,), self._outbox.unpublished)
        yield MetricSample("unicron_agent_heartbeat_timestamp_seconds", (node,), self._beat_at)
        workers = self._core.workers.values()
        for task, count in Counter(worker.task for worker in workers).items():
            yield MetricSample("unicron_agent_workers", (node, task), count)
            highest = max(worker.iteration for worker in workers if worker.task == task)
            yield MetricSample("unicron_agent_iteration", (node, task), highest)
        for gpu in self._gpus:
            for name, reading in GPU.items():
                if (value := reading(gpu)) is not None:
                    yield MetricSample(name, (node, str(gpu.slot)), value)


def _sum(*counts: int | None) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None
