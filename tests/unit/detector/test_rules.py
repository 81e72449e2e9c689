"""Table 1 of the paper, as data: what an exception says about its cause."""

from pathlib import Path

import pytest

from unicron.errors import InvalidInputError
from unicron.rules import Rules, load

DEFAULT = "default = { status = 'task_hang', severity = 2 }"
RULES = load()


LINES = [line.split("\t") for line in Path(__file__).with_name("lines.tsv").read_text().splitlines()]


@pytest.mark.parametrize(("kind", "severity", "status", "line"), LINES)
def test_a_line_is_told_for_what_it_is(kind, severity, status, line):
    of = {"kernel": RULES.rule_for_hardware, "exception": RULES.rule_for_exception, "output": RULES.rule_for_output}
    found = of[kind](line)
    told = ("-", "-") if found is None else (f"{int(found.verdict.severity)}", found.verdict.status)
    assert told == (severity, status)
    telling = {"kernel": RULES.match_hardware_lines, "output": RULES.match_output_lines}.get(kind)
    if telling is not None:
        assert [each for each, _ in telling(f"a line\n{line}\nanother")] == [line] * (severity != "-")


def test_of_several_xids_the_worst_counts():
    assert RULES.classify("", "Xid (PCI:0000:3b:00): 13, x\nXid (PCI:0000:3b:00): 79, x").status == "gpu_driver_error"


def test_the_first_rule_that_matches_decides():
    rules = Rules("""
        default = { status = "task_hang", severity = 2 }
        [[rule]]
        status = "ecc_error"
        severity = 3
        match = "one"
        [[rule]]
        status = "cuda_error"
        severity = 1
        match = "one|two"
    """)
    found = [rules.classify("", text).status for text in ("ONE", "two", "three")]
    assert found == ["ecc_error", "cuda_error", "task_hang"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("default = ", "mine.toml"),
        ("[[rule]]\nstatus = 'a'", "rule[0]"),
        ("default = { status = 'z', severity = 4 }", "default.severity"),
        (f"{DEFAULT}\nrules = []", "rules"),
        (f"{DEFAULT}\n[[rule]]\nstatus = 'ecc_error'\nseverity = 1\nmatch = '('", "'ecc_error'"),
        (f"{DEFAULT}\n[[rule]]\nstatus = 'ecc_eror'\nseverity = 1\nmatch = 'x'", "no status 'ecc_eror'; use one of"),
        (f"{DEFAULT}\n[[xid]]\nstatus = 'unknown'\nseverity = 1\ncodes = [1]", "no status 'unknown'; use one of"),
        (f"{DEFAULT}\n[[rule]]\nstatus = 'io_error'\nseverity = 1\nmatch = 'a{{{'9' * 20}}}'", "'io_error': match"),
        (f"{DEFAULT}\n[[kernel]]\nstatus = 'io_error'\nseverity = 1\nmatch = '{'(' * 5000}'", "'io_error': match"),
        (f"{DEFAULT}\n[[worker]]\nstatus = 'io_error'\nmatch = '*'", "worker 'io_error': match '*'"),
        (f"{DEFAULT}\n[[worker]]\nstatus = 'io_error'\nmatch = 'x'\nseverity = 1", "unknown field `severity`"),
        ("default = { status = 'broken', severity = 2 }", "no status 'broken'; use one of"),
    ],
)
def test_bad_rules_are_named(text, says):
    with pytest.raises(InvalidInputError, match=r"mine\.toml") as caught:
        Rules(text, "mine.toml")
    assert says in str(caught.value)


def test_an_anchor_holds_for_each_line():
    rules = Rules(f"{DEFAULT}\n[[kernel]]\nstatus = 'io_error'\nseverity = 3\nmatch = '^weka: .*lost$'")
    assert [line for line, _ in rules.match_hardware_lines("a\nweka: 1 lost\nb weka: 2 lost\nc")] == ["weka: 1 lost"]
