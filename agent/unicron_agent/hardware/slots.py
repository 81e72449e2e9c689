"""The slots of this node: its GPUs where NVML finds some, else as many CPU slots as the setting gives."""

import contextlib

import pynvml

from unicron.contracts.tasks import Slot
from unicron.errors import InvalidInputError


def find_slots(cpu_slots: int) -> list[Slot]:
    """Return one slot a GPU, or `cpu_slots` CPU slots where there is no GPU.

    Raises:
        InvalidInputError: there is neither.
    """
    gpus = _gpu_uuids()
    if gpus:
        return [Slot(index=index, kind="gpu", device=uuid) for index, uuid in enumerate(gpus)]
    if cpu_slots < 1:
        raise InvalidInputError(
            f"slots {cpu_slots}: NVML finds no GPU on this node; give it CPU slots with --slots N or UNICRON_SLOTS"
        )
    return [Slot(index=index) for index in range(cpu_slots)]


def _gpu_uuids() -> list[str]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver: a CPU node
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
