"""The slots of this node: its GPUs where NVML or AMD's programs find some, else CPU slots as the setting says."""

import contextlib
import logging
import threading

import pynvml

from unicron.contracts.tasks import Slot
from unicron.errors import InvalidInputError
from unicron_agent.hardware.amd_smi import AmdSmi, NoAnswerError

log = logging.getLogger(__name__)


def find_slots(cpu_slots: int) -> list[Slot]:
    """Return one slot a GPU, or `cpu_slots` CPU slots where there is no GPU.

    Raises:
        InvalidInputError: there is neither, or the GPUs are split up.
    """
    gpus = _gpu_uuids() or amd_devices()
    if gpus:
        return [Slot(index=index, kind="gpu", device=uuid) for index, uuid in enumerate(gpus)]
    if cpu_slots < 1:
        raise InvalidInputError(
            f"slots {cpu_slots}: neither NVML nor amd-smi finds a GPU on this node; give it CPU slots with --slots N "
            "or UNICRON_SLOTS"
        )
    return [Slot(index=index) for index in range(cpu_slots)]


def amd_devices() -> list[str]:
    """Return the names that HIP has for AMD's GPUs of this node.

    Raises:
        InvalidInputError: several are parts of one: they share its name, so a worker can't be given one of them.
    """
    try:
        readings = AmdSmi(threading.Event()).read()
    except NoAnswerError as error:
        log.warning("this node's GPUs from AMD, if it has any, are no slots: %s", error)
        return []
    found = [reading.device for reading in readings if reading.device]
    if len(found) < len(readings):
        log.warning(
            "%d GPUs of this node have no serial number, so HIP has no name for them", len(readings) - len(found)
        )
    if twice := next((device for device in found if found.count(device) > 1), None):
        raise InvalidInputError(
            f"this node's GPU {twice} is split up, and workers can only have whole ones: see `amd-smi partition`, and "
            "join it with `amd-smi set --compute-partition SPX`"
        )
    return found


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
