"""Lost training time: by hand for single failures, and what comes of trace-a."""

import itertools
import math

import pytest
from unicron_simulator.policies import traces
from unicron_simulator.policies.traces import Failure, Trace

from benchmarks.lost_time import COPIES, HOUR, OURS, RACK, Saving, Scheme, compared, lost, reduction, report, schemes

BLOCKING = Scheme(Saving(interval_s=100, write_s=20, blocked_s=20, read_s=10))
BACKGROUND = Scheme(Saving(interval_s=99, write_s=50, blocked_s=1, read_s=10))
MEMORY = BACKGROUND._replace(memory=Saving(interval_s=5, write_s=5, blocked_s=0, read_s=1))
NODES = tuple(f"node-{number}" for number in range(4))


def trace(*faults, duration_s=1000.0):
    return Trace("hand-made", NODES, duration_s, tuple(Failure(at, node, kind, 500.0) for at, node, kind in faults))


def test_a_save_that_blocks_counts_when_it_is_written():
    # saves are from 100 to 120 and from 220 to 240
    found = lost(trace((239.0, "node-0", "sev2"), duration_s=239.0), BLOCKING)
    assert (found.redone_s, found.read_s, found.blocked_s) == (100, 0, 39)
    found = lost(trace((240.0, "node-0", "sev2"), duration_s=250.0), BLOCKING)
    assert (found.redone_s, found.read_s, found.blocked_s) == (0, 10, 40)


def test_a_save_in_the_background_is_written_while_training_goes_on():
    # states are copied at 99 and at 199, and are written 50 s later
    found = lost(trace((148.0, "node-0", "sev1"), duration_s=158.0), BACKGROUND)
    assert (found.redone_s, found.read_s, found.blocked_s) == (147, 10, 1)
    found = lost(trace((149.0, "node-0", "sev1"), duration_s=159.0), BACKGROUND)
    assert (found.redone_s, found.read_s, found.blocked_s) == (49, 10, 1)


def test_a_save_waits_for_the_one_before_it():
    assert Saving(interval_s=10, write_s=50, blocked_s=1, read_s=0).period_s == 50


def test_a_failure_while_a_save_is_read_starts_that_anew():
    found = lost(trace((50.0, "node-0", "sev2"), (54.0, "node-1", "sev2"), duration_s=500.0), BACKGROUND)
    assert found.from_storage == 1, "so close to each other they are one"
    found = lost(trace((50.0, "n", "sev2"), (180.0, "n", "sev2"), duration_s=200.0)._replace(nodes=("n",)), BLOCKING)
    assert found.read_s == 20
    slow = Scheme(BLOCKING.storage._replace(read_s=200))
    found = lost(trace((50.0, "node-0", "sev2"), (180.0, "node-1", "sev2"), duration_s=400.0), slow)
    assert (found.redone_s, found.read_s, found.blocked_s) == (50, 130 + 200, 0)


def test_memory_saves_all_but_the_latest_iterations():
    found = lost(trace((48.0, "node-0", "sev1")), MEMORY)
    assert (found.redone_s, found.read_s, found.from_memory) == (8, 1, 1)


def test_both_nodes_of_a_group_at_once_are_lost_to_memory():
    both = trace((148.0, "node-0", "sev1"), (148.0, "node-1", "sev1"))
    assert lost(both, MEMORY).from_storage == 1
    assert lost(both, MEMORY, dict(zip(NODES, "aabb", strict=True))).from_memory == 1
    later = trace((148.0, "node-0", "sev1"), (400.0, "node-1", "sev1"))
    assert lost(later, MEMORY).from_memory == 2, "copies were made anew in between"
    assert lost(trace((148.0, "node-0", "sev2"), (148.0, "node-1", "sev2")), MEMORY).from_memory == 1


def test_what_is_not_lost_brings_training_forward():
    drawn = traces.generate("trace-b", 3)
    for scheme in schemes(drawn.duration_s / len(drawn.faults)).values():
        found = lost(drawn, scheme)
        assert 0 < found.total_s < drawn.duration_s
        assert found.from_memory + found.from_storage <= len(drawn.faults)


def test_memory_loses_92_percent_less_than_the_best_other_unless_storage_is_fast():
    drawn = [traces.generate("trace-a", seed) for seed in range(1, 6)]
    assert reduction(compared(drawn)) > 0.92
    assert reduction(compared(drawn, write_s=3 * 60, read_s=77)) < 0.92


def test_bursts_of_a_rack_need_to_know_the_racks():
    drawn = [traces.by_rack(traces.generate("trace-a", seed), RACK) for seed in range(1, 6)]
    racks = {node: str(number // RACK) for number, node in enumerate(drawn[0].nodes)}
    assert COPIES == 2
    assert sum(found.from_storage for found in compared(drawn)[OURS]) > 0
    assert sum(found.from_storage for found in compared(drawn, racks)[OURS]) == 0


def test_the_report_has_what_each_case_lost():
    figures, cases, known = report(seeds=2)
    assert known["mtbf_h"] == pytest.approx(56 * 24 / 43)
    assert known["young_h"] == pytest.approx(math.sqrt(2 * 35 * 60 * 56 * 86400 / 43) / HOUR)
    for rows in cases.values():
        assert all(each["lost_h"] > 0 for each in rows.values())
        assert len({each["from_memory"] + each["from_storage"] for each in rows.values()}) == 1
    slower = [value for name, value in figures.items() if name.startswith("reduction_write_")]
    assert all(one < other for one, other in itertools.pairwise(slower))
