"""T(t, x) from its three sources."""

import pytest
from helpers.planner import spec
from msgspec.structs import replace
from unicron_planner.throughput import ENOUGH, MEMORY, MeasuredSize, added, check, estimate, has_known_flops, least

from unicron.contracts.tasks import ModelSpec
from unicron.errors import InvalidInputError

LINE = {2: 2.0, 4: 3.0}


def measured(*seconds):
    total = MeasuredSize()
    for one in seconds:
        total = added(total, one)
    return total


def steady(seconds, count=ENOUGH):
    return measured(*[seconds] * count)


def at(task, *sizes, times=None, nominal=1.0):
    found = estimate(task, times or {}, max(sizes), nominal)
    by_size = dict(zip(found.sizes.tolist(), found.flops.tolist(), strict=True))
    return [by_size[size] for size in sizes]


def test_the_table_is_a_line_between_its_rows_and_keeps_the_efficiency_beyond_them():
    task = spec("a", throughput=LINE, most=8)
    assert at(task, 1, 2, 3, 4, 8) == pytest.approx([1.0, 2.0, 2.5, 3.0, 6.0])


def test_nothing_known_is_proportional_to_workers():
    assert at(spec("a", throughput={}), 1, 4, nominal=3.0) == [3.0, 12.0]


def test_a_trusted_measurement_outranks_the_table_and_rescales_its_other_sizes():
    task = spec("a", throughput=LINE, flops=3.0)
    assert at(task, 2, 4, times={2: steady(3.0)}) == pytest.approx([1.0, 1.5])


def test_the_nearest_measured_size_is_the_anchor():
    task = spec("a", throughput={}, flops=6.0, most=9)
    times = {1: steady(6.0), 8: steady(1.0)}
    assert at(task, 1, 2, 7, 8, times=times) == pytest.approx([1.0, 2.0, 5.25, 6.0])


def test_one_bad_measurement_moves_nothing_but_its_own_size():
    task = spec("a", throughput={}, flops=8.0, most=9)
    # on 4 workers half as fast as it should be
    times = {1: steady(8.0), 2: steady(4.0), 4: steady(4.0), 8: steady(1.0)}
    assert at(task, 3, 4, 5, 6, times=times) == pytest.approx([3.0, 2.0, 5.0, 6.0])


@pytest.mark.parametrize("few", [steady(1.0, ENOUGH - 1), measured(*[1.0, 1.4] * ENOUGH)], ids=["few", "scattered"])
def test_what_is_not_trusted_is_not_used(few):
    task = spec("a", throughput=LINE, flops=100.0)
    assert few.mean_s == 0
    assert at(task, 2, 4, times={2: few}) == pytest.approx([2.0, 3.0])
    assert not has_known_flops(spec("a", throughput={}, flops=100.0), {2: few})


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
    assert not has_known_flops(spec("a", throughput={}), times)
    assert has_known_flops(task, {})
    assert has_known_flops(spec("a", throughput={}, flops=2.0), times)


# --- the closed-form model -------------------------------------------------------------------------------------------

SEVEN = ModelSpec(layers=32, hidden=4096, heads=32, sequence=2048, vocabulary=51200, batch=1024, accelerator="A800")
HUGE = ModelSpec(layers=96, hidden=12288, heads=96, sequence=2048, vocabulary=51200, batch=1024, accelerator="A800")


def modelled(name, model, most=64, **fields):
    return replace(spec(name, most=most, throughput={}, **fields), model=model)


def test_a_model_tells_which_sizes_are_feasible_and_what_they_achieve():
    found = estimate(modelled("a", SEVEN, unit=8), {}, 64, 1.0)
    assert found.sizes.tolist() == [8, 16, 32, 64]  # 48 and 56 have a factor that divides neither layers nor batch
    assert set(found.sources) == {"model"}
    flops = dict(zip(found.sizes.tolist(), found.flops.tolist(), strict=True))
    assert 0.2 < flops[64] / (64 * 312e12) < 0.7
    assert "tensor" in str(found.curve.configuration(0))


def test_the_user_s_table_outranks_the_model_and_a_measurement_both():
    task = modelled("a", SEVEN, unit=8, flops=1e17)
    table = replace(task, throughput={8: 1e15, 64: 8e15})
    assert estimate(table, {}, 64, 1.0).flops[-1] == 8e15
    found = estimate(task, {64: steady(10.0)}, 64, 1.0)
    assert (found.sources[-1], found.flops[-1]) == ("measured", 1e16)
    plain = estimate(task, {}, 64, 1.0)
    assert found.flops[0] / plain.flops[0] == pytest.approx(found.flops[-1] / plain.flops[-1])


def test_a_task_that_never_fits_says_what_it_would_take():
    assert least(modelled("a", SEVEN, unit=8))[0] > 0
    size, reason = least(modelled("a", HUGE, most=8))
    assert size == 0
    assert "175" in reason or "174" in reason
    assert "8" in reason


def test_a_model_that_nothing_can_be_worked_out_for_is_refused():
    with pytest.raises(InvalidInputError, match="anchor_workers 7"):
        check(modelled("a", replace(SEVEN, anchor_workers=7, anchor_mfu=0.4)))
