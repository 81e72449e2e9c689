"""Faults of a trace are named, with what was left out and whether the result still stands."""

import dataclasses
import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from unicron_simulator import synthetic
from unicron_simulator.planting import Shape
from unicron_straggler.analysis import measures, reader
from unicron_straggler.analysis.trace import CODES, OPTYPES, Meta

from unicron.errors import InvalidInputError

SHAPE = Shape(dp=3, pp=2, microbatches=4, steps=6)
META = Meta("synthetic", 3, 2, world_size=6)
COLUMNS = ("dp_rank", "stage", "rank", "step", "optype", "start", "duration", "seq_id", "mc", "mb_id", "gmc")


@pytest.fixture(scope="module")
def healthy():
    return synthetic.make(SHAPE, seed=5)


@pytest.fixture(scope="module")
def expected(healthy):
    return measures.analyze(healthy)


def only(trace, kept):
    return dataclasses.replace(trace, **{name: getattr(trace, name)[kept] for name in COLUMNS})


def which(trace, **values):
    """Return where the columns have these values."""
    found = np.ones(len(trace), bool)
    for name, value in values.items():
        found &= getattr(trace, name) == (CODES[value] if name == "optype" else value)
    return found


def test_a_healthy_trace_has_no_problems(expected):
    assert expected.problems == ()
    assert expected.trustworthy


def test_a_missing_rank_is_left_out_and_the_result_does_not_stand(healthy):
    found = measures.analyze(only(healthy, ~which(healthy, dp_rank=1, stage=1)))
    (problem,) = found.problems
    assert (problem.name, problem.stands) == ("missing-ranks", False)
    assert problem.dropped == which(healthy, dp_rank=1, stage=0).sum()
    assert "3 data-parallel ranks" in problem.text
    assert "stages of 1:" in problem.text
    assert list(found.dp_ranks) == [0, 2]
    assert found.by_dp.shape == (2,)
    assert set(found.as_json()["S_dp"]) == {"0", "2"}
    assert not found.trustworthy


def test_a_stage_that_is_missing_altogether_is_an_error(healthy):
    with pytest.raises(InvalidInputError, match=r"missing ranks: .*\[1\].*pp_size"):
        measures.analyze(only(healthy, ~which(healthy, stage=1)))


@pytest.mark.parametrize(
    ("missing", "name", "says"),
    [
        ({"step": 2, "dp_rank": 1}, "missing-ranks", ""),
        ({"step": 1, "dp_rank": 2, "optype": "forward-recv", "seq_id": 1}, "operations-without-partner", ""),
        ({"step": 5, "dp_rank": 0, "stage": 1, "optype": "optimizer"}, "incomplete-steps", "1 of 6 steps.*: 5$"),
    ],
)
def test_a_step_in_which_something_is_missing_is_left_out(healthy, expected, missing, name, says):
    found = measures.analyze(only(healthy, ~which(healthy, **missing)))
    (problem,) = found.problems
    assert (problem.name, problem.stands) == (name, True)
    assert problem.dropped == which(healthy, step=missing["step"]).sum() - which(healthy, **missing).sum()
    assert re.search(says, problem.text)
    assert list(found.steps) == [step for step in range(6) if step != missing["step"]]
    assert found.step_traced_s == pytest.approx(np.delete(expected.step_traced_s, missing["step"]))


def test_operations_without_partner_in_every_step_are_an_error(healthy):
    with pytest.raises(InvalidInputError, match=r"operations without partner: stage 1 has 3 forward-recv.* 4 forward"):
        measures.analyze(only(healthy, ~which(healthy, optype="forward-recv", seq_id=3)))


def test_a_result_from_few_steps_does_not_stand(healthy):
    torn = (healthy.step >= 2) & (healthy.dp_rank == healthy.step % 3) & (healthy.optype == CODES["optimizer"])
    found = measures.analyze(only(healthy, ~torn))
    assert [(one.name, one.stands) for one in found.problems] == [("incomplete-steps", False)]


def test_an_operation_told_twice_in_place_of_another_is_found(healthy):
    seq_id = healthy.seq_id.copy()
    seq_id[which(healthy, step=0, dp_rank=1, stage=0, optype="backward-compute", seq_id=2)] = 1
    found = measures.analyze(dataclasses.replace(healthy, seq_id=seq_id))
    (problem,) = found.problems
    assert (problem.name, problem.stands) == ("repeated-operations", True)
    assert problem.dropped == which(healthy, step=0).sum()
    assert list(found.steps) == [1, 2, 3, 4, 5]


