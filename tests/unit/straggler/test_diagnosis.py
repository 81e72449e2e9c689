"""Planted causes are found; on the study's traces, what the study found. The benchmark does it over 200 seeds."""

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from unicron_simulator import planting, synthetic
from unicron_simulator.planting import (
    Communication,
    GarbageCollection,
    SequenceLengths,
    Shape,
    SlowedWorker,
    StageImbalance,
)
from unicron_straggler.analysis import reader
from unicron_straggler.analysis.diagnosis import NONE, diagnose
from unicron_straggler.analysis.measures import analyze
from unicron_straggler.analysis.parts import COMPUTES, LENGTHS, NETWORK, PAUSES, SLOW, STAGE, parts, without
from unicron_straggler.analysis.trace import Meta

from benchmarks import straggler_diagnosis as benchmark
from benchmarks.straggler import DATA
from unicron.train.balance import balance, round_robin

JOB = Shape(dp=8, pp=4, microbatches=8, steps=10)
FLAT = Shape(dp=4, pp=1, microbatches=8, steps=10)
LINK = Communication(0.2, 1, link=(1, 1))


def diagnosed(shape, *plants, **options):
    trace = synthetic.make(shape, 1, plants)
    return diagnose(analyze(trace), **options)


@pytest.mark.parametrize("case", benchmark.CASES, ids=" + ".join)
def test_the_costlier_cause_comes_first(case):
    for seed in (1_000_000, 1_000_004):
        shape, plants, costs = benchmark.scene(case, seed)
        assert benchmark.first_cause(shape, seed, plants)[0] == case[int(np.argmax(costs))], (seed, plants)


def test_nothing_is_said_of_healthy_jobs():
    assert benchmark.healthy(range(1_000_000, 1_000_020))["alarms"] == []


def test_a_slow_worker_is_named_with_its_slowness():
    (found,) = diagnosed(JOB, SlowedWorker(2, 1, 1.4))
    assert (found.cause, found.ranks) == (SLOW, (10,))
    assert found.evidence["workers"][0]["slower"] == pytest.approx(1.4, rel=0.03)
    without = synthetic.step_times(JOB, 1).mean()
    assert found.gain == pytest.approx(
        synthetic.step_times(JOB, 1, [SlowedWorker(2, 1, 1.4)]).mean() / without, rel=0.01
    )
    assert "Drain the node of rank 10 (data-parallel rank 2, stage 1, 1.38 times as long)" in found.cure


def test_a_slow_worker_is_seen_without_stages_and_among_two():
    assert diagnosed(FLAT, SlowedWorker(3, 0, 1.2))[0].ranks == (3,)
    assert diagnosed(Shape(2, 1, 4, 5), SlowedWorker(1, 0, 1.2))[0].ranks == (1,)


def test_a_worker_slow_in_forward_alone_among_two_with_two_microbatches_is_seen():
    rows = []
    for rank, forward in ((0, 1.0), (1, 3.0)):
        for number in range(2):
            begin = number * (forward + 2)
            rows.append((rank, 0, rank, 0, "forward-compute", begin, forward, number))
            rows.append((rank, 0, rank, 0, "backward-compute", begin + forward, 2.0, number))
        rows.append((rank, 0, rank, 0, "grads-reduce-scatter", 2 * (forward + 2), 10.5 - 2 * (forward + 2), -1))
    trace = reader.from_rows(rows, Meta("two", 2, 1))
    (found,) = diagnose(analyze(trace))
    assert (found.cause, found.ranks, found.share) == (SLOW, (1,), pytest.approx(1))
    assert found.gain == pytest.approx(10.5 / 6.5)


def test_taking_nothing_away_leaves_the_job_as_it_is():
    for shape in (JOB, FLAT):
        analysis = analyze(synthetic.make(shape, 1, [SequenceLengths(0.5), SlowedWorker(1, 0, 1.5)]))
        same = without(analysis, parts(analysis), [])
        for op in COMPUTES:
            assert np.allclose(same[op], analysis.durations[op])


def test_a_worker_that_is_slow_in_half_of_the_steps_does_not_pass_for_one_that_pauses():
    assert [one.cause for one in diagnosed(JOB, SlowedWorker(2, 1, 1.8, share=0.5))] == [SLOW]


def test_the_last_stage_is_told_how_many_layers_to_give_away():
    (found,) = diagnosed(JOB, StageImbalance(1.4), layers=10)
    assert (found.cause, found.evidence["stage"]) == (STAGE, 3)
    assert found.evidence["longer_than_others"] == pytest.approx(1.4, rel=0.01)
    assert "Move 3 of the 10 layers of the last stage" in found.cure
    times = synthetic.step_times(JOB, 1, [StageImbalance(1.1), *(StageImbalance(1.1, stage) for stage in range(3))])
    assert found.evidence["seconds_after"] == pytest.approx(times.mean(), rel=0.01)
    assert "about 30 % of the layers" in diagnosed(JOB, StageImbalance(1.4))[0].cure


def test_a_stage_that_no_whole_layer_can_leave_is_told_so():
    (found,) = diagnosed(JOB, StageImbalance(1.3), layers=2)
    assert found.evidence["move_layers"] == 0
    assert "No whole layer" in found.cure


