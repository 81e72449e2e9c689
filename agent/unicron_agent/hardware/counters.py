"""Reads NVML's counters of a GPU into a record; a value that is missing or out of range is None."""

from collections.abc import Callable
from typing import Any

import pynvml

from unicron.contracts.hardware import Gpu
from unicron.contracts.ranges import MOST_NUMBER, MOST_WHOLE

FIELDS = (
    pynvml.NVML_FI_DEV_RETIRED_SBE,
    pynvml.NVML_FI_DEV_RETIRED_DBE,
    pynvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL,
    pynvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL,
    pynvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
    pynvml.NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL,
)
"""Asked for in one call; those of NVLink are sums over all links."""

MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""The member with the value of a field, by its type (nvmlValueType_t)."""


def read_gpu(slot: int, handle: Any, clock_changes: int | None, before: Gpu | None) -> Gpu:
    """Return what a GPU counts now.

    Args:
        slot: of the GPU.
        handle: of NVML.
        clock_changes: number of clock events so far.
        before: the reading before this one.

    Raises:
        pynvml.NVMLError: the GPU is lost, or the driver does not answer.
    """
    corrected, uncorrected = pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    volatile = pynvml.NVML_VOLATILE_ECC
    power_mw = _ask_nvml(pynvml.nvmlDeviceGetPowerUsage, handle)
    memory = _ask_nvml(pynvml.nvmlDeviceGetMemoryInfo, handle)
    temperature = _ask_nvml(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU)
    _, rows, pending, failed = _ask_nvml(pynvml.nvmlDeviceGetRemappedRows, handle) or (None,) * 4
    fields = _ask_nvml(pynvml.nvmlDeviceGetFieldValues, handle, list(FIELDS)) or ()
    single, double, replays, recoveries, flits, data = [_value(each) for each in fields] or [None] * len(FIELDS)
    links = (replays, recoveries, _sum(flits, data))
    return Gpu(
        slot=slot,
        temperature_c=in_range(temperature, MOST_NUMBER),
        power_w=None if power_mw is None else power_mw / 1000,
        memory_used=None if memory is None else in_range(memory.used),
        memory_total=None if memory is None else in_range(memory.total),
        throttled=in_range(_ask_nvml(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)),
        clock_changes=clock_changes,
        ecc_corrected=in_range(_ask_nvml(pynvml.nvmlDeviceGetTotalEccErrors, handle, corrected, volatile)),
        ecc_uncorrected=in_range(_ask_nvml(pynvml.nvmlDeviceGetTotalEccErrors, handle, uncorrected, volatile)),
        pages_retired_single=in_range(single, MOST_NUMBER),
        pages_retired_double=in_range(double, MOST_NUMBER),
        rows_remapped=in_range(rows, MOST_NUMBER),
        remap_pending=None if pending is None else bool(pending),
        remap_failed=None if failed is None else bool(failed),
        pcie_replays=in_range(_ask_nvml(pynvml.nvmlDeviceGetPcieReplayCounter, handle)),
        nvlink_replays=replays,
        nvlink_recoveries=recoveries,
        nvlink_crc=links[2],
        nvlink_grew=grew(links, (before.nvlink_replays, before.nvlink_recoveries, before.nvlink_crc) if before else ()),
    )


def grew(now: tuple[int | None, ...], before: tuple[int | None, ...]) -> bool | None:
    """Return whether one of some counters is higher than before, None where nothing can be compared.

    A counter that is lower began anew, with its driver.
    """
    pairs = [(new, old) for new, old in zip(now, before, strict=False) if new is not None and old is not None]
    return any(new > old for new, old in pairs) if pairs else None


def _value(field: Any) -> int | None:
    """Return a field's value, None where this GPU does not know it."""
    if field.nvmlReturn != pynvml.NVML_SUCCESS or not 0 <= field.valueType < len(MEMBERS):
        return None
    return in_range(getattr(field.value, MEMBERS[field.valueType]))


def in_range(found: float | None, most: int = MOST_WHOLE) -> int | None:
    """Return a count, None if it is out of a counter's range: drivers use such values for "not known"."""
    return int(found) if found is not None and 0 <= found <= most else None


def _sum(*counts: int | None) -> int | None:
    known = [each for each in counts if each is not None]
    return in_range(sum(known)) if known else None


def _ask_nvml(ask: Callable[..., Any], *arguments: Any) -> Any:
    """Return what NVML answers, None where this GPU or this driver does not know."""
    try:
        return ask(*arguments)
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_NoPermission):
        return None