def test_overlapping_operations_of_one_stream_are_found(healthy):
    duration = healthy.duration.copy()
    duration[which(healthy, step=3, dp_rank=1, stage=0, optype="forward-compute", seq_id=1)] += 5
    found = measures.analyze(dataclasses.replace(healthy, duration=duration))
    (problem,) = found.problems
    assert (problem.name, problem.stands) == ("overlapping-operations", True)
    assert problem.dropped == which(healthy, step=3).sum()
    assert list(found.steps) == [0, 1, 2, 4, 5]
    duration[which(healthy, dp_rank=1, stage=0, optype="forward-compute", seq_id=1)] += 5
    found = measures.analyze(dataclasses.replace(healthy, duration=duration))
    (problem,) = found.problems
    assert (problem.name, problem.dropped, problem.stands) == ("overlapping-operations", 0, False)
    assert len(found.steps) == 6


def test_zero_steps_are_an_error(healthy):
    with pytest.raises(InvalidInputError, match="zero steps: the trace of synthetic has no operations"):
        measures.analyze(only(healthy, np.zeros(len(healthy), bool)))
    torn = (healthy.dp_rank == healthy.step % 3) & (healthy.optype == CODES["optimizer"])
    with pytest.raises(InvalidInputError, match=r"zero steps: none of the 6 steps .*optimizer on stage 0"):
        measures.analyze(only(healthy, ~torn))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"dp_size": 2}, "wrong meta: .* data-parallel ranks 0 to 2, and dp_size is 2; mend dp_size"),
        ({"pp_size": 1}, "wrong meta: .* stages 0 to 1, and pp_size is 1; mend pp_size"),
        ({"pp_size": 3}, "missing ranks: .*pp_size"),
    ],
)
def test_a_meta_that_contradicts_the_trace_is_an_error(healthy, sizes, message):
    with pytest.raises(InvalidInputError, match=message):
        measures.analyze(dataclasses.replace(healthy, meta=dataclasses.replace(META, **sizes)))


def test_sizes_that_contradict_each_other_are_told(healthy):
    found = measures.analyze(dataclasses.replace(healthy, meta=dataclasses.replace(META, world_size=7)))
    (problem,) = found.problems
    assert (problem.name, problem.stands) == ("wrong-meta", True)
    assert "world_size is 7" in problem.text


def rows(trace, names=OPTYPES):
    wanted = ("dp_rank", "stage", "rank", "step", "optype", "start", "duration", "mb_id")
    columns = [getattr(trace, name).tolist() for name in wanted]
    for dp_rank, stage, rank, step, code, *rest in zip(*columns, strict=True):
        yield dp_rank, stage, rank, step, names[code], *rest


def same(found, expected):
    assert found.slowdown == pytest.approx(expected.slowdown)
    assert found.worker_exact == pytest.approx(expected.worker_exact)
    assert found.by_op == pytest.approx(expected.by_op)


def test_rows_of_ones_own_recording_give_the_same(healthy, expected):
    order = np.random.default_rng(1).permutation(len(healthy))
    shuffled = only(healthy, order)
    later = dataclasses.replace(shuffled, start=shuffled.start + 60.0 * shuffled.step)
    same(measures.analyze(reader.from_rows(rows(later), META)), expected)


def test_unknown_op_types_are_left_out(healthy, expected):
    more = [*rows(healthy), (0, 0, 0, 0, "tp-allgather", 0.1, 0.2, -1), (0, 0, 0, 1, "data-load", 0.1, 0.2, -1)]
    found = measures.analyze(reader.from_rows(more, META))
    (problem,) = found.problems
    assert (problem.name, problem.dropped, problem.stands) == ("unknown-op-types", 2, True)
    assert "data-load, tp-allgather" in problem.text
    same(found, expected)


def test_operations_with_impossible_times_are_left_out(healthy):
    broken = list(rows(healthy))
    broken[0] = (*broken[0][:6], -1.0, broken[0][7])
    broken[1] = (*broken[1][:6], float("nan"), broken[1][7])
    found = measures.analyze(reader.from_rows(broken, META))
    names = [(one.name, one.dropped) for one in found.problems]
    assert names[0] == ("wrong-times", 2)
    assert len(names) == 2
    assert len(found.steps) == 5


def test_no_rows_are_zero_steps():
    with pytest.raises(InvalidInputError, match="zero steps"):
        measures.analyze(reader.from_rows([], META))


