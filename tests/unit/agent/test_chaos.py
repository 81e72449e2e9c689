"""Faults that an agent brings upon its own node do what they say."""

import os
import signal
import subprocess
import sys
from unittest.mock import MagicMock

import pytest
from unicron_agent.chaos import Chaos
from unicron_agent.workers.activity import start_time

from unicron.contracts.faults import FAULTS, NODE, WORKER
from unicron.contracts.queries import InjectFault
from unicron.errors import InvalidInputError


def test_a_node_that_is_killed_takes_along_what_leads_a_session_of_its_own(tmp_path):
    worker = subprocess.Popen(
        ["sleep", "60"], env={**os.environ, "UNICRON_STATE_DIR": str(tmp_path)}, start_new_session=True
    )
    strike = f"from unicron_agent.chaos import _kill_node; _kill_node('UNICRON_STATE_DIR={tmp_path}')"
    agent = subprocess.run([sys.executable, "-c", strike], start_new_session=True, check=False)
    assert agent.returncode == -signal.SIGKILL
    assert worker.wait(5) == -signal.SIGKILL


def test_a_node_that_is_killed_takes_along_what_it_has_forked_and_the_workers_of_an_earlier_agent():
    earlier = subprocess.Popen(["sleep", "60"], start_new_session=True)
    child = "(os.setpgid(0, 0), os.close(1), signal.pause())"
    strike = (
        f"import os, signal; from unicron_agent.chaos import _kill_node; child = os.fork() or {child}; "
        f"print(child, flush=True); _kill_node('NO=MARK', [{earlier.pid}])"
    )
    agent = subprocess.run([sys.executable, "-c", strike], start_new_session=True, check=False, stdout=subprocess.PIPE)
    assert start_time(int(agent.stdout)) is None
    assert earlier.wait(5) == -signal.SIGKILL


@pytest.mark.parametrize("target", [WORKER, NODE])
async def test_a_fault_of_the_table_that_the_agent_has_no_case_for_is_refused(monkeypatch, target):
    monkeypatch.setitem(FAULTS, "new", FAULTS["kill-node"]._replace(name="new", targets=(target,)))
    chaos = Chaos(*(MagicMock() for _ in range(8)))
    with pytest.raises(InvalidInputError, match="new is in the table of faults"):
        await chaos.inject(InjectFault(fault="new", worker="gpt-1" if target == WORKER else ""))
