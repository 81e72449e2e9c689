"""Waiting for what is written to a file."""

import os
from types import SimpleNamespace

import pytest
from unicron_agent import changes
from unicron_agent.changes import Changes

LONG_S = 1e5
"""A test that waits for so long never ends."""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "log").touch()
    found = os.open(tmp_path / "log", os.O_RDWR | os.O_APPEND)
    yield found
    os.close(found)


def test_what_is_written_ends_the_wait_and_is_told_of_once(file):
    waiting = Changes(file)
    for _ in range(2):
        assert waiting._poll.poll(0) == []
        os.write(file, b"a line\n")
        waiting.wait(LONG_S)
    asked = []
    waiting._poll = SimpleNamespace(poll=asked.append)
    waiting.wait(7.0)
    assert asked == [7000.0], "it is the kernel that waits"
    waiting.close()


def test_where_the_kernel_tells_nobody_it_is_looked_at(file, monkeypatch):
    refuses = SimpleNamespace(inotify_init1=lambda _: -1, inotify_add_watch=lambda *_: -1)
    monkeypatch.setattr(changes.ctypes, "CDLL", lambda _: refuses)
    waiting = Changes(file)
    waiting.wait(LONG_S)
    waiting.close()
