"""Watches this node's GPUs through NVML in a thread: events as they come, and counters every few seconds.

It waits for three kinds of events: an Xid, a memory error that could not be corrected, and a change of the clock, which
is only counted (https://docs.nvidia.com/deploy/nvml-api/group__nvmlEvents.html). NVML reports a lost GPU as an error.
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
from unicron_agent.hardware.counters import read_gpu
from unicron_agent.hardware.kernel_log import pci
from unicron_agent.stimuli import Logged, Sampled

log = logging.getLogger(__name__)

WAIT_MS = 200
"""How long to wait for an event before looking at the time."""

SAMPLE_S = 5.0
RETRY_S = 1.0
"""After which NVML is tried again, when the driver was unloaded or does not answer."""

CLOCK = pynvml.nvmlEventTypeClock
EVENTS = pynvml.nvmlEventTypeXidCriticalError | pynvml.nvmlEventTypeDoubleBitEccError | CLOCK

Report = Callable[[Logged | Sampled], None]


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


class Watch:
    """Watches all GPUs of this node in a thread.

    Args:
        rules: classify faults.
        report: called in the thread with each fault and each set of counters.
    """

    def __init__(self, rules: Rules, report: Report) -> None:
        self._rules, self._report = rules, report
        self._ended = threading.Event()
        self._problem = ""
        self._thread = threading.Thread(target=self._run, name="unicron-gpus", daemon=True)

    def start(self) -> None:
        """Watch."""
        self._thread.start()

    def stop(self) -> None:
        """Watch no more."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        raise NotImplementedError

    def _report_fault(self, slot: int, text: str) -> None:
        log.warning("%s", text)
        if ruling := self._rules.rule_for_hardware(text):
            self._report(Logged(text=text, status=ruling.verdict.status, slot=slot))


class GpuWatch(Watch):
    """Watches them through NVML."""

    def __init__(self, rules: Rules, report: Report) -> None:
        super().__init__(rules, report)
        self._lost: set[int] = set()
        self._readings: dict[int, Gpu] = {}
        self._clock_changes: dict[int, int] = {}

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                pynvml.nvmlInit()
                try:
                    self._watch()
                finally:
                    _shutdown()
            except pynvml.NVMLError as error:
                if self._problem != str(error):
                    log.warning("NVML does not answer, the GPUs are not watched: %s; trying again", error)
                self._problem = str(error)
            self._ended.wait(RETRY_S)

    def _watch(self) -> None:
        """Watch until the end, or until NVML does not answer any more.

        Raises:
            pynvml.NVMLError: it does not.
        """
        handles, self._lost = _handles(), set()
        events, sampled_at = pynvml.nvmlEventSetCreate(), 0.0
        try:
            for slot, handle in enumerate(handles):
                with contextlib.suppress(pynvml.NVMLError_NotSupported):
                    wanted = EVENTS & pynvml.nvmlDeviceGetSupportedEventTypes(handle)
                    pynvml.nvmlDeviceRegisterEvents(handle, wanted, events)
                    if wanted & CLOCK:
                        self._clock_changes.setdefault(slot, 0)
            while not self._ended.is_set():
                try:
                    self._handle_event(pynvml.nvmlEventSetWait_v2(events, WAIT_MS))
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

    def _handle_event(self, event: Any) -> None:
        slot, address = pynvml.nvmlDeviceGetIndex(event.device), _address(event.device)
        if event.eventType & pynvml.nvmlEventTypeXidCriticalError:
            self._report_fault(slot, f"NVML: Xid (PCI:{address}): {event.eventData}, of GPU {slot}")
        elif event.eventType & pynvml.nvmlEventTypeDoubleBitEccError:
            self._report_fault(slot, f"NVML: double bit ECC error of GPU {slot} (PCI:{address})")
        elif event.eventType & CLOCK:
            self._clock_changes[slot] = self._clock_changes.get(slot, 0) + 1

    def _sample(self, handles: list[Any]) -> None:
        found = []
        for slot, handle in enumerate(handles):
            with contextlib.suppress(pynvml.NVMLError_GpuIsLost):
                changes, before = self._clock_changes.get(slot), self._readings.get(slot)
                self._readings[slot] = read_gpu(slot, handle, changes, before)
                found.append(self._readings[slot])
        if self._problem:
            log.warning("NVML answers again, the GPUs are watched")
            self._problem = ""
        self._report(Sampled(tuple(found)))

    def _find_lost(self, handles: list[Any]) -> None:
        for slot, handle in enumerate(handles):
            try:
                read_gpu(slot, handle, None, None)
            except pynvml.NVMLError_GpuIsLost:
                if slot not in self._lost:
                    self._lost.add(slot)
                    self._report_fault(slot, f"NVML: GPU {slot} is lost")


def _handles() -> list[Any]:
    return [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]


def _address(handle: Any) -> str:
    bus = pynvml.nvmlDeviceGetPciInfo(handle).busId
    return pci(bus.decode() if isinstance(bus, bytes) else bus)


def _shutdown() -> None:
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlShutdown()
