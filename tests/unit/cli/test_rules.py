"""`unicron rules`, as a user types it."""

import json

import pytest
from helpers.cli import invoke

from unicron.errors import InvalidInputError

MINE = """
[[rule]]
status = "nvlink_error"
severity = 1
match = "fabric manager"

[[kernel]]
status = "io_error"
severity = 3
match = "weka"

[[xid]]
status = "ecc_error"
severity = 1
codes = [63]
"""


def run(*words):
    return invoke("rules", *words)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "10-mine.toml").write_text(MINE)
    return tmp_path


def test_a_line_is_explained_as_either():
    line = "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."
    told = json.loads(run("explain", line, "--json"))
    assert told["of the kernel"] == {
        "status": "gpu_driver_error",
        "severity": 1,
        "cure": "the node is given up, and its tasks go on elsewhere",
        "rule": "rules.toml: xid 79",
    }
    said = run("explain", "ConnectionResetError: connection reset by peer")
    assert "connection_reset, severity 3" in said
    assert "of the kernel: says nothing" in said
    assert "default" in run("explain", "OSError: bad")


def test_a_line_of_a_workers_output_is_explained(folder):
    line = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=41)"
    told = json.loads(run("explain", line, "--json"))["of a worker's output"]
    assert told["status"] == "nccl_timeout"
    assert told["cure"] == "nothing by itself; a failure of its task just then has it in its reason"
    (folder / "mine.toml").write_text("[[worker]]\nstatus = 'io_error'\nmatch = '^lustre: '\n")
    assert "of a worker's output: io_error" in run("explain", "lustre: eviction", "--rules", str(folder))
    assert "of a worker's output: says nothing" in run("explain", "a lustre: eviction", "--rules", str(folder))


def test_ones_own_rules_come_first_and_ours_behind_them(folder):
    told = json.loads(run("explain", "NVRM: Xid (PCI:0000:3b:00): 63", "--rules", str(folder), "--json"))
    assert told["of the kernel"]["rule"] == f"{folder / '10-mine.toml'}: xid 63"
    assert "io_error, severity 3: nothing by itself" in run("explain", "weka: timeout", "--rules", str(folder))
    assert "nvlink_error" in run("explain", "RuntimeError: connection reset, Fabric Manager", "--rules", str(folder))
    assert "connection_reset" in run("explain", "RuntimeError: connection reset", "--rules", str(folder))
    (folder / "00-first.toml").write_text(MINE.replace("nvlink_error", "ecc_error"))
    assert "ecc_error" in run("explain", "fabric manager", "--rules", str(folder))


def test_a_file_is_checked(folder):
    assert "is in order" in run("check", str(folder / "10-mine.toml"))
    broken = folder / "broken.toml"
    broken.write_text(MINE.replace('"weka"', '"("'))
    with pytest.raises(InvalidInputError, match=r"broken\.toml: kernel 'io_error': match '\(' is no regular"):
        run("check", str(broken))
    with pytest.raises(InvalidInputError, match=r"broken\.toml"):
        run("explain", "x", "--rules", str(folder))
    with pytest.raises(InvalidInputError, match="name a TOML file"):
        run("check", str(folder / "none.toml"))
    with pytest.raises(InvalidInputError, match="name a folder of TOML files"):
        run("explain", "x", "--rules", str(folder / "none"))
