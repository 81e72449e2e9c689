"""Task files: every field, and what is said of one that can not be used."""

import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT
from hypothesis import given
from hypothesis import strategies as st

from unicron.checks import MOST_LAYOUTS, task_problems
from unicron.contracts.tasks import UNCOUNTED, Healing, ParallelLayout, TaskSpec
from unicron.contracts.watchdogs import LogPattern
from unicron.costmodel import planning
from unicron.errors import InvalidInputError
from unicron.healing import way_of
from unicron.taskfile import FIELDS, load, parse

FULL = """\
name: gpt
command: python train.py --text 'two words'
weight: 1.5
min_workers: 2
max_workers: 6
unit: 2
microbatches: 12
iterations: 50
workdir: src
env:
  OMP_NUM_THREADS: 1
  MODE: quick
flops_per_iteration: 3.5e12
throughput:
  2: 1e12
  4: 1.9e+12
model:
  size: 7B
  batch: 1024
checkpoints: s3://bucket/folder
checkpoint_s: 600
resume: true
layout:
  tensor: 2
heal: session
silence_s: 90
drill: false
stop_grace_s: 7
within_domain: true
watch_log:
  - pattern: 'loss: (\\S+)'
    absent_for_s: 600
commit: 1c2d3e4f5a6b
"""

HERE = Path("/jobs/gpt/task.yaml")


def minimal(*lines):
    return "\n".join(["name: gpt", "command: train.py", *lines])


def error_of(text, path=HERE):
    with pytest.raises(InvalidInputError) as caught:
        parse(text, path)
    return str(caught.value)


def test_every_field_arrives():
    spec, warnings = parse(FULL, HERE)
    assert spec.command == ["python", "train.py", "--text", "two words"]
    assert (spec.name, spec.weight, spec.unit, spec.microbatches, spec.iterations) == ("gpt", 1.5, 2, 12, 50)
    assert list(spec.sizes) == [2, 4, 6]
    assert spec.env == {"OMP_NUM_THREADS": "1", "MODE": "quick"}
    assert spec.throughput == {2: 1e12, 4: 1.9e12}
    assert spec.flops_per_iteration == 3.5e12
    assert (spec.checkpoints, spec.checkpoint_s, spec.resume) == ("s3://bucket/folder", 600, True)
    assert spec.layout == ParallelLayout(tensor=2)
    assert (spec.silence_s, way_of(spec).silence_s(spec)) == (90.0, 0.0), "a session says how far it is"
    assert spec.stop_grace_s == 7
    assert (spec.within_domain, spec.commit) == (True, "1c2d3e4f5a6b")
    assert spec.watch_log == [LogPattern(pattern=r"loss: (\S+)", absent_for_s=600.0)]
    assert (spec.model.layers, spec.model.batch, spec.model.accelerator) == (32, 1024, "A100")
    assert warnings == []


def test_the_full_example_has_every_field():
    assert [line.partition(":")[0] for line in FULL.splitlines() if not line.startswith(" ")] == list(FIELDS)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("{pattern: '('}", "watch_log.0.pattern '(': is no regular expression of RE2 (missing ): ()"),
        ("{pattern: '(?=a)b'}", "RE2 has no (?=...)"),
        ("{pattern: '(a)(b)', within_s: 60}", "captures 2 things"),
        ("{pattern: a}", "needs `within_s` or `absent_for_s`, or a group that captures a number"),
        ("{pattern: a, within_s: 3}", "watch_log.0.within_s 3.0: must be 10 s or more"),
        ("{pattern: a, absent_for_s: .nan}", "watch_log.0.absent_for_s nan: must be 10 s or more"),
        ("{pattern: '', within_s: 60}", "must be a regular expression of 1 to 300 characters"),
        ("{within_s: 60}", "needs a `pattern`"),
        ("{pattern: a, often: 3}", "has no field 'often'; it has pattern, within_s, absent_for_s"),
        ("loss", "must be rows of"),
    ],
)
def test_a_pattern_for_the_log_that_can_not_be_used_is_refused_with_place_and_cure(row, says):
    error = error_of(minimal("watch_log:", f"  - {row}"))
    assert error.startswith("/jobs/gpt/task.yaml:3: watch_log")
    assert says in error


