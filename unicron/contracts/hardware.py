"""Reports of a node's kernel and of the drivers of its GPUs."""

from typing import Annotated

from unicron.contracts.base import AgentMessage, Record
from unicron.contracts.ranges import Amount, Count, Few, Label, Name, Number, Size
from unicron.contracts.sentences import after

# --- from agents -----------------------------------------------------------------------------------------------------


class FaultLogged(AgentMessage, kw_only=True, frozen=True):
    """The kernel of a node, the driver of a GPU or a worker reported a fault of the machine.

    Attributes:
        text: the report, one line.
        slot: whose GPU it is about, -1 where it is about none of them, or that is not known.
        task, worker: whom it is about: the worker whose process it names, or the one in that slot; empty for nobody.
        printed: that worker wrote it. Anybody's script may write anything, so it only explains what fails.
    """

    text: Label
    slot: Number = -1
    task: Name = ""
    worker: Name = ""
    printed: bool = False

    def __str__(self) -> str:
        return (
            f"{self.worker} on {self.node} wrote: {self.text}"
            if self.printed
            else f"{self.node} logged{after(' of ', self.worker)}: {self.text}"
        )


class Gpu(Record, kw_only=True, frozen=True):
    """The counters of a GPU's driver. None stands for one that this GPU, or its driver, does not have.

    Attributes:
        slot: that it is.
        temperature_c: degrees Celsius.
        power_w: watts.
        memory_used, memory_total: bytes.
        throttled: why its clock is lower than it could be, as the bits of NVML.
        clock_changes: how often its clock changed since the agent was started.
        ecc_corrected, ecc_uncorrected: errors of its memory since the driver was loaded.
        pages_retired_single, pages_retired_double: pages of its memory that are used no more, after several errors of a
            single bit or one of two; newer GPUs remap rows instead.
        rows_remapped: rows of its memory that were replaced after uncorrectable errors.
        remap_pending: a row is to be replaced when the GPU is reset.
        remap_failed: a row could not be.
        pcie_replays: packets that had to be sent again.
        nvlink_replays, nvlink_recoveries, nvlink_crc: errors of all its links: what was sent again, links that were set
            up again, wrong checksums.
        nvlink_grew: there are more of them than in the sample before.
    """

    slot: Number
    temperature_c: Count | None = None
    power_w: Amount | None = None
    memory_used: Size | None = None
    throttled: Size | None = None
    clock_changes: Count | None = None
    ecc_corrected: Size | None = None
    ecc_uncorrected: Size | None = None
    pages_retired_single: Count | None = None
    pages_retired_double: Count | None = None
    rows_remapped: Count | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    pcie_replays: Size | None = None
    nvlink_replays: Size | None = None
    nvlink_recoveries: Size | None = None
    nvlink_crc: Size | None = None
    nvlink_grew: bool | None = None
    memory_total: Size | None = None


# --- telemetry: core NATS, may be lost -------------------------------------------------------------------------------


class GpusSampled(AgentMessage, kw_only=True, frozen=True):
    """The counters of a node's GPUs, every few seconds; telemetry.

    Attributes:
        gpus: those that answer.
    """

    gpus: Annotated[list[Gpu], Few]
