"""What NVML tells of this node's GPUs: events as they come, and counters every few seconds, in a thread of its own.

Of events it waits for two kinds: an Xid, and a memory error that could not be corrected
(https://docs.nvidia.com/deploy/nvml-api/group__nvmlEvents.html). A GPU that is lost shows by an error.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pynvml

from unicron.contracts.hardware import Gpu
from unicron.rules import Rules
from unicron_agent.kernel_log import pci
from unicron_agent.stimuli import Logged, Sampled

log = logging.getLogger(__name__)

WAIT_MS = 200
"""How long to wait for an event before looking at the time."""

SAMPLE_S = 5.0
RETRY_S = 1.0
"""After which NVML is tried again, when the driver was unloaded or does not answer."""

EVENTS = pynvml.nvmlEventTypeXidCriticalError | pynvml.nvmlEventTypeDoubleBitEccError

Told = Callable[[Logged | Sampled], None]


def addresses() -> dict[str, int]:
    """Return the slots of this node's GPUs by PCI address; empty where NVML finds none."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    try:
        return {_address(handle): slot for slot, handle in enumerate(_handles())}
    except pynvml.NVMLError:
        return {}
    finally:
        _shutdown()


class GpuWatch:
    """Watches all GPUs of this node.

    Args:
        rules: which Xids stand for something.
        told: called with what there is to tell, in the thread.
    """

    def __init__(self, rules: Rules, told: Told) -> None:
        self._rules, self._told = rules, told
        self._ended = threading.Event()
        self._lost: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="unicron-gpus", daemon=True)

    def start(self) -> None:
        """Watch."""
        self._thread.start()

    def stop(self) -> None:
        """Watch no more."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        told = ""
        while not self._ended.is_set():
            try:
                pynvml.nvmlInit()
                try:
                    self._watch()
                finally:
                    _shutdown()
            except pynvml.NVMLError as error:
                if told != str(error):
                    log.warning("NVML does not answer, the GPUs are not watched: %s; trying again", error)
                told = str(error)
            self._ended.wait(RETRY_S)

    def _watch(self) -> None:
        """Watch until the end, or until NVML does not answer any more.

        Raises:
            pynvml.NVMLError: it does not.
        """
        handles, self._lost = _handles(), set()
        events, sampled_at = pynvml.nvmlEventSetCreate(), 0.0
        try:
            for handle in handles:
                with contextlib.suppress(pynvml.NVMLError_NotSupported):
                    supported = pynvml.nvmlDeviceGetSupportedEventTypes(handle)
                    pynvml.nvmlDeviceRegisterEvents(handle, EVENTS & supported, events)
            while not self._ended.is_set():
                try:
                    self._happened(pynvml.nvmlEventSetWait_v2(events, WAIT_MS))
                except pynvml.NVMLError_Timeout:
                    pass
                except pynvml.NVMLError_GpuIsLost:
                    self._find_lost(handles)
                    self._ended.wait(WAIT_MS / 1000)  # it says so at once, each time
                if time.monotonic() - sampled_at >= SAMPLE_S:
                    sampled_at = time.monotonic()
                    self._sample(handles)
        finally:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlEventSetFree(events)

    def _happened(self, event: Any) -> None:
        slot, address = pynvml.nvmlDeviceGetIndex(event.device), _address(event.device)
        if event.eventType & pynvml.nvmlEventTypeXidCriticalError:
            self._tell(slot, f"NVML: Xid (PCI:{address}): {event.eventData}, of GPU {slot}")
        elif event.eventType & pynvml.nvmlEventTypeDoubleBitEccError:
            self._tell(slot, f"NVML: double bit ECC error of GPU {slot} (PCI:{address})")

    def _tell(self, slot: int, text: str) -> None:
        log.warning("%s", text)
        if ruling := self._rules.of_hardware(text):
            self._told(Logged(text=text, status=ruling.verdict.status, slot=slot))

    def _sample(self, handles: list[Any]) -> None:
        found = []
        for slot, handle in enumerate(handles):
            with contextlib.suppress(pynvml.NVMLError_GpuIsLost):
                found.append(reading(slot, handle))
        self._told(Sampled(tuple(found)))

    def _find_lost(self, handles: list[Any]) -> None:
        for slot, handle in enumerate(handles):
            try:
                reading(slot, handle)
            except pynvml.NVMLError_GpuIsLost:
                if slot not in self._lost:
                    self._lost.add(slot)
                    self._tell(slot, f"NVML: GPU {slot} is lost")


def reading(slot: int, handle: Any) -> Gpu:
    """Return what a GPU counts now.

    Raises:
        pynvml.NVMLError: the GPU is lost, or the driver does not answer.
    """
    corrected, uncorrected = pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    power_mw = _told_by(pynvml.nvmlDeviceGetPowerUsage, handle)
    memory = _told_by(pynvml.nvmlDeviceGetMemoryInfo, handle)
    _, rows, pending, failed = _told_by(pynvml.nvmlDeviceGetRemappedRows, handle) or (None,) * 4
    return Gpu(
        slot=slot,
        temperature_c=_told_by(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
        power_w=None if power_mw is None else power_mw / 1000,
        memory_used=None if memory is None else memory.used,
        throttled=_told_by(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle),
        ecc_corrected=_told_by(pynvml.nvmlDeviceGetTotalEccErrors, handle, corrected, pynvml.NVML_VOLATILE_ECC),
        ecc_uncorrected=_told_by(pynvml.nvmlDeviceGetTotalEccErrors, handle, uncorrected, pynvml.NVML_VOLATILE_ECC),
        rows_remapped=rows,
        remap_pending=None if pending is None else bool(pending),
        remap_failed=None if failed is None else bool(failed),
        pcie_replays=_told_by(pynvml.nvmlDeviceGetPcieReplayCounter, handle),
    )


def _told_by(ask: Callable[..., Any], *arguments: Any) -> Any:
    """Return what NVML answers, None where this GPU or this driver does not know."""
    try:
        return ask(*arguments)
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_NoPermission):
        return None


def _handles() -> list[Any]:
    return [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]


def _address(handle: Any) -> str:
    bus = pynvml.nvmlDeviceGetPciInfo(handle).busId
    return pci(bus.decode() if isinstance(bus, bytes) else bus)


def _shutdown() -> None:
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlShutdown()