def test_a_log_is_matched_against_a_few_patterns_at_most():
    rows = ["  - {pattern: a, within_s: 60}"] * 9
    assert "watch_log 9: 8 patterns at most" in error_of(minimal("watch_log:", *rows))
    assert "watch_log 'loss': must be a list" in error_of(minimal("watch_log: loss"))


def test_workdir_is_relative_to_the_files_folder(tmp_path):
    (tmp_path / "task.yaml").write_text(FULL)
    assert load(tmp_path / "task.yaml").spec.workdir == str(tmp_path / "src")
    assert parse(minimal(), HERE).spec.workdir == "/jobs/gpt"
    assert parse(minimal("workdir: ../data"), HERE).spec.workdir == "/jobs/data"
    assert parse(minimal("workdir: /elsewhere"), HERE).spec.workdir == "/elsewhere"


def test_a_command_may_be_a_list():
    text = (
        "name: gpt\ncommand: [python, train.py, --layers, 4, --lr, 1e-10, --v, 3.10]\nenv: {MASK: 0022, AT: 12:30:45}"
    )
    spec = parse(text, HERE).spec
    assert spec.command == ["python", "train.py", "--layers", "4", "--lr", "1e-10", "--v", "3.10"]
    assert spec.env == {"MASK": "0022", "AT": "12:30:45"}
    assert parse("name: gpt\ncommand: bash -c 'a && echo $B'", HERE).spec.command[2] == "a && echo $B"


