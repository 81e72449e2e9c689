"""Failure traces: generators keep to their sources, files come back as they were, bad rows are named."""

from pathlib import Path

import pytest
from unicron_simulator.policies import traces
from unicron_simulator.policies.traces import DAY, Failure, Trace

from unicron.errors import InvalidInputError

HEADER = "time_s,node,kind,repair_s\n"


@pytest.mark.parametrize(
    ("name", "nodes", "days", "sev1", "others"),
    [("trace-a", 16, 56, 10, 33), ("trace-b", 16, 7, 26, 80), ("llama3", 2048, 54, 321, 98), ("opt", 128, 57, 90, 0)],
)
def test_generators_have_the_failures_of_their_source(name, nodes, days, sev1, others):
    trace = traces.generate(name, 3)
    assert (len(trace.nodes), trace.duration_s) == (nodes, days * DAY)
    assert (trace.count("sev1"), trace.count("sev2") + trace.count("sev3")) == (sev1, others)
    assert trace == traces.generate(name, 3) != traces.generate(name, 4)


@pytest.mark.parametrize("name", traces.generators())
def test_repairs_are_within_bounds_and_nothing_fails_that_is_out(name):
    low, high = traces.generators()[name]["repair_days"]
    back, before = {}, 0.0
    for fault in traces.generate(name, 1).faults:
        assert before <= fault.at
        assert fault.at >= back.get(fault.node, 0.0)
        before = fault.at
        if fault.kind == "sev1":
            assert low * DAY <= fault.repair_s <= high * DAY
            back[fault.node] = fault.at + fault.repair_s
        else:
            assert fault.repair_s == 0


def test_another_size_keeps_the_rate():
    counts = [len(traces.generate("llama3", seed, nodes=1024, days=27).faults) for seed in range(20)]
    assert 419 / 4 * 0.9 < sum(counts) / 20 < 419 / 4 * 1.1
    assert len(set(counts)) > 5


def test_nodes_of_a_rack_are_lost_together():
    trace = traces.generate("trace-b", 2)
    by_rack = traces.by_rack(trace, 4)
    assert (len(by_rack.faults), by_rack.count("sev1")) == (len(trace.faults), trace.count("sev1"))
    assert list(by_rack.faults) == sorted(by_rack.faults, key=lambda fault: fault.at)
    together = {}
    for fault in by_rack.faults:
        if fault.kind == "sev1":
            together.setdefault((fault.at, fault.repair_s), []).append(trace.nodes.index(fault.node))
    assert [len(nodes) for nodes in together.values()] == [4] * 6 + [2]
    assert all(len({node // 4 for node in nodes}) == 1 for nodes in together.values())


def test_a_file_comes_back_as_it_was(tmp_path):
    trace = traces.generate("trace-a", 1)
    path = tmp_path / "trace-a.csv"
    path.write_text(traces.to_csv(trace))
    assert traces.load(path, trace.nodes, trace.duration_s) == trace


def test_columns_may_stand_in_any_order_and_a_repair_be_left_out():
    text = "node,note,time_s,repair_s,kind\nn1,fan,5,,sev2\n\nn2, switch ,5.5,60,sev1\n"
    trace = traces.parse(text, Path("log.csv"), ["n1", "n2"])
    assert trace == Trace("log", ("n1", "n2"), 5.5, (Failure(5, "n1", "sev2"), Failure(5.5, "n2", "sev1", 60)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HEADER + "5,n9,sev2,0\n", "log.csv:2: column node: no node 'n9' in this cluster; it has n1, n2"),
        (HEADER + "5,n1,sev2,0\n4,n1,sev2,0\n", "log.csv:3: column time_s: 4 is before the 5 of line 2"),
        (HEADER + "5,n1,sev1,-3\n", "log.csv:2: column repair_s: '-3'"),
        (HEADER + "5,n1,sev1,\n", "log.csv:2: column repair_s: a sev1 failure takes its node out"),
        (HEADER + "5,n1,sev4,1\n", "log.csv:2: column kind: 'sev4'; give sev1, sev2, sev3"),
        (HEADER + "nan,n1,sev2,0\n", "log.csv:2: column time_s: 'nan'"),
        (HEADER + "-1,n1,sev2,0\n", "log.csv:2: column time_s: '-1'"),
        (HEADER + "5\n", "log.csv:2: column node: no node ''"),
        (HEADER + "99,n1,sev2,0\n", "log.csv:2: column time_s: 99 is behind the end at 10"),
        ("time_s,node\n5,n1\n", "log.csv:1: missing column kind, repair_s"),
        ("", "log.csv:1: empty"),
    ],
)
def test_bad_rows_are_named_by_file_line_and_column(text, said):
    with pytest.raises(InvalidInputError) as error:
        traces.parse(text, Path("log.csv"), ["n1", "n2"], 10)
    assert said in str(error.value)


def test_every_bad_row_has_its_line():
    with pytest.raises(InvalidInputError) as error:
        traces.parse(HEADER + "5,n9,sev7,-1\n6,n1,sev2,0\n3,n1,sev2,0\n", Path("log.csv"), ["n1"])
    assert [line.partition(": c")[0] for line in str(error.value).splitlines()] == ["log.csv:2"] * 3 + ["log.csv:4"]


def test_no_such_file_or_generator(tmp_path):
    with pytest.raises(InvalidInputError, match="can't be read"):
        traces.load(tmp_path / "none.csv", ["n1"])
    with pytest.raises(InvalidInputError, match="there are trace-a, trace-b, llama3"):
        traces.generate("trace-z", 0)
