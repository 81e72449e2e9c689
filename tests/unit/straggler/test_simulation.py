"""The simulator and the measures, on small traces whose answers are worked out by hand and on larger ones made up."""

import dataclasses

import numpy as np
import pytest
from unicron_simulator import synthetic
from unicron_simulator.planting import (
    Communication,
    GarbageCollection,
    SequenceLengths,
    Shape,
    SlowedWorker,
    StageImbalance,
)
from unicron_straggler.analysis import measures, simulate, tensors
from unicron_straggler.analysis.measures import analyze
from unicron_straggler.analysis.reader import from_rows
from unicron_straggler.analysis.simulate import Scenario
from unicron_straggler.analysis.trace import CODES, Meta, Trace

from unicron.errors import InvalidInputError


def two_workers(forward=(1.0, 3.0), steps=1):
    """Two data-parallel ranks, two microbatches; a forward takes `forward`, a backward 2 s, reducing half a second."""
    rows = []
    for step in range(steps):
        begin = 100.0 * step
        ready = begin + 2 * (max(forward) + 2)
        for rank, seconds in enumerate(forward):
            at = begin
            for batch in range(2):
                rows.append((rank, 0, rank, step, "forward-compute", at, seconds, batch))
                rows.append((rank, 0, rank, step, "backward-compute", at + seconds, 2.0, batch))
                at += seconds + 2
            rows.append((rank, 0, rank, step, "grads-reduce-scatter", at, ready + 0.5 - at, -1))
            rows.append((rank, 0, rank, step, "optimizer", ready + 0.5, 0.1, -1))
    return rows


def test_a_slow_worker_among_two_by_hand():
    found = measures.analyze(from_rows(two_workers(steps=3), Meta("two", 2, 1)))
    assert found.simulated_mean_s == pytest.approx(10.6)
    assert found.traced_mean_s == pytest.approx(10.6)
    assert found.ideal_mean_s == pytest.approx(8.6)  # 2 s a forward
    assert found.slowdown == pytest.approx(10.6 / 8.6)
    assert found.waste == pytest.approx(2 / 10.6)
    assert found.by_op["forward-compute"] == pytest.approx(10.6 / 8.6)
    assert found.by_op["backward-compute"] == pytest.approx(1)
    assert found.by_dp == pytest.approx([1, 10.6 / 8.6])
    assert found.by_stage == pytest.approx([10.6 / 8.6])
    assert found.worker_exact[:, 0] == pytest.approx([1, 10.6 / 8.6])
    assert found.slowest_ranks == (1,)
    assert found.m_w == pytest.approx(1)
    assert found.durations["grads-reduce-scatter"].ravel() == pytest.approx([0.5] * 6)
    assert list(found.steps) == [0, 1, 2]
    assert found.trustworthy


def test_what_is_not_recorded_shows_as_launch_delay():
    rows = [(*row[:5], row[5] + (1.0 if row[4] == "optimizer" else 0), *row[6:]) for row in two_workers()]
    found = measures.analyze(from_rows(rows, Meta("late", 2, 1)))
    assert found.launch_slowdown == pytest.approx(11.6 / 10.6)
    assert not found.trustworthy


def test_without_slowdown_the_shares_have_no_value():
    found = measures.analyze(from_rows(two_workers(forward=(1.0, 1.0)), Meta("even", 2, 1)))
    assert found.slowdown == 1
    assert np.isnan(found.m_w)
    assert np.isnan(found.m_s)


FORWARDS = {0: ((0, 0, 0), (1, 0, 1), (0, 1, 2), (1, 1, 3)), 1: ((0, 0, 1), (1, 0, 2), (0, 1, 3), (1, 1, 4))}
"""Two microbatches through two chunks on two stages: microbatch, chunk and start of each forward (1 s), by stage."""