def test_a_field_left_empty_has_its_default():
    assert parse(minimal("weight:"), HERE).spec.weight == 1.0


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("weight: 0", ["weight 0.0", "above 0"]),
        ("weight: -2", ["weight -2.0", "above 0"]),
        ("weight: .nan", ["weight nan", "finite"]),
        ("weight: heavy", ["weight 'heavy'", "number"]),
        ("weight: true", ["weight True", "number"]),
        ("min_workers: 3", ["min_workers 3", "max_workers 1"]),
        ("min_workers: 0", ["min_workers 0", "from 1"]),
        ("max_workers: 2.5", ["max_workers 2.5", "whole"]),
        ("max_workers: 99999999999999999999999", ["max_workers", "100000"]),
        ("unit: 2", ["unit 2", "multiple"]),
        ("iterations: many", ["iterations 'many'", "whole"]),
        ("microbatches: -1", ["microbatches -1", "from 1"]),
        ("flops_per_iteration: .inf", ["flops_per_iteration inf", "finite"]),
        ("flops_per_iteration: 1" + "0" * 400, ["flops_per_iteration inf", "finite"]),
        ("throughput: {1: fast}", ["throughput.1 'fast'", "number"]),
        ("throughput: {1: -5}", ["throughput.1 -5.0", "above 0"]),
        ("throughput: {one: 5}", ["throughput.one 'one'", "whole number"]),
        ("throughput: {0: 5}", ["throughput 0", "from 1"]),
        ("throughput: 7", ["throughput 7", "workers: FLOP/s"]),
        ("throughput: {1: 5, 2: 6, 1: 7}", ["1 stands there twice"]),
        ("throughput: no.csv", ["throughput 'no.csv'", "can't be read", "workers,flops"]),
        ("throughput: 'a\\0b'", ["can't be read"]),
        ("model: 7B", ["model '7B'", "size: 7B"]),
        ("model: {size: 8B, batch: 8}", ["model.size '8B'", "1.3B, 7B, 13B, 70B, 175B"]),
        ("model: {size: 7, batch: 8}", ["model.size 7", "quotes"]),
        ("model: {size: 7B}", ["needs batch"]),
        ("model: {layers: 4, batch: 8}", ["needs hidden", "or give size"]),
        ("model: {size: 7B, bach: 8}", ["model.bach 8", "did you mean 'batch'"]),
        ("model: {size: 7B, batch: many}", ["model.batch 'many'", "whole number"]),
        ("model: {size: 7B, batch: 0}", ["model.batch 0", "from 1"]),
        ("model: {size: 7B, batch: 8, heads: 33}", ["model.heads 33", "hidden size 4096"]),
        ("model: {size: 7B, batch: 8, heads: 0}", ["model.heads 0", "from 1"]),
        ("model: {size: 7B, batch: 8, layers: 1" + "0" * 400 + "}", ["model.layers", "1000"]),
        ("model: {size: 7B, batch: 8, accelerator: V100}", ["model.accelerator 'V100'", "A100, A800"]),
        ("model: {size: 7B, batch: 8, padded: 1}", ["model.padded 1", "true or false"]),
        ("model: {size: 7B, batch: 8, anchor_workers: 8, anchor_mfu: 45}", ["model.anchor_mfu 45.0", "0.45"]),
        ("model: {size: 7B, batch: 8, anchor_workers: 8, anchor_mfu: .nan}", ["model.anchor_mfu nan", "0.45"]),
        ("model: {size: 7B, batch: 8, anchor_workers: 8}", ["model.anchor_mfu 0.0", "together"]),
        ("model: {size: 7B, batch: 8, anchor_mfu: 0.4}", ["model.anchor_mfu 0.4", "together"]),
        ("layout: 4", ["layout 4", "tensor: 2"]),
        ("layout: {tensor: two}", ["layout.tensor 'two'", "whole number"]),
        ("layout: {pipeline: 0}", ["layout.pipeline 0", "from 1"]),
        ("layout: {replicas: 2}", ["layout.replicas 2", "tensor, pipeline, shard; how many replicas"]),
        ("env: [A, B]", ["env ['A', 'B']", "NAME: value"]),
        ("env: {DEBUG: yes}", ["env.DEBUG True", "quotes"]),
        ("env: {'A=B': c}", ["env.A=B", "'='"]),
        ("workdir: 7", ["workdir 7", "quotes"]),
        ("wieght: 2", ["wieght 2", "did you mean 'weight'"]),
        ("max-worker: 2", ["max-worker 2", "did you mean 'max_workers'"]),
        ("zzz: 2", ["zzz 2", "flops_per_iteration"]),
    ],
)
def test_an_error_names_file_line_field_value_and_what_is_allowed(line, says):
    message = error_of(minimal(line))
    assert message.startswith(f"{HERE}:3: ")
    assert [part for part in says if part not in message] == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("command: train.py", "name: is required"),
        ("name: gpt", "command: is required"),
        ("name: gpt\ncommand:", "command: is required"),
        ("name: 7\ncommand: train.py", "name 7: must be text"),
        ("name: a.b\ncommand: train.py", "name 'a.b': use 1 to 64"),
        ("name: gpt\ncommand: ''", "command []: must name a program"),
        ('name: gpt\ncommand: "train \'open"', "No closing quotation"),
        ("name: gpt\ncommand: [train.py, yes]", "command.1 True: must be text"),
        ("name: gpt\ncommand: {a: b}", "text or a list"),
        ("name: gpt\ncommand: cd x && train.py", "is run by no shell, to which && would mean more"),
        ("name: gpt\ncommand: train.py --out $HOME/x", "is run by no shell, to which $HOME/x would mean more"),
        ("name: gpt\ncommand: a\nname: gpt2", ":3: name stands there twice; line 1"),
        ("", "expected 'field: value' lines"),
        ("- name", "expected 'field: value' lines"),
        ("just words", "expected 'field: value' lines"),
        ("name: gpt\ncommand: [train.py", ":2:"),
        ("name: gpt\n\tcommand: x", ":2:1: not valid YAML"),
        ("name: !!python/object/apply:os.system [ls]", ":1:7: not valid YAML"),
        ("name: 2024-99-99", "not valid YAML"),
        ("name: \x00", "not valid YAML"),
    ],
)
def test_a_file_without_sense_says_where(text, says):
    message = error_of(text)
    assert message.startswith(str(HERE))
    assert says in message


def test_a_models_own_fields_go_before_its_size():
    spec = parse(minimal("model: {size: 13B, batch: 512, layers: 2, accelerator: H200, padded: true}"), HERE).spec
    assert (spec.model.layers, spec.model.hidden, spec.model.heads) == (2, 5120, 40)
    assert (spec.model.accelerator, spec.model.padded) == ("H200", True)


