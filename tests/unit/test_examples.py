"""Property tests try the same examples in every run."""

import importlib
import sys

from hypothesis import given, settings
from hypothesis import strategies as st


def drawn():
    found = []

    @given(st.text(), st.integers(), st.floats())
    def take(text, whole, number):
        found.append(repr((text, whole, number)))

    take()
    return found


def test_whatever_else_the_process_has_imported(tmp_path, monkeypatch):
    before = drawn()
    numbers, words = [*range(10_000, 10_100)], [f"word-{number}" for number in range(100)]
    (tmp_path / "a_module_of_ours.py").write_text(f"WORDS, NUMBERS = {words}, {numbers}")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        importlib.import_module("a_module_of_ours")
        assert drawn() == before
    finally:
        del sys.modules["a_module_of_ours"]


def test_and_however_long_one_takes():
    assert settings.default.deadline is None
