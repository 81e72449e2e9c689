"""An agent's reports of faults: once, and of which worker; and of GPUs' counters."""

import pytest
from unicron_agent.hardware.counters import grew
from unicron_agent.hardware.hardware import AGAIN_S, HardwareReports
from unicron_agent.stimuli import Logged, Sampled, WorkerProcess
from unicron_agent.workers.workers import LocalWorker

from unicron.contracts.hardware import FaultLogged, Gpu, GpusSampled


def worker(number, slot, pid):
    return LocalWorker.adopted(WorkerProcess(worker=f"gpt-{number}", task="gpt", slot=slot, pid=pid), 0.0)


WORKERS = [worker(1, 0, 11), worker(2, 1, 12), worker(3, 2, 0)]


def report(hardware, now=0.0, **fields):
    return hardware.report_new(Logged(text="Xid", status="ecc_error", **fields), WORKERS, now)


def test_the_process_counts_more_than_the_gpu():
    [fact] = report(HardwareReports("n1"), slot=0, pid=12)
    assert (fact.worker, fact.task, fact.slot) == ("gpt-2", "gpt", 1)
    [fact] = report(HardwareReports("n1"), slot=0, pid=99)
    assert (fact.worker, fact.slot) == ("gpt-1", 0)
    [fact] = report(HardwareReports("n1"), slot=2)
    assert (fact.worker, fact.slot) == ("", 2), "its process is not there yet"
    assert report(HardwareReports("n1"), pid=0) == [FaultLogged(node="n1", text="Xid")]


def test_a_driver_that_repeats_itself_is_heard_once():
    hardware = HardwareReports("n1")
    assert len(report(hardware, slot=0)) == 1
    assert report(hardware, slot=0, now=AGAIN_S / 2) == []
    assert len(report(hardware, slot=1, now=AGAIN_S / 2)) == 1, "another GPU"
    assert len(report(hardware, slot=0, now=1.1 * AGAIN_S)) == 1


def test_a_line_of_a_worker_is_told_as_its_own_once_in_a_while():
    hardware = HardwareReports("n1")

    def report(**fields):
        return hardware.report_new(Logged(text="CUDA", status="cuda_error", **fields), WORKERS, 0.0)

    fact = FaultLogged(node="n1", text="CUDA", slot=1, task="gpt", worker="gpt-2", printed=True)
    assert [report(author="gpt-2"), report(author="gpt-2")] == [[fact], []]
    assert len(report(author="gpt-1")) == 1
    assert report(author="gpt-9") == [], "it is gone"
    assert report(pid=12)[0].printed is False, "what a worker wrote hides nothing of the kernel's"


def test_what_gpus_count_is_passed_on():
    gpu = Gpu(slot=3, temperature_c=40)
    assert HardwareReports("n1").report_new(Sampled((gpu,)), (), 0.0) == [GpusSampled(node="n1", gpus=[gpu])]


@pytest.mark.parametrize(
    ("now", "before", "says"),
    [
        ((1, 2, 3), (1, 2, 3), False),
        ((1, 3, 3), (1, 2, 3), True),
        ((0, 0, 0), (1, 2, 3), False),
        ((0, 3, 0), (1, 2, 3), True),
        ((None, 3, None), (1, 2, 3), True),
        ((None, 3, None), (1, None, 3), None),
        ((1, 2, 3), (), None),
        ((None, None, None), (None, None, None), None),
    ],
)
def test_counters_grow_or_begin_anew(now, before, says):
    assert grew(now, before) is says
