"""Table 1 of the paper, as data: what an exception says about its cause."""

import csv
from pathlib import Path

import pytest
from helpers.exception_texts import BACK, CAUSE, HANDLING, endings, whole_texts

from unicron.contracts.failures import FailureStatus
from unicron.errors import InvalidInputError
from unicron.exception_texts import messages, shortened
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


# --- what people have reported, labelled before it was judged: id, kind, class, severity, text, source ----------------
# In the column severity each character is right: 1 gives a node up, 2 restarts a worker, 3 explains or tries again,
# `-` says nothing. `u` behind it: as the program's own error; `s`: not as that. The kinds: k, kernel's log; e,
# exception; w, output of a worker.

OWN = {FailureStatus.OTHER_SOFTWARE_ERROR, FailureStatus.ADDRESS_IN_USE}
LABELLED = sorted(Path(__file__).with_name("labelled").glob("[!a]*.tsv"))


def rows(path):
    text = path.read_text(encoding="utf-8").splitlines()[1:]
    return [
        [column.replace("\\n", "\n") for column in row] for row in csv.reader(text, "excel-tab", quoting=csv.QUOTE_NONE)
    ]


def judge(kind, text):
    if kind == "e":
        return RULES.rule_for_exception(text).verdict
    lines = (RULES.match_hardware_lines if kind == "k" else RULES.match_output_lines)(text)
    return min((ruling.verdict for _, ruling in lines), key=lambda verdict: verdict.severity, default=None)


def is_right(kind, klass, labels, text):
    verdict = judge(kind, text)
    severity, status = ("-", None) if verdict is None else (str(int(verdict.severity)), verdict.status)
    may_be_own = "s" not in labels and not (kind == "e" and klass in {"node", "network"})
    return severity in labels and (may_be_own or status not in OWN) and ("u" not in labels or status in OWN)


@pytest.mark.parametrize("path", LABELLED, ids=lambda path: path.stem)
def test_each_labelled_line_is_told_for_what_it_is_and_so_is_the_whole_text_around_it(path):
    wrong = [
        (name, text)
        for name, kind, klass, labels, line, _ in rows(path)
        for text in [line, *whole_texts(kind, line)]
        if not is_right(kind, klass, labels, text)
    ]
    assert wrong == []


def test_no_noise_gives_a_node_up():
    noise = [(kind, line) for path in LABELLED for _, kind, klass, _, line, _ in rows(path) if klass == "noise"]
    assert len(noise) > 50
    assert [line for kind, line in noise if (verdict := judge(kind, line)) and verdict.severity == 1] == []


def test_each_error_of_an_accelerator_is_told_for_what_it_is_whatever_torch_puts_behind_it():
    """All of CUDA's runtime, what HIP adds, the libraries' as torch words them, and what torch raises by itself."""
    wrong = [
        (text, found.status)
        for severity, status, name, error in rows(Path(__file__).with_name("labelled") / "accelerators.tsv")
        for text in (endings(error, name) if name else [error])
        for whole in (f"RuntimeError: {text}", f"{BACK}torch.AcceleratorError: {text}\n")
        if ((found := judge("e", whole)).status, str(int(found.severity))) != (status, severity)
    ]
    assert wrong == []


ECC = "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (f"{BACK}{ECC}\n{CAUSE}{BACK}RuntimeError: step 3 failed\n", "ecc_error"),  # the first cause
        (f"{BACK}OSError: [Errno 28] x\n{HANDLING}{BACK}{ECC}\n", "ecc_error"),  # hardware, wherever it stands
        (f"{BACK}KeyError: 'x'\n{HANDLING}{BACK}ConnectionResetError: x\n", "connection_reset"),  # caught on purpose
        (f"{BACK}RuntimeError: odd\n{HANDLING}{BACK}KeyError: 'x'\n", "other_software_error"),
        (f"{BACK}RuntimeError: odd\n{HANDLING}{BACK}OSError: odder\n", "unexplained"),
        ("Connection reset by peer, trying again\n" + f"{BACK}OSError: [Errno 28] x\n", "io_error"),
        ('    raise ConnectionResetError\nRuntimeError: odd\n  File "x", line 1, in y\n', "unexplained"),
        ("    ~~~^^^\n" * 800 + "[", "unexplained"),  # at once
    ],
)
def test_of_a_chain_the_first_message_that_says_something_decides(text, status):
    assert RULES.rule_for_exception(text).verdict.status == status


def test_what_led_to_an_exception_is_in_its_traceback():
    traceback = f"{BACK}{ECC}\n{CAUSE}{BACK}RuntimeError: step 3 failed\n"
    assert RULES.classify("builtins.RuntimeError", "step 3 failed", traceback).status == "ecc_error"
    assert RULES.classify("builtins.RuntimeError", "step 3 failed").status == "unexplained"


def test_the_first_cause_is_kept_of_a_traceback_that_is_too_long():
    frames = BACK.partition("\n")[2]
    trace = f"{BACK}{ECC}\n{CAUSE}{BACK}{frames * 60}RuntimeError: step 3 failed\n"
    for most in range(8000, 8400):
        cut = shortened(trace, most)
        assert len(cut) <= most + 10
        assert messages(cut, RULES.boilerplate) == [ECC, "RuntimeError: step 3 failed"]
    assert shortened(trace, len(trace)) == trace


def test_boilerplate_of_ones_own_is_left_out_and_a_list_matches_by_any():
    mine = Rules(
        """
        boilerplate = 'ask .* about the network is unreachable'
        [[rule]]
        status = "io_error"
        severity = 2
        named = ["^ours", "^theirs"]
        """,
        "mine.toml",
        RULES,
    )
    assert mine.rule_for_exception("RuntimeError: odd; ask Jane about the network is unreachable").verdict.status == (
        "unexplained"
    )
    assert mine.rule_for_exception("theirs.Odd: x").rule == "mine.toml: rule '^theirs'"
    assert mine.rule_for_exception("others.Odd: theirs").verdict.status == "unexplained"


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
        (f"{DEFAULT}\n[[rule]]\nstatus = 'io_error'\nseverity = 1", "looks for nothing: add match"),
        (f"{DEFAULT}\n[[rule]]\nstatus = 'io_error'\nseverity = 1\nnamed = ['x', '(']", "'io_error': match '('"),
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
