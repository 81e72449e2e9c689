"""Services decide about journals of real clusters as they did, and read what they once wrote."""

import dataclasses
import difflib
import json
from pathlib import Path

import pytest
from replay import replayer
from replay.replayer import HERE, NAMES
from unicron_simulator.storms.world import wirings

from unicron import codec
from unicron.contracts.commands import StopWorker
from unicron.service.commit import Commit


def difference(name):
    accepted = (HERE / f"{name}.txt").read_text().splitlines()
    now = replayer.decisions(replayer.read(name)).splitlines()
    return list(difflib.unified_diff(accepted, now, "accepted", "today", n=0, lineterm=""))


def test_there_are_journals_of_a_demo_before_and_after_and_of_a_storm():
    assert NAMES == ["demo", "demo-before", "storm"]


@pytest.mark.parametrize("name", NAMES)
def test_todays_cores_decide_as_was_accepted(name):
    changed = difference(name)
    assert not changed, "\n".join(
        [*changed[:60], "if that is how it should be: python tests/replay/replayer.py accept"]
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_decision_that_changes_is_seen(name, monkeypatch):
    """A transition service that stops nobody is told by the lines that are missing, and by those only."""
    wirings = replayer.wirings()

    class Merciful(type(wirings["transition"].core(None))):
        def handle(self, message):
            return [each for each in super().handle(message) if not isinstance(each, StopWorker)]

    wirings["transition"] = dataclasses.replace(wirings["transition"], core=Merciful)
    monkeypatch.setattr(replayer, "wirings", lambda: wirings)
    changed = [line for line in difference(name) if not line.startswith(("---", "+++", "@@"))]
    assert changed
    assert all(line.startswith("-+") and ": StopWorker " in line for line in changed)


OLD = json.loads(Path(__file__).with_name("commits_1.json").read_text())


@pytest.mark.parametrize("name", OLD)
def test_a_service_goes_on_from_a_commit_of_the_first_version(name):
    wiring = wirings()[name]
    commit = codec.decode(bytes.fromhex(OLD[name]), Commit)
    state = commit.decode_state(name, wiring.state, wiring.migrations)
    assert wiring.core(state).state == state
    assert {"node-1", "node-3"} <= set(state.nodes)
    assert list(state.tasks) == ["task-a", "task-b"]
