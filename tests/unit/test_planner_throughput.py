"""T(t, x) from its three sources."""

import numpy as np
import pytest
from planner_scenes import spec
from unicron_planner.throughput import ENOUGH, MEMORY, Measured, added, known, rates

LINE = {2: 2.0, 4: 3.0}


def measured(*seconds):
    total = Measured()
    for one in seconds:
        total = added(total, one)
    return total


def steady(seconds, count=ENOUGH):
    return measured(*[seconds] * count)


def at(task, *sizes, times=None, nominal=1.0):
    return rates(task, times or {}, np.array(sizes), nominal).tolist()


def test_the_table_is_a_line_between_its_rows_and_keeps_the_efficiency_beyond_them():
    task = spec("a", throughput=LINE, most=8)
    assert at(task, 0, 1, 2, 3, 4, 8) == pytest.approx([0.0, 1.0, 2.0, 2.5, 3.0, 6.0])


def test_nothing_known_is_proportional_to_workers():
    assert at(spec("a", throughput={}), 0, 1, 4, nominal=3.0) == [0.0, 3.0, 12.0]


def test_a_trusted_measurement_outranks_the_table_and_rescales_its_other_sizes():
    task = spec("a", throughput=LINE, flops=3.0)
    assert at(task, 2, 4, times={2: steady(3.0)}) == pytest.approx([1.0, 1.5])


def test_the_nearest_measured_size_is_the_anchor():
    task = spec("a", throughput={}, flops=6.0, most=9)
    times = {1: steady(6.0), 8: steady(1.0)}
    assert at(task, 1, 2, 7, 8, times=times) == pytest.approx([1.0, 2.0, 5.25, 6.0])


@pytest.mark.parametrize("few", [steady(1.0, ENOUGH - 1), measured(*[1.0, 1.4] * ENOUGH)], ids=["few", "scattered"])
def test_what_is_not_trusted_is_not_used(few):
    task = spec("a", throughput=LINE, flops=100.0)
    assert few.mean_s == 0
    assert at(task, 2, 4, times={2: few}) == pytest.approx([2.0, 3.0])
    assert not known(spec("a", throughput={}, flops=100.0), {2: few})


def test_iteration_times_within_the_band_are_trusted():
    assert measured(*[1.0, 1.1] * ENOUGH).mean_s == pytest.approx(1.05)


def test_one_bad_iteration_is_forgotten():
    times = steady(1.0, MEMORY)
    times = added(times, 10.0)
    assert times.mean_s == 0
    for _ in range(5 * MEMORY):
        times = added(times, 1.0)
    assert times.mean_s == pytest.approx(1.0, rel=0.01)


def test_without_flops_measured_times_only_shape_the_table():
    task = spec("a", throughput=LINE)
    times = {2: steady(1.0, 50), 4: steady(0.8)}
    assert at(task, 2, 4, times=times) == pytest.approx([2.0, 2.5])
    assert not known(spec("a", throughput={}), times)
    assert known(task, {})
    assert known(spec("a", throughput={}, flops=2.0), times)