def test_a_model_tells_the_flops_of_an_iteration():
    spec = parse(minimal("model: {size: 175B, batch: 1536}"), HERE).spec
    assert spec.flops_per_iteration == pytest.approx(6 * 174.6e9 * 1536 * 2048, rel=0.03)


def tabled(folder, text):
    (folder / "curve.csv").write_text(text)
    return parse(minimal("throughput: curve.csv"), folder / "task.yaml").spec.throughput


def test_throughput_may_stand_in_a_csv_file(tmp_path):
    text = "\ufeffworkers,note, flops\n2,measured,1e12\n\n8,read off a plot,3.5e12\n"
    assert tabled(tmp_path, text) == {2: 1e12, 8: 3.5e12}


@pytest.mark.parametrize(
    ("text", "row", "says"),
    [
        ("", 1, ["'nothing'", "header 'workers,flops'"]),
        ("2,1e12\n", 1, ["'2,1e12'", "header 'workers,flops'"]),
        ("workers\n2\n", 1, ["'workers'", "header 'workers,flops'"]),
        ("workers,flops,flops\n2,1,1\n", 1, ["header"]),
        ("workers,flops\n", None, ["no rows"]),
        ("workers,flops\n2,1e12\n2,2e12\n", 3, ["workers 2", "row 2 too", "keep one"]),
        ("workers,flops\n4,1e12\n2,5e11\n", 3, ["workers 2", "after 4 in row 2", "sort"]),
        ("workers,flops\n2,-1e12\n", 2, ["flops '-1e12'", "above 0"]),
        ("workers,flops\n2,0\n", 2, ["flops '0'", "leave out"]),
        ("workers,flops\n2,fast\n", 2, ["flops 'fast'", "number"]),
        ("workers,flops\n2,inf\n", 2, ["flops 'inf'", "finite"]),
        ("workers,flops\n2,nan\n", 2, ["flops 'nan'", "finite"]),
        ("workers,flops\n2\n", 2, ["flops ''", "number"]),
        ("workers,flops\n,1e12\n", 2, ["workers ''", "whole number"]),
        ("workers,flops\n-2,1e12\n", 2, ["workers '-2'", "from 1"]),
        ("workers,flops\n2.5,1e12\n", 2, ["workers '2.5'", "whole number"]),
        ("workers,flops\n0,1e12\n", 2, ["workers '0'", "from 1"]),
        ("workers,flops\n999999999999,1e12\n", 2, ["workers '999999999999'", "100000"]),
    ],
)
def test_a_bad_table_names_the_row_and_the_cure(tmp_path, text, row, says):
    with pytest.raises(InvalidInputError) as caught:
        tabled(tmp_path, text)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'curve.csv'}:{row}: " if row else f"{tmp_path / 'curve.csv'}: ")
    assert [part for part in says if part not in message] == []


def test_all_bad_rows_come_at_once_with_the_problems_of_the_task_file(tmp_path):
    (tmp_path / "curve.csv").write_text("workers,flops\n1,-1\n2,1e12\n2,x\n")
    message = error_of(minimal("unit: x", "throughput: curve.csv"), tmp_path / "task.yaml")
    assert [line.split(":")[1] for line in message.splitlines()] == ["3", "2", "4"]


def test_a_table_that_is_no_text_says_so(tmp_path):
    (tmp_path / "curve.csv").write_bytes(b"workers,flops\n2,\xe9\n")
    message = error_of(minimal("throughput: curve.csv"), tmp_path / "task.yaml")
    assert "task.yaml:3: throughput 'curve.csv': can't be read" in message


def test_all_problems_come_at_once():
    message = error_of("name: gpt\nwieght: 1\nunit: x")
    assert [line.split(": ")[1].split()[0] for line in message.splitlines()] == ["wieght", "command", "unit"]


@pytest.mark.parametrize(("weight", "warned"), [("0.4", True), ("0.5", False), ("2", False), ("2.1", True)])
def test_an_unusual_weight_warns_and_goes_through(weight, warned):
    spec, warnings = parse(minimal(f"weight: {weight}"), HERE)
    assert spec.weight == float(weight)
    assert bool(warnings) == warned
    assert all(line.startswith(f"{HERE}:3: weight") and "0.5 to 2.0" in line for line in warnings)