def interleaved(backwards, longer=(), *, idle_transfers=False):
    """Return an interleaved trace (pp 2, vpp 2, two microbatches).

    Args:
        backwards: start of each backward by stage; each takes 2 s.
        longer: (stage, place) of backwards that take 4 s.
        idle_transfers: record sends and receives where nothing is transferred, as some recorders do.
    """
    rows = []

    def add(name, stage, start, duration, seq, chunk=-1, batch=-1):
        rows.append((0, stage, stage, 0, CODES[name], start, duration, seq, chunk, batch, chunk * 2 + stage))

    ended = {}
    for stage in (0, 1):
        batches = [(0, 1), (1, 1), (0, 0), (1, 0)]
        for place, (batch, chunk, start) in enumerate(FORWARDS[stage]):
            add("forward-compute", stage, start, 1, place, chunk, batch)
            ended["forward", stage, chunk, batch] = start + 1
        for place, (batch, chunk) in enumerate(batches):
            seconds = 4 if (stage, place) in longer else 2
            add("backward-compute", stage, backwards[stage][place], seconds, place, chunk, batch)
            ended["backward", stage, chunk, batch] = backwards[stage][place] + seconds
    there, back = [(0, 0), (1, 0), (0, 1), (1, 1)], [(0, 1), (1, 1), (0, 0), (1, 0)]
    for way, edge, order in (("forward", (1, 1), there), ("backward", (0, 0), back)):
        forward = way == "forward"
        for stage in (0, 1):
            sends = [(chunk, batch) for batch, chunk in order if idle_transfers or (stage, chunk) != edge]
            for seq, (chunk, batch) in enumerate(sends):
                add(f"{way}-send", stage, ended[way, stage, chunk, batch], 0, seq)
            source = (0, 0) if forward else (1, 1)
            receives = [(chunk, batch) for batch, chunk in order if idle_transfers or (stage, chunk) != source]
            for seq, (chunk, batch) in enumerate(receives):
                before = chunk if (stage == 1) == forward else chunk + (-1 if forward else 1)
                add(f"{way}-recv", stage, ended.get((way, 1 - stage, before, batch), 0), 0, seq)
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    for place in (5, 6):
        columns[place] = columns[place].astype(float)
    return Trace(Meta("interleaved", 1, 2, vpp_size=2), *columns)


PLAIN = {0: (7, 9, 11, 13), 1: (5, 7, 9, 11)}
HELD_UP = {0: (9, 11, 13, 15), 1: (5, 9, 11, 13)}
"""Starts of the backwards if the first one on the last stage takes 4 s: all that follow wait for it."""


@pytest.mark.parametrize("idle_transfers", [False, True])
def test_an_interleaved_pipeline_is_simulated_by_the_order_of_its_trace(idle_transfers):
    found = measures.analyze(interleaved(PLAIN, idle_transfers=idle_transfers))
    assert found.simulated_mean_s == found.traced_mean_s == found.ideal_mean_s == 15
    found = measures.analyze(interleaved(HELD_UP, longer={(1, 0)}, idle_transfers=idle_transfers))
    assert found.simulated_mean_s == found.traced_mean_s == 17
    assert found.problems == ()


def test_an_interleaved_trace_without_its_chunks_is_refused():
    whole = interleaved(PLAIN)
    with pytest.raises(InvalidInputError, match=r"wrong meta: .* model chunks -1 to 1, and vpp_size is 1"):
        measures.analyze(dataclasses.replace(whole, meta=Meta("interleaved", 1, 2)))
    with pytest.raises(InvalidInputError, match=r"operations without partner: stage 0 .* check pp_size and vpp_size"):
        measures.analyze(dataclasses.replace(whole, mc=np.zeros(len(whole), int)))


SHAPE = Shape(dp=3, pp=3, microbatches=4, steps=5)


@pytest.fixture(scope="module")
def job():
    return tensors.job(synthetic.make(SHAPE, seed=3, plants=[SlowedWorker(1, 2, 1.7)]))


@pytest.mark.parametrize("dp", [1, 3])
@pytest.mark.parametrize("pp", [1, 2, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 6])
@pytest.mark.parametrize("steps", [1, 3])
def test_jobs_of_any_shape_are_simulated_as_they_were_played(dp, pp, microbatches, steps):
    shape = Shape(dp, pp, microbatches, steps)
    found = measures.analyze(synthetic.make(shape, seed=7))
    assert found.step_simulated_s == pytest.approx(synthetic.step_times(shape, seed=7), rel=1e-9)
    assert found.launch_slowdown == pytest.approx(1, rel=1e-9)
    assert found.problems == ()
    assert found.worker_exact.shape == (dp, pp)
    assert found.step_worker_exact.shape == (steps, dp, pp)
    assert {each.shape[0] for each in found.durations.values()} == {steps}


