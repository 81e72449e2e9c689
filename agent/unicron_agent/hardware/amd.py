"""What AMD's programs say of the GPUs of a machine, and what faults that shows. Pure.

amd-smi and rocm-smi print JSON in forms that differ by version: a list, or one under a key; numbers, texts, or tables
of a number and its unit; "N/A" for what a GPU does not know; and at times a warning before it all. What can't be read
is unknown, and so no fault.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import pynvml

from unicron.contracts.hardware import Gpu
from unicron.contracts.ranges import MOST_NUMBER
from unicron_agent.hardware.counters import in_range
from unicron_agent.hardware.kernel_log import pci

MISSED = 2
"""Readings in a row without a GPU that others are in, after which it is lost."""

DEEPEST = 8
"""Tables within tables that are looked into."""

UNKNOWN = (0xFFFF, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF)
"""Stand for "not known" in the driver's tables; not all versions of the programs leave them out."""

TEMPERATURE = (
    "temperature.hotspot",
    "temperature (sensor junction) (c)",
    "temperature.edge",
    "temperature (sensor edge) (c)",
)
POWER = (
    "power.socket_power",
    "current socket graphics package power (w)",
    "average graphics package power (w)",
)
THROTTLES = {
    "prochot": pynvml.nvmlClocksThrottleReasonHwThermalSlowdown,
    "ppt": pynvml.nvmlClocksThrottleReasonSwPowerCap,
    "socket_thermal": pynvml.nvmlClocksThrottleReasonSwThermalSlowdown,
    "vr_thermal": pynvml.nvmlClocksThrottleReasonSwThermalSlowdown,
    "hbm_thermal": pynvml.nvmlClocksThrottleReasonSwThermalSlowdown,
}
"""Reasons for a lower clock, and the bit that NVML has for each."""

