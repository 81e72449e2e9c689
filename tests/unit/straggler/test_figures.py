"""The analysis against the published results of the study's own analyzer; skipped where the data folder is missing."""

import json
import math

import pytest
from unicron_straggler.analysis import measures, reader, tensors
from unicron_straggler.analysis.trace import OPTYPES

from benchmarks.straggler import DATA

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason=f"no folder {DATA}; set UNICRON_DATA")

ACCURACY = 1e-5
"""The authors' analyzer computes in single precision."""


@pytest.fixture(scope="module", params=["AR", "SE"])
def name(request):
    return request.param


@pytest.fixture(scope="module")
def trace(name):
    return reader.read(DATA / f"trace-{name}.parquet", reader.read_meta(DATA / f"meta-{name}.yaml"))


@pytest.fixture(scope="module")
def analysis(trace):
    return measures.analyze(trace)


def published(kind, name):
    return json.loads((DATA / f"{kind}-{name}.json").read_text())


def differences(found, expected, path=""):
    """Return where two nested values differ by more than the accuracy."""
    if isinstance(expected, dict):
        if set(found) != set(expected):
            return [(path, sorted(set(found) ^ set(expected)))]
        return [one for key in expected for one in differences(found[key], expected[key], f"{path}/{key}")]
    if isinstance(expected, float):
        return [] if math.isclose(found, expected, rel_tol=ACCURACY, abs_tol=1e-12) else [(path, found, expected)]
    return [] if found == expected else [(path, found, expected)]


def test_every_figure_of_the_ground_truth_is_met_under_its_name(name, analysis):
    expected = published("groundtruth", name)
    found = analysis.as_json()
    assert differences(found, expected) == []
    assert list(found) == list(expected)
    for sorted_by_slowdown in ("S_t", "S_dp", "S_pp", "step_S"):
        assert list(found[sorted_by_slowdown]) == list(expected[sorted_by_slowdown])


def test_every_figure_of_the_published_result_is_met(name, analysis):
    expected = published("result", name)
    steps = [str(step) for step in analysis.steps]

    def by_step(times):
        return dict(zip(steps, times.tolist(), strict=True))

    def per_step(array, names):
        return {step: dict(zip(names, row, strict=True)) for step, row in zip(steps, array.tolist(), strict=True)}

    ops = {op: by_step(slowdowns) for op, slowdowns in analysis.step_by_op.items()}
    json_names = analysis.as_json()
    meta = json_names["meta"]
    ranks, stages = ([str(at) for at in range(meta[size])] for size in ("dp_size", "pp_size"))
    found = {
        "job_meta": meta,
        "step_t_base": by_step(analysis.step_traced_s),
        "step_t_nodelay": by_step(analysis.step_simulated_s),
        "step_t_noblk": dict.fromkeys(steps, analysis.step_ideal_s),
        "launch_slowdown": analysis.launch_slowdown,
        "blocking_slowdown": analysis.slowdown,
        "blocking_step_slowdown": json_names["step_S"],
        "launch_step_slowdown": by_step(analysis.step_traced_s / analysis.step_simulated_s),
        "blocking_decompose_by_dp_rank": json_names["S_dp"],
        "blocking_decompose_by_stage": json_names["S_pp"],
        "blocking_decompose_by_optype": json_names["S_t"],
        "blocking_decompose_by_dp_rank_per_step": per_step(analysis.step_by_dp, ranks),
        "blocking_decompose_by_stage_per_step": per_step(analysis.step_by_stage, stages),
        "blocking_decompose_by_optype_per_step": {step: {op: ops[op][step] for op in ops} for step in steps},
    }
    known = {key: value for key, value in expected.items() if value is not None}
    assert differences(found, known) == []


def test_the_shares_of_the_slowest_workers_and_of_the_last_stage_are_those_published(name, analysis):
    assert analysis.m_w == pytest.approx(published("mw", name)["Mw"], rel=ACCURACY)
    assert analysis.m_s == pytest.approx(published("ms", name)["Ms"], rel=ACCURACY)


def test_correlation_normalised_per_worker_and_variation_are_as_the_readme_tells(name, analysis):
    expected = {"AR": (0.889, 0.0165), "SE": (0.992, 0.219)}[name]
    assert analysis.correlation_normalised == pytest.approx(expected[0], abs=5e-4)
    assert analysis.forward_variation == pytest.approx(expected[1], rel=5e-3)


def test_the_graph_is_the_published_one(name, trace):
    expected = published("deps", name)
    graph = tensors.job(trace).graph
    names = [f"{OPTYPES[code]}_{seq}_{stage}" for code, seq, stage in graph.keys]
    assert set(names) == set(expected["dep_on"])
    together = {frozenset(group): set() for group in expected["comm_groups"]}
    alone = set(expected["dep_on"]) - {op for group in together for op in group}
    together |= {frozenset({op}): set() for op in alone}
    for group, waits in together.items():
        waits.update(wait for op in group for wait in expected["dep_on"][op])
    waves = [({names[place] for place in wave.members}, {names[place] for place in wave.waits}) for wave in graph.waves]
    assert {frozenset(members): waits for members, waits in waves} == together
    synchronous = {names[place] for wave in graph.waves if wave.synchronous for place in wave.members}
    assert synchronous == set(expected["need_dp_sync"])


def test_both_traces_are_sound(analysis):
    assert analysis.problems == ()
    assert analysis.trustworthy
