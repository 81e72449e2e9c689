"""Waiting for what is written to a file."""

import os
import threading
import time

import pytest
from unicron_agent import changes
from unicron_agent.changes import Changes

LONG_S = 30.0


@pytest.fixture
def file(tmp_path):
    (tmp_path / "log").touch()
    found = os.open(tmp_path / "log", os.O_RDWR | os.O_APPEND)
    yield found
    os.close(found)


def test_what_is_written_ends_the_wait(file):
    waiting, began = Changes(file), time.monotonic()
    for _ in range(2):  # it is told of once, and then again
        threading.Timer(0.05, os.write, (file, b"a line\n")).start()
        waiting.wait(LONG_S)
    waiting.close()
    assert 0.1 <= time.monotonic() - began < LONG_S


def test_where_the_kernel_tells_nobody_it_is_looked_at(file, monkeypatch):
    class NoMore:
        def inotify_init1(self, _):
            return -1

        def inotify_add_watch(self, *_):
            return -1

    monkeypatch.setattr(changes.ctypes, "CDLL", lambda _: NoMore())
    waiting, began = Changes(file), time.monotonic()
    waiting.wait(LONG_S)
    waiting.close()
    assert time.monotonic() - began < LONG_S
