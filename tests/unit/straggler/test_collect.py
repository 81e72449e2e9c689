"""Records of ranks become iterations on one clock."""

import random

import numpy as np
import pytest
from helpers.straggler import GC, records
from unicron_straggler import collect
from unicron_straggler.analysis.measures import analyze
from unicron_straggler.collect import MISSING, REGROUPED, TOO_LARGE, Collector, as_fast_as_others, offsets, trace_of

from unicron.contracts.timings import Op


def fed(*iterations):
    collector = Collector("gpt")
    for iteration in iterations:
        for timed in iteration:
            collector.add(timed)
    return collector


def test_an_iteration_is_whole_when_every_rank_is_there_whatever_the_order():
    ranks = records(10)
    random.Random(1).shuffle(ranks)
    collector = fed(ranks[:3])
    assert collector.whole == []
    collector.add(ranks[3])
    collector.add(ranks[3])
    [step] = collector.whole
    assert [rank.worker for rank in step.ranks] == ["gpt-0", "gpt-1", "gpt-2", "gpt-3"]
    assert not collector.dropped


def test_iterations_with_missing_ranks_are_left_out_and_counted():
    collector = fed(records(10), records(20)[:3], records(30), records(40)[1:])
    assert [step.iteration for step in collector.whole] == [10, 30]
    assert collector.dropped == {MISSING: 1}
    late = records(20)[3]
    collector.add(late)
    assert [step.iteration for step in collector.whole] == [10, 30], "what comes too late is ignored"
    collector = fed(*(records(iteration)[:1] for iteration in range(0, 100, 10)))
    assert collector.dropped == {MISSING: 10 - collect.OPEN}, "no more than some wait"


def test_a_new_membership_begins_anew_and_what_is_late_of_the_old_one_is_ignored():
    collector = fed(records(10), records(20)[:2], records(20, world_size=3, epoch=2))
    collector.add(records(30)[0])
    assert [step.iteration for step in collector.whole] == [20]
    assert collector.world_size == 3
    assert collector.dropped == {REGROUPED: 2}


def test_what_is_held_has_a_limit(monkeypatch):
    monkeypatch.setattr(collect, "MOST_OPS", 70)
    collector = fed(records(10), records(20))
    assert not collector.full
    assert fed(records(10), records(20), records(30)).full, "a window ends early"
    assert len(collector.take_window()) == 2
    assert fed(records(10, microbatches=20), records(20)).dropped == {TOO_LARGE: 1}


def test_clocks_that_differ_make_no_difference():
    straight = [fed(records(n, slow=2)).whole[0] for n in range(0, 100, 10)]
    skewed = [fed(records(n, slow=2, skew_s=0.7)).whole[0] for n in range(0, 100, 10)]
    assert offsets(skewed) == pytest.approx([0, 0.7, 1.4, 2.1], abs=1e-6)
    ours, theirs = analyze(trace_of("gpt", skewed)[0]), analyze(trace_of("gpt", straight)[0])
    assert ours.slowdown == pytest.approx(theirs.slowdown, rel=1e-5)
    assert ours.trustworthy
    assert theirs.slowdown > 1.2


def test_one_odd_iteration_does_not_move_the_clock():
    steps = [fed(records(n, skew_s=0.2)).whole[0] for n in range(0, 90, 10)]
    steps.append(fed(records(90, skew_s=5.0)).whole[0])
    assert offsets(steps) == pytest.approx([0, 0.2, 0.4, 0.6], abs=1e-6)


def test_microbatches_that_not_every_rank_has_are_left_out():
    steps = [fed(records(n, microbatches=[3, 3, 2, 2])).whole[0] for n in range(0, 50, 10)]
    trace, left_out = trace_of("gpt", steps)
    assert left_out == 5 * 2 * 2
    assert analyze(trace).slowdown == pytest.approx(1.0, abs=0.05)


def test_collections_of_some_ranks_in_some_iterations_fit_in():
    steps = []
    for iteration in range(0, 50, 10):
        ranks = records(iteration)
        if iteration == 20:
            ranks[1].ops.append(Op(kind=GC, microbatch=-1, start_us=180_000, duration_us=90_000))
        steps.append(fed(ranks).whole[0])
    found = analyze(trace_of("gpt", steps)[0])
    assert found.step_slowdown[2] > 1.3
    assert np.delete(found.step_slowdown, 2) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("factor", [1.2, 1.5, 2.0])
def test_without_the_slow_rank_steps_take_what_the_others_take(factor):
    slow, _ = trace_of("gpt", [fed(records(n, slow=1, factor=factor)).whole[0] for n in range(0, 100, 10)])
    healthy, _ = trace_of("gpt", [fed(records(n)).whole[0] for n in range(0, 100, 10)])
    cured = analyze(as_fast_as_others(slow, 1)).simulated_mean_s
    assert cured == pytest.approx(analyze(healthy).simulated_mean_s, rel=0.02)
    assert analyze(slow).simulated_mean_s / cured == pytest.approx(factor, rel=0.05)