def test_fewer_microbatches_than_workers_warns():
    [line] = parse(minimal("max_workers: 4", "microbatches: 3"), HERE).warnings
    assert "microbatches 3" in line


def test_an_unreadable_file_says_which(tmp_path):
    with pytest.raises(InvalidInputError, match=r"no\.yaml.*No such file"):
        load(tmp_path / "no.yaml")
    with pytest.raises(InvalidInputError, match="Is a directory"):
        load(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9")
    with pytest.raises(InvalidInputError, match="not UTF-8"):
        load(tmp_path / "latin.yaml")


@given(st.text(max_size=60) | st.dictionaries(st.sampled_from(FIELDS), st.text(max_size=9)).map(str))
def test_any_text_is_a_spec_or_a_clear_error(text):
    message = str(HERE)
    try:
        parse(text, HERE)
    except InvalidInputError as error:
        message = str(error)
    assert message.startswith(str(HERE))


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*/task.yaml")), ids=lambda path: path.parent.name)
def test_the_examples_can_be_submitted_as_they_are(path):
    assert load(path).warnings == []


def test_a_program_without_a_session_is_done_when_it_says_so():
    spec = parse(minimal("heal: restart"), HERE).spec
    assert (spec.heal, spec.iterations) == (Healing.RESTART, UNCOUNTED)
    assert (spec.silence_s, way_of(spec).silence_s(spec)) == (1800.0, 1800.0)
    endless = parse(minimal("heal: restart", "silence_s: 0"), HERE).spec
    assert way_of(endless).silence_s(endless) == 0
    assert parse(minimal("heal: restart", "iterations: 40"), HERE).spec.iterations == 40
    assert parse(minimal(), HERE).spec.heal is Healing.SESSION


def test_all_ranks_of_a_script_that_is_healed_in_place_are_one_replica():
    spec = parse("name: t\ncommand: [python, train.py]\nmax_workers: 4\nheal: in-place", HERE).spec
    assert (spec.layout, spec.min_workers, spec.iterations) == (ParallelLayout(shard=4), 4, UNCOUNTED)
    module = parse("name: t\ncommand: [python, -m, train]\nmax_workers: 4\nheal: in-place", HERE).spec
    assert module.layout == spec.layout
    told = error_of("name: t\ncommand: [python, -c, train()]\nmax_workers: 4\nheal: in-place")
    assert "must be `python SCRIPT.py ...` or `python -m MODULE ...` where `heal` is in-place" in told


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (["heal: by prayer"], "heal 'by prayer': must be one of session, restart"),
        (["heal: [1]"], "must be one of session, restart"),
        (["heal: restart", "resume: true", "checkpoints: /tmp"], "resumes by itself where `heal` is restart"),
        (["heal: restart", "layout:", "  tensor: 2"], "shares out its model by itself where `heal` is restart"),
        (["heal: in-place", "layout:", "  tensor: 2"], "shares out its work by itself where `heal` is in-place"),
        (["heal: in-place", "max_workers: 4", "min_workers: 2"], "min_workers 2: must be max_workers, 4, where `heal`"),
        (["heal: restart", "silence_s: 0.5"], "silence_s 0.5: must be 1 s or more, or 0 for no limit"),
        (["heal: restart", "stop_grace_s: -1"], "stop_grace_s -1.0: must be 0 to"),
        (["heal: in-place", "silence_s: -3"], "silence_s -3.0: must be 1 s or more"),
    ],
)
def test_what_only_a_session_can_do_is_refused_of_others(lines, told):
    assert told in error_of(minimal(*lines))


# --- the three forms of `layout`: degrees, a table of them by number of workers, and `auto` --------------------------


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
    code = "import sys, pathlib; sys.modules['numpy'] = None\nimport unicron.taskfile\n"
    code += f"unicron.taskfile.parse('{text}', pathlib.Path('/t.yaml'))\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].endswith(
        "/t.yaml:5: layout 'auto': numpy is not installed, with which layouts are calculated; "
        "pip install numpy, or give degrees for each number of workers"
    )
