"""The three forms of `layout`: degrees, a table of them by number of workers, and `auto`."""

import subprocess
import sys
from pathlib import Path

import pytest
from unicron_taskfile import parse

from unicron.checks import MOST_LAYOUTS, task_problems
from unicron.contracts.tasks import ParallelLayout, TaskSpec
from unicron.costmodel import planning
from unicron.errors import InvalidInputError

HERE = Path("/jobs/gpt/task.yaml")
SEVEN = "model: {size: 7B, batch: 1024, accelerator: A800}"


def read(*lines, most=4):
    return parse("\n".join(["name: gpt", "command: a", "microbatches: 99", f"max_workers: {most}", *lines]), HERE)


def refusal(*lines, most=4):
    with pytest.raises(InvalidInputError) as caught:
        read(*lines, most=most)
    return str(caught.value)


def test_a_table_gives_each_number_of_workers_a_shape_and_rules_out_all_others():
    spec, warnings = read("layout: {4: {tensor: 2, pipeline: 2}, 3: {}, 2: {tensor: 2}}")
    by_size = {4: ParallelLayout(tensor=2, pipeline=2), 3: ParallelLayout(), 2: ParallelLayout(tensor=2)}
    assert spec.layouts == by_size
    assert spec.layout == ParallelLayout()
    assert list(spec.sizes) == [2, 3, 4]
    assert warnings == []


def test_a_row_left_empty_is_the_plain_shape():
    assert read("layout: {4: {tensor: 2}, 3: }").spec.layouts[3] == ParallelLayout()


def test_degrees_alone_stay_the_shape_of_all_sizes():
    spec = read("layout: {tensor: 2, shard: 2}").spec
    assert (spec.layout, spec.layouts) == (ParallelLayout(tensor=2, shard=2), {})


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ("best", ["layout 'best'", "tensor: 2", "4: {tensor: 2}", "auto"]),
        ("[2, 4]", ["layout [2, 4]", "tensor: 2"]),
        ("{4: {tensor: 2}, tensor: 2}", ["layout.tensor 2", "beside numbers of workers", "not both"]),
        ("{4: {tensor: 2}, four: {}}", ["layout.four 'four'", "whole number"]),
        ("{4: {tensor: 2}, 2.5: {}}", ["layout.2.5 2.5", "whole number"]),
        ("{4: {tensor: 2}, true: {}}", ["layout.True True", "whole number"]),
        ("{4: {tenor: 2}}", ["layout.4.tenor 2", "tensor, pipeline, shard"]),
        ("{4: {replicas: 2}}", ["layout.4.replicas 2", "for the plan to say"]),
        ("{4: {tensor: two}}", ["layout.4.tensor 'two'", "whole number"]),
        ("{4: {tensor: 2, tensor: 1}}", ["tensor stands there twice"]),
        ("{4: {tensor: 2}, 4: {}}", ["4 stands there twice"]),
        ("{4: 2}", ["layout.4 2", "tensor: 2"]),
        ("{4: {tensor: 0}}", ["layout.4.tensor 0", "from 1"]),
        ("{4: {tensor: 3}}", ["layout.4 3", "3 x 1 x 1 = 3", "the row's 4 workers"]),
        ("{4: {tensor: 2, pipeline: 2, shard: 2}}", ["layout.4 8", "2 x 2 x 2 = 8"]),
        ("{0: {}}", ["layout.0 0", "from 1"]),
        ("{100001: {}}", ["layout.100001", "100000"]),
        ("{8: {tensor: 2}}", ["layout [8]", "between min_workers 1 and max_workers 4", "add one"]),
    ],
)
def test_a_table_that_can_not_be_used_names_row_and_degree(layout, says):
    message = refusal(f"layout: {layout}")
    assert message.startswith(f"{HERE}:5: ")
    assert [part for part in says if part not in message] == []


