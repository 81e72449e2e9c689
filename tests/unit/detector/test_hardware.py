"""Device health: what kernels and drivers log becomes a failure where it is one."""

import pytest
from helpers.detector import scene_of

from unicron.contracts.events import FailureDetected
from unicron.contracts.failures import DetectionMethod, FailureStatus, Severity
from unicron.contracts.hardware import FaultLogged

XID, LINK_DOWN = "NVRM: Xid (PCI:0000:3b:00):", "mlx5_core 0000:5e:00.0 ib0: Link down"
NCCL = "n1:17:99 [0]"
DMAR = "DMAR: [DMA Read NO_PASID] Request device [3b:00.0] fault addr 0x0"


@pytest.fixture
def harness():
    return scene_of("n1", "n2", **{"gpt-1": "n1", "gpt-2": "n2"})


def logged(text, node="n1", **fields):
    return FaultLogged(node=node, text=text, **fields)


def test_a_fault_of_the_machine_gives_the_node_up_once(harness):
    line = f"{XID} 79, GPU has fallen off the bus."
    [failure] = harness.feed(logged(line, slot=3))
    what = {"method": DetectionMethod.DEVICE_HEALTH, "status": FailureStatus.GPU_DRIVER_ERROR}
    assert failure == FailureDetected(severity=Severity.SEV1, **what, node="n1", slot=3, reason=line)
    assert harness.feed(logged(line, slot=4)) == []
    assert harness.exit("gpt-1", signal=9) == [], "a consequence"


def test_a_fault_that_other_devices_have_too_gives_the_node_up_where_it_is_a_slots(harness):
    assert harness.feed(logged(DMAR)) == []
    [failure] = harness.feed(logged(DMAR, slot=1))
    assert (failure.severity, failure.status) == (1, "invalid_dma_mapping")


def test_a_fault_of_a_process_restarts_that_worker(harness):
    line = f"{XID} 31, pid=1"
    [failure] = harness.feed(logged(line, task="gpt", worker="gpt-1", slot=0))
    assert (failure.severity, failure.worker, failure.status) == (2, "gpt-1", "illegal_memory_access")
    assert harness.feed(logged(line, task="gpt", worker="gpt-1", slot=0)) == []
    assert harness.feed(logged(line)) == [], "of nobody's process"


@pytest.mark.parametrize("fields", [{"worker": "gpt-2", "task": "gpt"}, {"worker": "gpt-1", "task": "other"}])
def test_a_node_that_is_there_speaks_of_its_own_workers_only(harness, fields):
    assert harness.feed(logged(f"{XID} 31", **fields)) == []
    assert harness.feed(logged(f"{XID} 79", node="n9")) == []


def test_what_is_no_failure_by_itself_explains_one(harness):
    assert harness.feed(logged(LINK_DOWN, node="n2")) == []
    harness.restart()
    [failure] = harness.exit("gpt-2", signal=9)
    assert failure.reason.endswith(f"; n2's kernel said: {LINK_DOWN}")
    [failure] = harness.exit("gpt-1", signal=9)
    assert "kernel" not in failure.reason, "it is of another node"


def printed(text, worker="gpt-1", node="n1", **fields):
    return FaultLogged(node=node, text=text, task="gpt", worker=worker, slot=0, printed=True, **fields)


WATCHDOG = "[Rank 0] Watchdog caught collective operation timeout"
CUDA = "CUDA error: unspecified launch failure"


@pytest.mark.parametrize("line", ["NVRM: Xid (PCI:0000:3b:00): 79", "NVML: GPU 1 is lost", WATCHDOG, CUDA])
def test_nobody_is_ended_by_what_a_script_prints(harness, line):
    for _ in range(10):
        assert harness.feed(printed(line)) == []
    assert harness.detector.state.lost == {}
    assert harness.wait(1) == []


def test_what_a_worker_wrote_explains_its_own_failure(harness):
    harness.feed(printed(WATCHDOG), printed(CUDA))
    harness.restart()
    [failure] = harness.exit("gpt-2", signal=9)
    assert "said" not in failure.reason
    [failure] = harness.exit("gpt-1", signal=9)
    assert failure.reason.endswith(f"; n1's gpt-1 said: {WATCHDOG}"), "the first line, not what followed from it"


def test_a_broken_collective_is_explained_by_who_wrote_first(harness):
    harness.feed(printed(CUDA, "gpt-2", "n2"), printed(WATCHDOG))
    harness.collective("gpt-1")
    [failure] = harness.wait(1)
    assert failure.severity is Severity.SEV3
    assert failure.reason.endswith(f"; n2's gpt-2 said: {CUDA}")


@pytest.mark.parametrize("heard", [logged(LINK_DOWN, node="n2"), printed(CUDA, "gpt-2", "n2")])
def test_a_line_explains_for_a_while_only(harness, heard):
    harness.feed(heard)
    harness.wait(12)
    [failure] = harness.exit("gpt-2", signal=9)
    assert "said" not in failure.reason


def test_what_a_worker_has_gone_on_from_explains_nothing_that_comes_later(harness):
    harness.feed(printed(CUDA))
    harness.run(**{"gpt-1": "n1", "gpt-2": "n2"})  # told once more
    assert "gpt-1" in harness.detector.state.wrote
    harness.run(epoch=1, **{"gpt-1": "n1", "gpt-2": "n2"})
    [failure] = harness.throw("gpt-1", "ArithmeticError", "no more numbers")
    assert failure.reason == "ArithmeticError: no more numbers"


@pytest.mark.parametrize("fields", [{"worker": "gpt-2"}, {"worker": "gpt-9"}, {"node": "n2"}])
def test_a_node_knows_what_its_own_workers_write_only(harness, fields):
    harness.feed(printed(CUDA, **fields))
    assert harness.detector.state.wrote == {}


def test_memory_that_a_killed_peer_shared_is_an_echo_of_its_end(harness):
    harness.exit("gpt-1", signal=9)
    [failure] = harness.feed(logged(f"{XID} 31", task="gpt", worker="gpt-2", node="n2", slot=0))
    assert "echo of gpt-1" in failure.reason


def test_an_echo_names_who_wrote_first_too(harness):
    harness.feed(printed(CUDA, "gpt-2", "n2"), printed(WATCHDOG))
    [failure] = harness.throw("gpt-1", "ConnectionResetError", "reset by peer")
    assert failure.reason.endswith(f"; n2's gpt-2 said: {CUDA}; n1's gpt-1 said: {WATCHDOG}")


def test_a_line_of_a_worker_that_is_forgotten_meanwhile_is_harmless(harness):
    harness.exit("gpt-1", expected=True)
    harness.wait(599)
    harness.feed(printed(CUDA))
    harness.wait(2)
    assert "gpt-1" not in harness.detector.state.workers
    assert "gpt-1" in harness.detector.state.wrote
    assert harness.give_up("regroup", "gpt-1")
