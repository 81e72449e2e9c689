"""What a command has started ends with it, however it ends; what outlives it is found."""

import os
import signal
import subprocess
import sys

import pytest
from helpers.waiting import block_until
from unicron_cli import here
from unicron_deploy.ends_with import left_behind

from unicron.processes import ProcessRecord

COMMAND = """
import subprocess, sys
from unicron_deploy.ends_with import ends_with_us

CHILD = '''
import os, signal, subprocess, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
bare = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], env={}, process_group=0)
print(os.getpid(), bare.pid, flush=True)
signal.pause()
'''
with ends_with_us():
    subprocess.Popen([sys.executable, "-c", CHILD], start_new_session=True)
    sys.stdin.read()
"""


@pytest.fixture
def command():
    """A command, and what it has started: a process that heeds no SIGINT, and a child of that, without environment."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", COMMAND], text=True, start_new_session=True, **pipes)
    started = [ProcessRecord.from_pid(int(pid)) for pid in process.stdout.readline().split()]
    yield process, started
    process.kill()
    for each in started:
        each.signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()


def watches(process):
    found = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True, check=False
    )
    return [ProcessRecord.from_pid(int(pid)) for pid in found.stdout.split()]


def test_whatever_a_command_has_started_ends_with_it_by_sigkill_too(command):
    process, started = command
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    block_until(lambda: not any(each.alive() for each in started))


def test_what_a_command_leaves_in_an_orderly_way_stays_and_is_not_watched_any_more(command):
    process, started = command
    [watch] = [each for each in watches(process) if each not in started]
    process.stdin.close()
    assert process.wait() == 0
    assert not watch.alive()
    assert all(each.alive() for each in started)


def test_doctor_finds_what_outlived_its_command_and_says_how_to_end_it(command, monkeypatch):
    process, started = command
    [watch] = [each for each in watches(process) if each not in started]
    watch.signal(signal.SIGKILL)
    process.kill()
    process.wait()
    assert started[0] in left_behind()
    [found] = [found for found in here.findings({}) if found.name == "remains"]
    assert str(started[0].pid) in found.command.removeprefix("kill -KILL ").split()