def test_one_rank_alone_is_as_if_all_others_were_fixed(job):
    ideal = measures.ideals(job).chosen
    scenarios = [Scenario(), Scenario(stages=frozenset({2}))]
    alone = simulate.alone_times(job.graph, job.durations, ideal, scenarios)
    for rank in range(SHAPE.dp):
        others = np.repeat((np.arange(SHAPE.dp) != rank)[:, None], SHAPE.pp, axis=1)
        fixed = [dataclasses.replace(one, fixed=others) for one in scenarios]
        expected = simulate.step_times(job.graph, job.durations, ideal, fixed)
        assert alone[:, :, rank] == pytest.approx(expected)


def test_with_nothing_as_traced_a_step_takes_its_ideal_time(job):
    ideal = measures.ideals(job).chosen
    found = simulate.step_times(job.graph, job.durations, ideal, [Scenario(codes=frozenset())])
    assert found == pytest.approx(simulate.ideal_time(job.graph, ideal))


def test_blocks_of_steps_change_nothing(job, monkeypatch):
    ideal = measures.ideals(job).chosen
    scenarios = [Scenario(), Scenario(codes=frozenset({CODES["forward-compute"]}))]
    whole = [run(job.graph, job.durations, ideal, scenarios) for run in (simulate.step_times, simulate.alone_times)]
    monkeypatch.setattr(simulate, "BLOCK", 2 * 2 * SHAPE.dp)
    parts = [run(job.graph, job.durations, ideal, scenarios) for run in (simulate.step_times, simulate.alone_times)]
    for one, other in zip(whole, parts, strict=True):
        assert np.array_equal(one, other)


# --- traces made up fit the dependency model: the analysis shares no code with their player --------------------------


SMALL = Shape(dp=3, pp=4, microbatches=6, steps=3)
PLANTS = [
    SlowedWorker(2, 1, 1.5),
    StageImbalance(1.4),
    SequenceLengths(0.5),
    GarbageCollection(0.5, 0.5),
    GarbageCollection(0.5, 0.5, recorded=True),
    Communication(0.2, 0.3),
    Communication(0.2, 1, link=(1, 2)),
    Communication(2, 0.4, collective=True),
]


@pytest.mark.parametrize("plant", PLANTS, ids=str)
def test_every_plant_costs_time_and_leaves_a_sound_trace(plant):
    trace = synthetic.make(SMALL, 1, [plant])
    analysis = analyze(trace)
    assert analysis.problems == ()
    expected = pytest.approx(synthetic.step_times(SMALL, 1, [plant]), rel=1e-9)
    assert analysis.step_simulated_s == expected
    assert analysis.step_traced_s == expected
    assert analysis.simulated_mean_s > 1.03 * synthetic.step_times(SMALL, 1).mean()


def test_the_same_seed_gives_the_same_trace_and_plants_do_not_touch_one_another():
    kinds = PLANTS[:4] + PLANTS[-1:]
    one, other = synthetic.make(SMALL, 1, kinds), synthetic.make(SMALL, 1, kinds[::-1])
    assert np.array_equal(one.duration, other.duration)
    assert not np.array_equal(one.duration, synthetic.make(SMALL, 2, kinds).duration)
    paused = [synthetic.make(SMALL, 1, [*others, PLANTS[4]]) for others in ([], PLANTS[:2])]
    collected = [trace.duration[trace.optype == CODES["gc"]] for trace in paused]
    assert np.allclose(*collected)


def test_computes_follow_one_forward_one_backward():
    trace = synthetic.make(Shape(1, 3, 4, 1))
    for stage, expected in ((0, "FFFBFBBB"), (1, "FFBFBFBB"), (2, "FBFBFBFB")):
        mine = (trace.stage == stage) & np.isin(trace.optype, [CODES["forward-compute"], CODES["backward-compute"]])
        kinds = trace.optype[mine][np.argsort(trace.start[mine])]
        assert "".join("F" if kind == CODES["forward-compute"] else "B" for kind in kinds) == expected


def test_sequence_lengths_move_forward_and_backward_together_and_pauses_do_not():
    long = analyze(synthetic.make(SMALL, 1, [SequenceLengths(0.5)]))
    assert long.correlation_normalised > 0.95
    paused = analyze(synthetic.make(SMALL, 1, [GarbageCollection(0.5, 0.5)]))
    assert abs(paused.correlation_normalised) < 0.3