def events(trace):
    """Return what NDTimeline's local handler writes of a trace."""
    for dp_rank, stage, rank, step, name, start, duration, _ in rows(trace):
        place = {"rank": rank, "step": step, "tp": 0, "pp": stage}
        times = {"ts": (start + 100 * step) * 1e6, "dur": duration * 1e6}
        yield {"name": name, "cat": name, "pid": dp_rank, "tid": rank * 10, "args": place, **times, "ph": "X"}
    yield {"name": "process_name", "pid": 0, "ph": "M", "args": {"name": "dp rank[0]"}}


def test_ndtimelines_chrome_trace_gives_the_same(healthy, expected, tmp_path):
    path = tmp_path / "trace_step0_5.json"
    written = list(events(healthy))
    other_half = [one | {"args": one["args"] | {"tp": 1}} for one in written if one["ph"] == "X"]
    path.write_text(json.dumps(written + other_half))
    same(measures.analyze(reader.read(path, META)), expected)
    path.write_text(json.dumps({"traceEvents": written}))
    same(measures.analyze(reader.read(path, META)), expected)


def test_a_send_and_a_receive_of_one_name_are_two(tmp_path):
    path = tmp_path / "trace.json"
    event = {"name": "forward-send-backward-recv", "pid": 0, "tid": 0, "ts": 5e6, "dur": 1e6, "ph": "X"}
    path.write_text(json.dumps([event | {"args": {"rank": 0, "step": 3, "tp": 0, "pp": 0}}]))
    found = reader.read(path, META)
    assert [OPTYPES[code] for code in found.optype] == ["forward-send", "backward-recv"]
    assert found.duration == pytest.approx([1, 1])


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": 1}', '[{"ph": "X", "name": "gc"}]'])
def test_what_is_no_chrome_trace_is_an_error(tmp_path, text):
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(InvalidInputError, match=r"trace\.json is no chrome trace of NDTimeline"):
        reader.read(path, META)


def table(trace, **changes):
    columns = {name: getattr(trace, name) for name in COLUMNS}
    columns["start_ts"] = columns.pop("start").astype(np.float32)
    columns["duration"] = columns["duration"].astype(np.float32)
    columns["optype"] = np.array(OPTYPES)[trace.optype]
    return {name: column for name, column in (columns | changes).items() if column is not None}


@pytest.mark.parametrize("as_category", [False, True])
def test_parquet_gives_the_same(healthy, expected, tmp_path, as_category):
    written = pa.table(table(healthy))
    if as_category:
        at = written.column_names.index("optype")
        written = written.set_column(at, "optype", written.column("optype").dictionary_encode())
    pq.write_table(written, tmp_path / "trace.parquet")
    found = measures.analyze(reader.read(tmp_path / "trace.parquet", META))
    assert found.slowdown == pytest.approx(expected.slowdown, rel=1e-5)
    assert found.worker_exact == pytest.approx(expected.worker_exact, rel=1e-5)


def test_parquet_that_cant_be_used_is_an_error(healthy, tmp_path):
    path = tmp_path / "trace.parquet"
    with pytest.raises(InvalidInputError, match="can't be read"):
        reader.read(path, META)
    path.write_bytes(b"no parquet")
    with pytest.raises(InvalidInputError, match="can't be read"):
        reader.read(path, META)
    pq.write_table(pa.table(table(healthy, seq_id=None)), path)
    with pytest.raises(InvalidInputError, match="lacks the columns seq_id"):
        reader.read(path, META)
    pq.write_table(pa.table(table(healthy, mc=pa.array([None] * len(healthy), pa.int8()))), path)
    with pytest.raises(InvalidInputError, match="empty values in mc"):
        reader.read(path, META)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp_size: 4\npp_size: 0\n", "wrong meta: pp_size"),
        ("dp_size: 4\n", "wrong meta: pp_size"),
        ("dp_size: four\npp_size: 4\n", "wrong meta: dp_size .* 'four'"),
        ("dp_size: 4\npp_size: 4\nworld_size: -1\n", "wrong meta: world_size"),
        ("- 1\n", "is no mapping"),
        ("a: [", "can't be read as YAML"),
    ],
)
def test_a_meta_file_that_cant_be_used_is_an_error(tmp_path, text, message):
    path = tmp_path / "meta.yaml"
    path.write_text(text)
    with pytest.raises(InvalidInputError, match=message):
        reader.read_meta(path)


def test_a_meta_file_is_read(tmp_path):
    path = tmp_path / "meta-X.yaml"
    path.write_text("trial_name: X\ndp_size: 3\npp_size: 2\n")
    assert reader.read_meta(path) == Meta("X", 3, 2)
    with pytest.raises(InvalidInputError, match="can't be read"):
        reader.read_meta(tmp_path / "none.yaml")
