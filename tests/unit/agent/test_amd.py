"""What AMD's programs say of GPUs, in whatever form, and the faults that it shows."""

import json

import msgspec
import pytest
from helpers.amd import texts, told
from hypothesis import given
from hypothesis import strategies as st
from unicron_agent.hardware.amd import AmdGpus, read_gpus

from unicron import codec
from unicron.contracts.hardware import GpusSampled

FIRST, SECOND = "GPU-d4b1dbb1e6a69540", "GPU-d4b1dbb1e6a69541"
ROCM = {
    "Unique ID": "0x1dbb1e6a69540",
    "PCI Bus": "0000:1E:00.0",
    "Temperature (Sensor edge) (C)": "31.0",
    "Temperature (Sensor junction) (C)": "N/A",
    "Average Graphics Package Power (W)": "39.5",
    "PCIe Replay Count": "2",
    "VRAM Total Memory (B)": "34342961152",
    "VRAM Total Used Memory (B)": "6782976",
}


def counters(text):
    return {name: value for name, value in msgspec.to_builtins(read_gpus([text])[0].gpu).items() if value is not None}


def test_amd_smi_is_read_by_list_and_metric():
    for _, second in (found := texts([told(0), told(1)])), (found[0], json.dumps(json.loads(found[1])["gpu_data"])):
        readings = read_gpus([found[0], second])
        assert [reading[:2] for reading in readings] == [(FIRST, "0000:1a:00"), (SECOND, "0000:1b:00")]
        assert (
            msgspec.to_builtins(readings[1].gpu).items()
            >= {
                "slot": 1,
                "temperature_c": 45,
                "power_w": 158,
                "memory_used": 286 << 20,
                "memory_total": 192 << 30,
                "throttled": None,
                "ecc_corrected": 7,
                "ecc_uncorrected": 0,
                "pcie_replays": 3,
            }.items()
        )


def test_rocm_smi_is_read_behind_a_warning():
    text = "WARNING: a GPU is in a low-power state\n[an aside]\n" + json.dumps({"card2": ROCM, "system": {"PID1": "x"}})
    [reading] = read_gpus([text])
    assert reading[:2] == ("GPU-0001dbb1e6a69540", "0000:1e:00")
    assert counters(text) == {
        "slot": 2,
        "temperature_c": 31,
        "power_w": 39.5,
        "memory_used": 6782976,
        "memory_total": 34342961152,
        "pcie_replays": 2,
    }


@pytest.mark.parametrize(
    "value", ["N/A", None, {"value": "N/A", "unit": "W"}, "N/A (Secondary die)", 0xFFFF, -1, True, []]
)
def test_what_is_no_figure_is_unknown(value):
    _, measured = told(0, power={"socket_power": value}, ecc={"total_uncorrectable_count": value}, temperature="N/A")
    assert counters(json.dumps([measured])).keys().isdisjoint({"power_w", "ecc_uncorrected", "temperature_c"})


THERMAL = ["vr_thermal_violation_status", "hbm_thermal_violation_status"]


@pytest.mark.parametrize(
    ("power", "throttle", "bits"),
    [
        ("UNTHROTTLED", {}, 0),
        ("THROTTLED", {"ppt_violation_status": "N/A"}, 0x8),
        ("N/A", {"ppt_violation_status": "NOT ACTIVE"}, 0),
        ("THROTTLED", dict.fromkeys(["ppt_violation_status", *THERMAL], "ACTIVE"), 0x24),
    ],
)
def test_reasons_for_a_low_clock_are_the_bits_of_nvml(power, throttle, bits):
    _, measured = told(0, power={"throttle_status": power}, throttle=throttle)
    assert counters(json.dumps([measured]))["throttled"] == bits


@pytest.mark.parametrize("identity", [{"uuid": "00ff1586-0000-1000-8000-000000000000"}, {"uuid": "N/A"}, {}])
def test_a_gpu_without_a_serial_number_has_no_name(identity):
    assert read_gpus([json.dumps([{"gpu": 0, "bdf": "0000:C4:00.0", **identity}])])[0][:2] == ("", "0000:c4:00")