UNITS = {"KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30, "TB": 1 << 40, "mW": 1e-3}

_BEGIN = re.compile(r"^[\[{]", re.MULTILINE)
_FIGURE = re.compile(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([A-Za-z]*)\s*")
_PCI = re.compile(r"(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\b")
_SERIAL = re.compile(r"0x([0-9a-fA-F]{1,16})")
_UUID = re.compile(r"([0-9a-f]{2})[0-9a-f]{6}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{2}([0-9a-f]{2})-([0-9a-f]{12})")

Fields = dict[str, Any]
"""What a program says of a GPU, by path and in small letters: {"power.socket_power.value": 41}."""


class Reading(NamedTuple):
    """What was said of one GPU.

    Attributes:
        device: its name for HIP, "GPU-" and its serial number; empty for one without. HIP numbers GPUs in another
            order than the programs.
        address: of PCI, as `pci` gives it; empty where it is not told.
        gpu: its counters, with the program's number for a slot.
    """

    device: str
    address: str
    gpu: Gpu


class AmdGpus:
    """Judges readings of a node's GPUs by those before.

    Args:
        slots: of the GPUs, by device.
    """

    def __init__(self, slots: Mapping[str, int]) -> None:
        self._slots = slots
        self._addresses: dict[int, str] = {}
        self._missed: dict[int, int] = {}
        self._uncorrected: dict[int, int] = {}

    def judge(self, readings: Sequence[Reading]) -> tuple[list[Gpu], list[tuple[int, str]]]:
        """Return the counters of the slots' GPUs, and the faults that are new: each with its slot.

        Nothing is known of one that is there and can't be named, nor of any where none is named.
        """
        found = {reading.device: reading for reading in readings}
        there = {reading.address for reading in readings if reading.address}
        counters, faults = list[Gpu](), list[tuple[int, str]]()
        if found.keys().isdisjoint(self._slots):
            return counters, faults
        for device, slot in self._slots.items():
            if reading := found.get(device):
                self._missed[slot], self._addresses[slot] = 0, reading.address
                counters.append(msgspec.structs.replace(reading.gpu, slot=slot))
                if new := self._new_errors(slot, reading.gpu.ecc_uncorrected):
                    faults.append((slot, f"amd-smi: {new} new uncorrectable ECC errors of GPU {slot}"))
            elif self._addresses.get(slot) not in there:
                self._missed[slot] = self._missed.get(slot, 0) + 1
                if self._missed[slot] == MISSED:
                    faults.append((slot, f"amd-smi: GPU {slot} is lost"))
        return counters, faults

    def _new_errors(self, slot: int, count: int | None) -> int:
        """Return by how much a count has grown; those of the first reading are old, and a lower one began anew."""
        before = self._uncorrected.get(slot)
        if count is not None:
            self._uncorrected[slot] = count
        return 0 if count is None or before is None else max(0, count - before)


def read_gpus(texts: Sequence[str]) -> list[Reading]:
    """Return what one program's outputs say of each GPU, in the program's order.

    Nothing is known where they are not of the same GPUs: one was lost in between, and numbers have moved.
    """
    told = [dict(_gpus(_first_json(text))) for text in texts]
    if any(each.keys() != told[0].keys() for each in told):
        return []
    readings = []
    for number in sorted(told[0]) if told else ():
        fields = {name: value for each in told for name, value in each[number].items()}
        readings.append(Reading(_device(fields), _address(fields), _counters(number, fields)))
    return readings


def _first_json(text: str) -> Any:
    """Return the first list or table that begins a line; None where there is none."""
    for begin in _BEGIN.finditer(text):
        try:
            return json.JSONDecoder().raw_decode(text, begin.start())[0]
        except (ValueError, RecursionError):
            continue
    return None


def _gpus(found: Any) -> Iterator[tuple[int, Fields]]:
    """Yield each GPU's number and fields, from {"gpu_data": [{"gpu": 0, ...}]}, its list alone, or {"card0": {...}}."""
    if isinstance(found, dict) and isinstance(found.get("gpu_data"), list):
        found = found["gpu_data"]
    entries = (
        found.items() if isinstance(found, dict) else [("", each) for each in found or () if isinstance(found, list)]
    )
    for name, entry in entries:
        number = name.removeprefix("card") if name else entry.get("gpu") if isinstance(entry, dict) else None
        if isinstance(entry, dict) and re.fullmatch("[0-9]{1,4}", str(number)):
            yield int(str(number)), dict(_flat(entry, "", DEEPEST))


def _flat(table: dict[str, Any], path: str, depth: int) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if not isinstance(value, dict):
            yield f"{path}{name}".lower(), value
        elif depth:
            yield from _flat(value, f"{path}{name}.", depth - 1)


def _device(fields: Fields) -> str:
    """Return HIP's name of a GPU; empty for one without a serial number, which has none."""
    if made := _UUID.fullmatch(str(fields.get("uuid", "")).lower()):  # of the serial number, with other things between
        serial = "".join(made.groups())
    elif given := _SERIAL.fullmatch(str(fields.get("unique id", "")).lower()):
        serial = given[1].zfill(16)
    else:
        return ""
    return f"GPU-{serial}" if serial.strip("0") else ""


def _address(fields: Fields) -> str:
    found = _PCI.match(str(fields.get("bdf", fields.get("pci bus", ""))))
    return pci(found[0]) if found else ""


def _counters(number: int, fields: Fields) -> Gpu:
    power = _figure(fields, *POWER)
    return Gpu(
        slot=number,
        temperature_c=in_range(_figure(fields, *TEMPERATURE), MOST_NUMBER),
        power_w=power if power is not None and 0 <= power <= MOST_NUMBER else None,
        memory_used=in_range(_figure(fields, "mem_usage.used_vram", "vram total used memory (b)")),
        memory_total=in_range(_figure(fields, "mem_usage.total_vram", "vram total memory (b)")),
        throttled=_throttled(fields),
        ecc_corrected=in_range(_figure(fields, "ecc.total_correctable_count")),
        ecc_uncorrected=in_range(_figure(fields, "ecc.total_uncorrectable_count")),
        pcie_replays=in_range(_figure(fields, "pcie.replay_count", "pcie replay count")),
    )


def _figure(fields: Fields, *names: str) -> float | None:
    """Return the first of some fields that has a figure, in bytes, watts or degrees."""
    for name in names:
        value = fields.get(name, fields.get(f"{name}.value"))
        unit = fields.get(f"{name}.unit")
        if isinstance(value, str) and (figure := _FIGURE.fullmatch(value)):
            value, unit = float(figure[1]), figure[2] or unit
        if isinstance(value, int | float) and not isinstance(value, bool) and value not in UNKNOWN:
            return value * UNITS.get(str(unit), 1)
    return None


def _throttled(fields: Fields) -> int | None:
    """Return the bits of NVML for why a clock is low; 0 where it is said to be none, None where nothing is said."""
    said = {reason: str(fields.get(f"throttle.{reason}_violation_status")).upper() for reason in THROTTLES}
    bits = [THROTTLES[reason] for reason, state in said.items() if state == "ACTIVE"]
    whole = str(fields.get("power.throttle_status")).upper()
    if not bits and whole == "THROTTLED":
        return int(pynvml.nvmlClocksThrottleReasonHwSlowdown)
    known = bits or whole == "UNTHROTTLED" or "NOT ACTIVE" in said.values()
    return sum(set(bits)) if known else None
