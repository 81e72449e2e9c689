"""`unicron simulate`, as a user types it: tables, JSON, pictures, one's own failure log, and how it refuses."""

import json
import sys

import pytest
from helpers.cli import invoke
from unicron_simulator.policies import traces

from unicron.errors import InvalidInputError, UnicronError

TASKS = """
name: gpt
command: [train]
max_workers: 16
throughput: {8: 1.0e+15, 16: 2.0e+15}
unit: 8
---
# nothing here
---
name: bert
command: [train]
weight: 0.5
max_workers: 8
throughput: {1: 1.0e+14, 8: 8.0e+14}
"""

CLUSTER = """
nodes: [red, green, blue]
gpus_per_node: 8
days: 10
failures: failures.csv
tasks: tasks.yaml
detect_minutes: 60
restart_minutes: 120
"""

FAILURES = """node,time_s,kind,repair_s
red,86400,sev1,172800
green,400000,sev2,
"""


def simulate(*words):
    return invoke("simulate", *words)


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "tasks.yaml").write_text(TASKS)
    (tmp_path / "failures.csv").write_text(FAILURES)
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER)
    return path


def test_the_table_names_each_policy_and_what_it_lost():
    lines = simulate("--trace", "trace-b", "--policies", "unicron, megatron", "--seed", 3).splitlines()
    assert lines[0] == "trace-b: 7 days on 16 nodes of 8 GPUs; 26 sev1, 40 sev2, 40 sev3"
    assert [line.split()[0] for line in lines[3:]] == ["unicron", "megatron"]
    assert float(lines[4].split()[-2]) > 1


def test_json_holds_the_course_of_time(tmp_path):
    path = tmp_path / "out.json"
    simulate("--policies", "unicron", "--json", path)
    told = json.loads(path.read_text())
    assert json.loads(simulate("--policies", "unicron", "--json", "-")) == told
    row = told["policies"]["unicron"]
    assert row["columns"] == ["at_s", "waf", "gpus", "accumulated"]
    assert row["samples"][-1][0] == 56 * 86400
    assert row["samples"][-1][3] == pytest.approx(row["earned"])
    assert min(gpus for _, _, gpus, _ in row["samples"]) < 128
    assert row["earned"] + row["detection"] + row["transition"] + row["sub_healthy"] == pytest.approx(row["ideal"])


@pytest.mark.slow
def test_pictures_are_drawn(tmp_path):
    for name in ("out.svg", "out.png"):
        simulate("--policies", "unicron,oracle", "--plot", tmp_path / name)
        assert (tmp_path / name).stat().st_size > 10_000
    assert "accumulated WAF" in (tmp_path / "out.svg").read_text()


def test_a_trace_from_a_file_and_tasks_from_a_file(tmp_path, mine):
    trace = traces.generate("trace-a", 1)
    (tmp_path / "log.csv").write_text(traces.to_csv(trace))
    given = ["--policies", "unicron,megatron", "--days", 56]
    assert simulate("--trace", tmp_path / "log.csv", *given).splitlines()[1:] == simulate(*given).splitlines()[1:]
    told = json.loads(simulate("--tasks", mine.parent / "tasks.yaml", "--policies", "unicron", "--json", "-"))
    assert told["tasks"] == ["gpt", "bert"]
    assert told["policies"]["unicron"]["ideal"] == pytest.approx(2.4e15 * 56 * 86400)


def test_my_cluster_tells_what_would_have_been_saved(mine):
    told = json.loads(simulate("--my-cluster", mine, "--json", "-"))
    own, best = told["policies"]["as-it-was"], told["policies"]["oracle"]
    whole = 2.4e15 * 10 * 86400
    assert own["ideal"] == pytest.approx(whole)
    # gpt waits two days for red; then a restart of both its nodes' worth; later bert restarts on green or gpt does
    assert own["sub_healthy"] == pytest.approx(2e15 * (172800 - 3600))
    assert own["detection"] + own["transition"] == pytest.approx(2e15 * (3 + 3) * 3600)
    healed = told["policies"]["unicron"]["earned"]
    assert told["saved_gpu_hours"] == pytest.approx((healed - own["earned"]) / whole * 240 * 24)
    assert own["earned"] < healed <= best["earned"]
    assert "Self-healing would have saved" in simulate("--my-cluster", mine)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("days: 10", "days: -1", "cluster.yaml:4: days -1: give a number"),
        ("nodes: [red, green, blue]", "nodes: [red, red]", "cluster.yaml:2: nodes ['red', 'red']"),
        ("nodes: [red, green, blue]", "nodes: 3", "failures.csv:2: column node: no node 'red' in this cluster"),
        ("tasks: tasks.yaml", "task: tasks.yaml", "cluster.yaml:6: no field 'task'"),
        ("tasks: tasks.yaml\n", "", "tasks is missing"),
        ("tasks.yaml", "none.yaml", "can't be read"),
        ("failures.csv", "none.csv", "none.csv: can't be read"),
        ("days: 10", "days: 2", "failures.csv:3: column time_s: 400000 is behind the end"),
    ],
)
def test_mistakes_in_ones_own_files_are_named(mine, old, new, said):
    mine.write_text(CLUSTER.replace(old, new))
    with pytest.raises(InvalidInputError) as error:
        simulate("--my-cluster", mine)
    assert said in str(error.value)


def test_mistakes_in_a_later_task_have_the_line_of_the_file(mine):
    path = mine.parent / "tasks.yaml"
    path.write_text(TASKS.replace("weight: 0.5", "wait: 0.5"))
    with pytest.raises(InvalidInputError, match=r"tasks\.yaml:12: wait"):
        simulate("--tasks", path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--trace", "trace-z"], "no trace or file 'trace-z'; there are trace-a"),
        (["--policies", "slurm"], "no policy 'slurm'"),
        (["--tasks", "none.yaml"], "none.yaml: can't be read (No such file or directory); give a file of tasks"),
        (["--plot", "out.gif"], "has to end in .png or .svg"),
        (["--costs", "none.toml"], "none.toml"),
    ],
)
def test_what_it_can_not_do_is_said(words, said):
    with pytest.raises(InvalidInputError) as error:
        simulate(*words)
    assert said in str(error.value)


def test_without_numpy_it_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("unicron_simulator")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(UnicronError, match=r"needs numpy.*'\.\[planner\]"):
        simulate()


def test_storms_are_run_from_here():
    assert "0 with a violation" in simulate("storm", "--seeds", 1)
