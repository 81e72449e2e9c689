"""`unicron checkpoints`, as a user types it."""

import json
import sys

import pytest
from typer.testing import CliRunner
from unicron_cli.main import app

from unicron.errors import UnicronError


def checkpoints(*words):
    return CliRunner().invoke(app, ["checkpoints", *words], catch_exceptions=False)


def test_the_odds_of_going_on_from_memory_as_a_table():
    shown = checkpoints("odds", "--nodes", "16", "--copies", "2").stdout
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert lines[0] == "LOST AT ONCE 2 COPIES FAILS ONCE IN NO COPIES ON OTHER NODES"
    assert lines[1:3] == ["1 100.0000% never 0%", "2 93.3333% 15.0 0%"]
    assert len(lines) == 9


def test_the_odds_for_programs():
    found = json.loads(checkpoints("odds", "--nodes", "16", "--copies", "2", "--lost", "3", "--json").stdout)
    assert (found["nodes"], found["copies"]) == (16, 2)
    assert [row["lost"] for row in found["rows"]] == [1, 2, 3]
    assert [row["odds"] for row in found["rows"]] == pytest.approx([1, 14 / 15, 0.8])
    assert {row["without"] for row in found["rows"]} == {0}


def test_more_copies_than_nodes_are_told():
    done = checkpoints("odds", "--nodes", "2", "--copies", "3", "--json")
    assert "2 nodes can't keep 3 copies" in done.stderr
    found = json.loads(done.stdout)
    assert found["copies"] == 2
    assert [row["odds"] for row in found["rows"]] == [1, 0]


def test_no_nodes_are_refused():
    assert checkpoints("odds", "--nodes", "0").exit_code == 2


@pytest.mark.parametrize("words", [("list",), ("verify",), ("prune", "gpt"), ("show", "gpt")])
def test_without_fsspec_the_extra_is_named(words, monkeypatch, tmp_path):
    for name in [name for name in sys.modules if name.startswith("unicron.snapshots.storage")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(UnicronError, match=r"pip install '\.\[storage\]'"):
        checkpoints(*words, "--at", str(tmp_path))