def test_rows_that_are_no_multiple_of_unit_are_not_allowed_sizes():
    assert "multiple of unit 4" in refusal("unit: 4", "layout: {2: {}, 3: {}}")
    spec, [warning] = read("unit: 2", "layout: {2: {}, 3: {}, 6: {}}")
    assert list(spec.sizes) == [2]
    assert "layout [3, 6]: rows that are never used" in warning


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("6: {tensor: 3}", ["layout.6.tensor 3", "32 heads"]),
        ("6: {pipeline: 3}", ["layout.6.pipeline 3", "32 layers", "model.padded"]),
        ("16: {tensor: 16}", ["layout.16.tensor 16", "8 GPUs of a node"]),
    ],
)
def test_each_row_must_suit_the_model(row, says):
    message = refusal(SEVEN, f"layout: {{8: {{tensor: 8}}, {row}}}", most=16)
    assert len(message.splitlines()) == 1
    assert [part for part in says if part not in message] == []


def test_specs_from_the_bus_meet_the_same_rules():
    odd = {4: ParallelLayout(pipeline=3), -1: ParallelLayout()}
    spec = TaskSpec(name="a", command=["b"], max_workers=4, layouts=odd)
    assert [problem.field for problem in task_problems(spec)] == ["layout.4", "layout.-1"]
    many = dict.fromkeys(range(1, MOST_LAYOUTS + 2), ParallelLayout())
    [problem] = task_problems(TaskSpec(name="a", command=["b"], max_workers=9999, layouts=many))
    assert (problem.field, problem.value) == ("layout", MOST_LAYOUTS + 1)
    assert "larger unit" in problem.allowed


# --- auto ------------------------------------------------------------------------------------------------------------


def test_auto_fills_in_the_fastest_layout_of_each_feasible_size():
    spec = read("min_workers: 8", "unit: 4", "model: {size: 13B, batch: 1536}", "layout: auto", most=48).spec
    curve = planning.curve(spec.model, 48)
    best = {size: curve.configuration(at).layout for at, size in enumerate(curve.sizes.tolist())}
    expected = {size: best[size] for size in range(8, 49, 4) if size in best}
    assert spec.layouts.keys() == expected.keys()
    assert 44 not in spec.layouts, "no degrees make 44"
    assert all(spec.layouts[size].is_like(expected[size]) for size in expected)
    assert len({(one.tensor, one.pipeline) for one in spec.layouts.values()}) > 1, "they differ, which is the point"
    assert spec.layout == ParallelLayout()


@pytest.mark.parametrize(
    ("lines", "most", "says"),
    [
        ([], 4, ["needs model", "give degrees"]),
        (["model: {size: 175B, batch: 1024}"], 8, ["from 1 to 8 no allowed", "at least 48 A100", "8 are too few"]),
        (["min_workers: 56", "model: {size: 7B, batch: 1536}"], 56, ["56 is no product", "'padded: true'", "32, 48"]),
        (["model: {size: 7B, batch: 8, anchor_workers: 7, anchor_mfu: 0.4}"], 8, ["anchor_workers 7"]),
        (["model: {size: 175B, batch: 1536, padded: true}"], 4000, ["at most 1000 rows", "larger unit"]),
    ],
)
def test_auto_that_can_not_be_worked_out_says_why_and_what_would_do(lines, most, says):
    message = refusal("layout: auto", *lines, most=most)
    assert message.startswith(f"{HERE}:5: layout ")
    assert [part for part in says if part not in message] == []


def test_auto_waits_until_what_it_is_chosen_from_is_right():
    message = refusal("model: {size: 7B, batch: 8, heads: 33}", "layout: auto")
    assert "model.heads 33" in message
    assert "layout" not in message


def test_auto_without_numpy_says_what_to_install():
    text = f"name: a\\ncommand: b\\nmax_workers: 8\\n{SEVEN}\\nlayout: auto"
    code = "import sys, pathlib; sys.modules['numpy'] = None\nimport unicron_taskfile\n"
    code += f"unicron_taskfile.parse('{text}', pathlib.Path('/t.yaml'))\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].endswith(
        "/t.yaml:5: layout 'auto': numpy is not installed, with which layouts are calculated; "
        "pip install numpy, or give degrees for each number of workers"
    )
