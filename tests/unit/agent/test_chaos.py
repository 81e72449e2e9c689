"""Faults that an agent brings upon its own node do what they say."""

import os
import signal
import subprocess
import sys


def test_a_node_that_is_killed_takes_along_what_leads_a_session_of_its_own(tmp_path):
    worker = subprocess.Popen(
        ["sleep", "60"], env={**os.environ, "UNICRON_STATE_DIR": str(tmp_path)}, start_new_session=True
    )
    strike = f"from unicron_agent.chaos import _die; _die('UNICRON_STATE_DIR={tmp_path}')"
    agent = subprocess.run([sys.executable, "-c", strike], start_new_session=True, check=False)
    assert agent.returncode == -signal.SIGKILL
    assert worker.wait(5) == -signal.SIGKILL
