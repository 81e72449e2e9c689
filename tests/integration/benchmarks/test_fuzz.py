"""An attack on a real cluster's bus: nothing ends, nothing forged is obeyed, and all goes on as before."""

import json
import os
import subprocess
import sys

import pytest
from helpers import ROOT

from benchmarks.fuzz_checks import MICROBATCHES, SCRIPT, parameters_differ


@pytest.mark.exhaustive("what a forged message leads to is shown by lies in storms and by the tests of rights")
@pytest.mark.parametrize(("minutes", "more"), [("0.05", ["--insecure"]), ("0.25", [])], ids=["open", "keys"])
def test_a_bus_is_attacked_for_some_seconds_and_all_goes_on(minutes, more):
    command = [sys.executable, "-m", "benchmarks.fuzz", "--minutes", minutes, "--seed", "3", "--json", *more]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    figures = found["figures"]
    wrong = ("crashes", "poisoned", "wrong_commands_obeyed", "real_commands_refused")
    assert {name: figures[name] for name in wrong} == dict.fromkeys(wrong, 0), found["details"]
    assert figures["training_stopped"] == 0
    assert figures["parameters_differ"] <= 1e-5
    assert figures["messages"] >= 100
    if not more:
        assert figures["strikes"] > 0
        assert found["details"]["of"]["subscriber"]["refused_by_the_server"] > 0
    assert figures["dead_letters"] > 10
    assert found["details"]["said"]["forged"] > 0 < figures["iterations_meanwhile"]


@pytest.mark.exhaustive("it is of the attack, which is in make test-all")
def test_parameters_of_another_history_are_told_apart(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "fuzzed")]
    fewer = {"UNICRON_ITERATIONS": "50", "UNICRON_MICROBATCHES": str(MICROBATCHES - 1), "FUZZ_PAUSE_S": "0"}
    subprocess.run(command, env={**os.environ, **fewer}, check=True)
    assert parameters_differ(tmp_path, "fuzzed") > 1e-3
