"""Rules that can't be used: neither the detector nor an agent starts, and both say where and why."""

import subprocess
import sys

import pytest

PROCESSES = {
    "detector": ["unicron_detector"],
    "agent": ["unicron_agent", "--node", "n1", "--slots", "1", "--fabric-key", ""],
}


@pytest.mark.parametrize("name", PROCESSES)
@pytest.mark.parametrize(
    ("rules", "says"),
    [
        (
            "[[kernel]]\nstatus = 'io_error'\nseverity = 3\nmatch = 'a('\n",
            "kernel 'io_error': match 'a(' is no regular",
        ),
        ("[[worker]]\nstatus = 'io_error'\nmatch = 'a{99999999999999}'\n", "the repetition number is too large"),
        ("[[rule]]\nstatus = 'io_eror'\nseverity = 3\nmatch = 'a'\n", "no status 'io_eror'"),
        ("[[rule]\n", "mend that entry"),
    ],
)
def test_a_broken_file_of_rules_is_named(tmp_path, nats_world, name, rules, says):
    (tmp_path / "mine.toml").write_text(rules)
    process, *options = PROCESSES[name]
    options += ["--nats-url", nats_world.settings.nats_url, "--rules", str(tmp_path)]
    options += ["--run-dir", str(tmp_path / "run")] if name == "agent" else []
    ended = subprocess.run([sys.executable, "-m", process, *options], capture_output=True, text=True, check=False)
    assert ended.returncode != 0
    told = ended.stdout + ended.stderr
    assert str(tmp_path / "mine.toml") in told
    assert says in told
    assert "Traceback" not in told
