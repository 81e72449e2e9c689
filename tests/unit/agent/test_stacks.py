"""Where the threads of real processes are, seen from outside."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest
from helpers.waiting import PATIENT_S, block_until
from unicron_agent import stacks
from unicron_agent.activity import asleep
from unicron_agent.stacks import stacks_of, told

SCRIPT = """
import os, sys, threading
def child():
    os.write(1, b"c"); os.read(0, 1)
def other():
    os.write(1, b"o"); os.read(0, 1)
def innermost():
    os.write(1, b"i"); os.read(0, 1)
def outer():
    innermost()
if not os.fork():
    child()
threading.Thread(target=other, name="helper", daemon=True).start()
outer()
"""


@pytest.fixture
def process(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    started = subprocess.Popen([sys.executable, script], **pipes, start_new_session=True)
    assert sorted(started.stdout.read(3)) == sorted(b"cio")
    block_until(lambda: asleep(started.pid) is not None)  # all three are about to
    yield started
    os.killpg(started.pid, signal.SIGKILL)
    started.communicate()


@pytest.mark.parametrize("stopped", [False, True])
async def test_threads_of_a_process_and_its_children_are_seen_also_where_it_is_stopped(process, stopped, monkeypatch):
    monkeypatch.setattr(stacks, "TAKES_S", PATIENT_S)  # a look may wait for its turn on a core
    if stopped:
        process.send_signal(signal.SIGSTOP)
    first, *others = await stacks_of(process.pid)
    assert first.startswith(f"{process.pid} MainThread: innermost (train.py:8) < outer (train.py:10) < <module>")
    assert any("helper: other (train.py:6)" in line for line in others)
    assert any("child (train.py:4)" in line and not line.startswith(f"{process.pid} ") for line in others)


async def test_of_a_process_that_is_gone_nothing_is_seen():
    gone = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await gone.wait()
    assert await stacks_of(gone.pid) == ()


FRAME = b'{"name": "f", "filename": null, "line": 1}'
NAMELESS = b'[{"pid": 1, "os_thread_id": 1, "thread_name": null, "frames": [' + FRAME + b"]}]"


@pytest.mark.parametrize("noise", [b"", b"Error: failed", b"{}", b"[1]", b'[{"pid": 1}]', NAMELESS])
def test_what_is_no_stack_is_none(noise):
    assert told(noise) == []
