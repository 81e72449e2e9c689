"""An attack on a real cluster's bus: nothing ends, nothing forged is obeyed, and all goes on as before."""

import json
import subprocess
import sys

import pytest
from helpers import ROOT


@pytest.mark.slow
def test_an_open_bus_is_attacked_for_some_seconds_and_all_goes_on():
    command = [sys.executable, "-m", "benchmarks.fuzz", "--minutes", "0.05", "--seed", "3", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    figures = found["figures"]
    wrong = ("crashes", "poisoned", "wrong_commands_obeyed", "real_commands_refused")
    assert {name: figures[name] for name in wrong} == dict.fromkeys(wrong, 0), found["details"]
    assert figures["messages"] >= 100
    assert figures["dead_letters"] > 10
    assert found["details"]["said"]["forged"] > 0 < figures["iterations_meanwhile"]
