"""Traces made up fit the dependency model: the analysis, which shares no code with their player, plays them again."""

import numpy as np
import pytest
from unicron_straggler.analysis.measures import analyze
from unicron_straggler.analysis.trace import CODES

from benchmarks import synthetic
from benchmarks.planting import Communication, GarbageCollection, SequenceLengths, Shape, SlowWorker, StageImbalance

SMALL = Shape(dp=3, pp=4, microbatches=6, steps=3)
PLANTS = [
    SlowWorker(2, 1, 1.5),
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
