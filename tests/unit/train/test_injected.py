"""Faults that a worker injects into itself: errors that the rules know, and slow microbatches."""

import pytest

from unicron.contracts.faults import EXCEPTIONS
from unicron.errors import InvalidInputError
from unicron.rules import load
from unicron.train.worker import injected as injected_module
from unicron.train.worker.injected import Injected, exception

STATUSES = {
    "cuda-illegal-access": ("illegal_memory_access", 2),
    "cuda-launch-failure": ("cuda_error", 2),
    "cuda-oom": ("other_software_error", 2),
    "cuda-ecc": ("ecc_error", 1),
    "cuda-nvlink": ("nvlink_error", 1),
    "dma-mapping": ("invalid_dma_mapping", 1),
    "gpu-lost": ("gpu_driver_error", 1),
    "nccl-timeout": ("nccl_timeout", 3),
    "nccl-system-error": ("other_network_error", 3),
    "link-down": ("link_flapping", 3),
    "connection-refused": ("connection_refused", 3),
    "connection-reset": ("connection_reset", 3),
    "memory-error": ("out_of_memory", 2),
    "value-error": ("other_software_error", 2),
}


def test_each_error_that_can_be_raised_is_taken_for_what_it_is():
    found = {}
    for name, (kind, _) in EXCEPTIONS.items():
        error = exception(name)
        told = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
        assert told == kind
        verdict = load().classify(told, str(error))
        found[name] = (verdict.status, verdict.severity)
    assert found == STATUSES


def test_one_that_is_not_there_is_refused():
    with pytest.raises(InvalidInputError, match="no exception 'flood'; there are cuda-illegal-access"):
        exception("flood")


def test_an_error_is_raised_once_as_a_microbatch_ends():
    injected = Injected()
    injected.begin()
    injected.error = exception("value-error")
    with pytest.raises(ValueError, match="chaos"):
        injected.end()
    injected.begin()
    injected.end()


class Clock:
    def __init__(self):
        self.now, self.slept = 100.0, []

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)


def test_a_slow_microbatch_takes_as_many_times_as_long_until_that_ends(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(injected_module, "time", clock)
    injected = Injected()
    injected.factor = 20.0
    injected.begin()
    clock.now += 0.5
    injected.end()
    assert clock.slept == [pytest.approx(9.5)]
    injected.factor = 1.0
    injected.begin()
    injected.factor = 1e6  # one that was begun before is left alone
    injected.end()
    assert len(clock.slept) == 1