def test_where_the_hottest_spot_is_not_told_the_edge_counts():
    _, measured = told(0, temperature={"hotspot": "N/A", "edge": {"value": 44, "unit": "C"}})
    assert counters(json.dumps([measured]))["temperature_c"] == 44


def test_outputs_of_other_gpus_do_not_go_together():
    whole, less = texts([told(0), told(1)]), texts([told(0)])
    assert read_gpus([whole[0], less[1]]) == []
    assert read_gpus([less[0], ""]) == []


NAMES = [
    *ROCM,
    "gpu",
    "uuid",
    "bdf",
    "gpu_data",
    "card0",
    "card1",
    "power",
    "socket_power",
    "ecc",
    "mem_usage",
    "value",
    "unit",
]
NAMES += ["total_uncorrectable_count", "used_vram", "temperature", "hotspot", "throttle", "throttle_status", "pcie"]
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["N/A", "9 W", "9e9 MB", "0x1"])
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(NAMES) | st.text(), inner), max_leaves=15
)
MEASURED = st.dictionaries(st.sampled_from(NAMES), VALUES).map(lambda given: [{**given, "gpu": 0}])


@given(st.lists(st.text() | (VALUES | MEASURED).map(json.dumps), max_size=2))
def test_whatever_they_print_is_read_and_can_be_told(printed):
    sampled = GpusSampled(node="n1", gpus=[reading.gpu for reading in read_gpus(printed)])
    assert codec.decode_message(codec.encode(sampled)) == sampled


def test_tables_without_end_are_read():
    assert read_gpus(["[" * 100_000]) == []
    for depth in range(400, 5000, 200):  # newer versions of Python read JSON deeper than they call functions
        assert len(read_gpus(['{"card0":' * depth + "{}" + "}" * depth])) <= 1


class Watched:
    """GPUs in slots 4 and 5, and what is found in reading after reading."""

    def __init__(self):
        self._gpus = AmdGpus({FIRST: 4, SECOND: 5})

    def read(self, *gpus):
        found, faults = self._gpus.judge(read_gpus(texts(gpus)))
        return [gpu.slot for gpu in found], faults


def test_memory_errors_that_are_new_are_a_fault():
    watched = Watched()
    assert watched.read(told(0, 2), told(1)) == ([4, 5], []), "these are old"
    assert watched.read(told(0, "N/A"), told(1)) == ([4, 5], [])
    assert watched.read(told(0, 5), told(1))[1] == [(4, "amd-smi: 3 new uncorrectable ECC errors of GPU 4")]
    assert watched.read(told(0, 5), told(1))[1] == []
    assert watched.read(told(0, 1), told(1))[1] == [], "its driver began anew"
    assert watched.read(told(0, 2), told(1))[1] == [(4, "amd-smi: 1 new uncorrectable ECC errors of GPU 4")]


def test_a_gpu_that_is_not_there_any_more_is_lost():
    watched = Watched()
    watched.read(told(0), told(1))
    listed, measured = told(0)
    moved = ({**told(1)[0], "gpu": 0}, measured)  # the others get other numbers
    assert watched.read(moved) == ([5], [])
    assert watched.read(told(0), told(1)) == ([4, 5], []), "it was back"
    assert [watched.read(moved)[1] for _ in range(3)] == [[], [(4, "amd-smi: GPU 4 is lost")], []]
    assert listed["uuid"] != moved[0]["uuid"]


def test_a_gpu_that_is_there_or_of_which_nothing_is_known_is_not_lost():
    watched = Watched()
    watched.read(told(0), told(1))
    unnamed = ({**told(0)[0], "uuid": "N/A"}, told(0)[1])
    assert [watched.read(unnamed, told(1))[1] for _ in range(3)] == [[], [], []]
    assert [watched.read(*none) for none in ((), (told(7),), ())] == [([], [])] * 3
