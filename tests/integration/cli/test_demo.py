"""The demo on a cluster of its own, ended before its time."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.waiting import block_until


def running_in(folder):
    """Return the command lines of all processes that name the folder, by process id."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found[int(path.parent.name)] = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return {pid: line for pid, line in found.items() if str(folder) in line}


@pytest.mark.exhaustive("what is started is stopped by the same code as that of unicron up, which is")
@pytest.mark.parametrize("started", [2, 4], ids=["while it starts", "with the bus and three agents"])
def test_a_demo_that_is_told_to_end_leaves_no_process(started, tmp_path):
    command, environment = [sys.executable, "-m", "unicron_cli", "demo"], {**os.environ, "TMPDIR": str(tmp_path)}
    demo = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        block_until(lambda: len(running_in(tmp_path)) >= started or demo.poll() is not None)
        assert demo.poll() is None
        demo.terminate()
        assert demo.wait() != 0
        assert running_in(tmp_path) == {}
    finally:
        demo.kill()
        for pid in running_in(tmp_path):
            os.kill(pid, signal.SIGKILL)
