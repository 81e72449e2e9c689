"""What Slurm's commands write is read; what can't be used of it is refused, with the tool and the cure."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron.errors import InvalidInputError
from unicron.slurm import shown, tools
from unicron.slurm.nodelist import expand


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[01-03,7]", ["n01", "n02", "n03", "n7"]),
        ("a[1-2],b,c[3]", ["a1", "a2", "b", "c3"]),
        ("rack[1-2]n[08-10]", [f"rack{r}n{n}" for r in (1, 2) for n in ("08", "09", "10")]),
        ("gpu-a[1,3]-ib", ["gpu-a1-ib", "gpu-a3-ib"]),
        ("n[9-10]", ["n9", "n10"]),
    ],
)
def test_lists_of_nodes(text, names):
    assert expand(text) == names


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "expected names"),
        ("n1,,n2", "expected names"),
        ("n1, n2", "expected names"),
        ("n[1-2", "bracket at character 2"),
        ("n1]", "bracket at character 3"),
        ("n[3-1]", "'3-1' is no number"),
        ("n[a-b]", "'a-b' is no number"),
        ("n[]", "'' is no number"),
        ("n[1-2-3]", "no number"),
        ("n[0-999999999]", "more than 100000"),
        ("a[1-999]b[1-999]", "more than 100000"),
        ("n[[1]]", "bracket"),
    ],
)
def test_lists_that_are_none(text, why):
    with pytest.raises(InvalidInputError, match="list of nodes") as refused:
        expand(text)
    assert why in str(refused.value)


@given(st.text(alphabet="n1[]-,0 9\n(é", max_size=30))
def test_any_text_is_a_list_or_refused(text):
    try:
        names = expand(text)
    except InvalidInputError:
        return
    assert names
    assert all(name and not set(name) & set("[], \n") for name in names)


def test_jobs():
    text = """\
7|RUNNING|2026-01-31T12:00:00|n[1-2]|gpu-7f3a|task a|b
12|PENDING|N/A|(Resources)|x|(null)
13|CANCELLED|1795736786|n1|y|
"""
    running, pending, ended = shown.jobs(text)
    assert running == shown.JobShown("7", "RUNNING", 1769860800.0, "n[1-2]", "gpu-7f3a", "task a|b")
    assert (pending.end, pending.where, pending.comment) == (None, "(Resources)", "")
    assert ended.end == 1795736786.0
    assert shown.jobs("\n") == []


def test_a_comment_of_several_lines_hides_no_job():
    line = "7|RUNNING|N/A|n1|x|a"
    assert [job.job for job in shown.jobs(f"{line}\nsecond | line\n{line.replace('7', '8')}\n")] == ["7", "8"]


def test_nodes():
    text = (
        "n1|idle|none\nn1|idle|none\nn2|drained*|bad | disk\nn3|down*|Not responding\nn4|DRAINING|x\nn5|mixed-|none\n"
    )
    nodes = shown.nodes(text)
    assert [(node.node, node.state, node.drained, node.reason) for node in nodes.values()] == [
        ("n1", "idle", False, ""),
        ("n2", "drained", True, "bad | disk"),
        ("n3", "down", False, "Not responding"),
        ("n4", "draining", True, "x"),
        ("n5", "mixed", False, ""),
    ]


def test_addresses():
    text = (
        "NodeName=n1 Arch=x86_64 NodeAddr=10.0.0.1 NodeHostName=n1 OS=Linux 6.1 #1 Reason=NodeAddr=6.6.6.6 [root@x]\n"
    )
    assert shown.addresses(text) == {"n1": "10.0.0.1"}


@pytest.mark.parametrize(
    ("text", "version"),
    [("slurm-wlm 22.05.8\n", (22, 5)), ("slurm 24.11.5", (24, 11)), ("slurm 26.05.0-0rc1", (26, 5))],
)
def test_versions(text, version):
    assert shown.version(text) == version


@pytest.mark.parametrize(("text", "job"), [("12\n", "12"), ("12;cluster\n", "12"), ("sbatch: hello\n7\n", "7")])
def test_submitted(text, job):
    assert shown.submitted(text) == job


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (shown.jobs, "JOBID PARTITION NAME\n"),
        (shown.jobs, "7|LÄUFT|N/A|n1|x|y\n"),
        (shown.jobs, "7|RUNNING|demain|n1|x|y\n"),
        (shown.jobs, "x|RUNNING|N/A|n1|x|y\n"),
        (shown.queue, "7|RUNNING|N/A|n1|x|y\n"),
        (shown.queue, "7|7|N/A|RUNNING|(null)|/home/me|gpt\n"),
        (shown.nodes, "PARTITION AVAIL\n"),
        (shown.nodes, "n1|untätig|none\n"),
        (shown.nodes, "|idle|none\n"),
        (shown.addresses, "no nodes\n"),
        (shown.appends, "Configuration data\n"),
        (shown.version, "bash: scontrol: command not found"),
        (shown.submitted, "Submitted batch job\n"),
        (shown.submitted, ""),
    ],
)
def test_what_is_of_no_slurm_is_refused(read, text):
    with pytest.raises(InvalidInputError, match=r"answers '.*', not .*: see whether"):
        read(text)


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text):
    for read in (shown.jobs, shown.queue, shown.nodes, shown.addresses, shown.submitted, shown.moment):
        try:
            read(text)
        except InvalidInputError:
            continue


def test_commands_answer_in_english_in_utc_and_in_all_columns():
    told = tools.query_environment({"LANG": "de_DE", "LC_ALL": "de_DE", "SQUEUE_FORMAT": "%i", "SINFO_X": "", "A": "b"})
    assert told == {"LANG": "de_DE", "LC_ALL": "C", "TZ": "UTC", "SLURM_TIME_FORMAT": "standard", "A": "b"}


def test_a_command_that_is_not_there(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(InvalidInputError, match=r"no squeue on the PATH: .* login node"):
        tools.ask("squeue")


@pytest.mark.parametrize(
    ("written", "kind", "told"),
    [
        ("sbatch: error: Invalid partition name specified: x", tools.SlurmError, "name one that `sinfo` lists"),
        ("sbatch: error: Batch job submission failed: Required partition not available (inactive or drain)",
         tools.SlurmError, "the partition is down"),
        ("slurm_update error: Access/permission denied", tools.SlurmError, "an operator of Slurm"),
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", tools.UnreachableError, "ping"),
        ("sbatch: unrecognized option '--requeue=expedite'", tools.SlurmError, "--help"),
        ("something else\n\x1b[31m", tools.SlurmError, "man sbatch"),
    ],
)  # fmt: skip
def test_what_a_command_refuses_is_told_with_the_cure(written, kind, told):
    error = tools.failure("sbatch", written)
    assert type(error) is kind
    assert told in str(error)
    assert "\x1b" not in str(error)


def test_a_command_that_fails(tmp_path, monkeypatch):
    program = tmp_path / "scontrol"
    program.write_text("#!/bin/sh\necho 'scontrol: error: Invalid user id' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(tools.SlurmError, match="scontrol: Invalid user id; this takes an operator"):
        tools.run(["scontrol", "update"])
    program.write_text("#!/bin/sh\nexec tail -f /dev/null\n")
    monkeypatch.setattr(tools, "ANSWER_S", 0.1)
    with pytest.raises(tools.UnreachableError, match="not answered within"):
        tools.run(["scontrol", "ping"])
