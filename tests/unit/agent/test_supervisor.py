"""What the supervisor reads of real processes."""

import os
import signal
import subprocess
import sys

from unicron_agent.activity import is_stopped


def test_a_process_is_stopped_from_the_signal_until_it_goes_on():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert not is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert is_stopped(process.pid)
        process.send_signal(signal.SIGCONT)
        os.waitid(os.P_PID, process.pid, os.WCONTINUED)
        assert not is_stopped(process.pid)
    finally:
        process.kill()
        process.communicate()
    assert not is_stopped(process.pid)