def test_uneven_lengths_are_told_what_redistributing_brings():
    (found,) = diagnosed(JOB, SequenceLengths(0.5))
    assert found.cause == LENGTHS
    gained = synthetic.step_times(JOB, 1, [SequenceLengths(0.5)]).mean() / synthetic.step_times(JOB, 1).mean()
    assert found.gain == pytest.approx(gained, rel=0.03)
    assert 1 < found.evidence["gain_whole_microbatches_moved"] <= found.evidence["gain_sequences_balanced"]


def packed(shape, lengths, share_out):
    """Return a job whose microbatches cost what the sequences in them do, shared out by `share_out`."""
    times = planting.draw(shape, 1)
    for step, mine in enumerate(lengths):
        shares = share_out(mine, shape.dp, shape.microbatches)
        squares = np.array([[sum(mine[place] ** 2 for place in places) for places in rank] for rank in shares]).T
        for op, part in (("forward-compute", 0.5), ("backward-compute", 0.42)):
            times[op][:, :, step] *= (1 + part * (squares / squares.mean() - 1))[:, None]
    return synthetic.as_trace(synthetic.play(shape, times), shape, "packed")


def test_what_the_balancer_brings_lies_between_the_two_gains_that_are_told():
    shape = Shape(dp=8, pp=2, microbatches=8, steps=8)
    drawn = np.random.default_rng(5)
    lengths = [np.minimum(32768, drawn.lognormal(7.6, 1.3, 512)).astype(int).tolist() for _ in range(shape.steps)]
    trace = packed(shape, lengths, lambda mine, *sizes: round_robin(len(mine), *sizes))
    before, after = analyze(trace), analyze(packed(shape, lengths, balance))
    told = diagnose(before)[0].evidence
    gained = before.simulated_mean_s / after.simulated_mean_s
    assert 1.2 < told["gain_whole_microbatches_moved"] < gained < told["gain_sequences_balanced"]


def test_variation_of_forward_alone_is_not_taken_for_lengths():
    noisy = Shape(dp=8, pp=2, microbatches=8, steps=10, noise=0.06)
    assert LENGTHS not in [one.cause for one in diagnosed(noisy)]


@pytest.mark.parametrize("recorded", [False, True])
def test_pauses_are_counted(recorded):
    plant = GarbageCollection(0.3, 1.0, recorded=recorded)
    (found,) = diagnosed(JOB, plant)
    assert found.cause == PAUSES
    assert found.evidence["pauses_a_worker_and_step"] == pytest.approx(0.3, abs=0.05)
    assert found.evidence["median_pause_s"] == pytest.approx(1, rel=0.1)
    assert (found.evidence["recorded_as_gc"] > 0) == recorded
    assert recorded or found.evidence["in_forward_share"] > 0.95


def test_a_slow_link_is_named_and_flapping_ones_are_not():
    (found,) = diagnosed(JOB, LINK)
    assert (found.cause, found.ranks[0] in {9, 17}) == (NETWORK, True)  # either end of the link
    (found,) = diagnosed(JOB, Communication(0.2, 0.2))
    assert (found.cause, found.ranks) == (NETWORK, ())
    (found,) = diagnosed(FLAT, Communication(1.5, 0.4, collective=True))
    assert found.evidence["slowest_type"] in {"params-all-gather", "grads-reduce-scatter"}


def test_healthy_jobs_and_unexplained_ones_differ_in_words():
    trace = synthetic.make(JOB, 1)
    analysis = analyze(trace)
    (found,) = diagnose(analysis)
    assert (found.cause, found.share, found.gain) == (NONE, 0, 1)
    assert "as chance has it" in found.cure
    (found,) = diagnose(replace(analysis, slowdown=1.3, waste=0.23))
    assert "23.0 % of the time is lost to stragglers, but no cause" in found.cure


def test_diagnoses_can_be_told_as_json():
    for plant in (SlowedWorker(2, 1, 1.4), StageImbalance(1.4), SequenceLengths(0.5), GarbageCollection(0.3, 1), LINK):
        for found in diagnosed(JOB, plant):
            json.dumps(dict(found.evidence), allow_nan=False)


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no folder {DATA}; set UNICRON_DATA")
@pytest.mark.parametrize(("name", "cause", "ranks"), [("AR", SLOW, (0,)), ("SE", LENGTHS, ())])
def test_the_jobs_of_the_study(name, cause, ranks):
    trace = reader.read(DATA / f"trace-{name}.parquet", reader.read_meta(DATA / f"meta-{name}.yaml"))
    first = diagnose(analyze(trace))[0]
    assert (first.cause, first.ranks) == (cause, ranks)
    assert first.share > 0.6


@pytest.mark.slow
def test_the_benchmark_counts_what_was_named_for_what():
    result = benchmark.measure(Namespace(first=1_000_000, seeds=1, healthy=3), Path())
    figures, details = result.figures, result.details
    assert sum(sum(told.values()) for told in details["confusion"].values()) == len(benchmark.CASES)
    assert set(details["cases"]) == {" + ".join(case) for case in benchmark.CASES}
    assert figures["alone_right_percent"] == figures["healthy_silent_percent"] == 100
    assert figures["pairs_worst_right_percent"] <= figures["pairs_right_percent"] <= 100


def test_what_a_cause_costs_is_shared_out_over_both_of_a_pair():
    plants = [SlowedWorker(2, 1, 1.5), StageImbalance(1.5, 3)]  # each hides behind the other
    together = benchmark.costs(JOB, 1, plants)
    alone = [benchmark.costs(JOB, 1, [plant])[0] for plant in plants]
    assert max(together) < max(alone)
    assert min(together) > 0.05
