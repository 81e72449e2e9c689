"""States that must not be believed: of a worker that diverged, and what it saved."""

import pytest
from helpers.transition import failure, of

from tests.unit.transition.test_core import TransitionHarness
from unicron.contracts.commands import DropStates, FindStates, Regroup, SaveStates
from unicron.contracts.events import StateDiverged, StatesFound
from unicron.contracts.failures import Severity
from unicron.contracts.states import StateLocation, StateRef


class Remembering(TransitionHarness):
    """One whose nodes answer nothing by themselves."""

    def taken(self, message):
        return [message]

    def diverged(self, worker, node):
        told = {"epoch": 0, "iteration": 5, "place": 0, "replica": 1, "digests": ["a", "b", "a"]}
        return self.feed(StateDiverged(node=node, slot=0, task="a", worker=worker, **told))

    def fail(self, worker, node, severity=Severity.SEV2):
        return self.feed(failure(severity, task="a", node=node, slot=0, worker=worker))


@pytest.fixture
def scene():
    scene = Remembering(a={}).running(a=["n1:0", "n1:1", "n2:0"])
    held = scene.run("a").saves.held
    assert {name: list(nodes) for name, nodes in held.items()} == {"a-1": ["n1"], "a-3": ["n2"]}
    return scene


def copy(worker, node, iteration=5):
    location = StateLocation(node=node, worker=worker, name=f"{worker}.0.saved", address="")
    return StateRef(task="a", iteration=iteration, place=0, location=location, size=1, checksum=b"")


def test_who_diverged_takes_part_in_the_next_membership_and_saves_anew(scene):
    out = scene.diverged("a-3", "n2")
    [order] = of(SaveStates, out)
    assert (order.node, [saver.worker for saver in order.savers]) == ("n2", ["a-3"])
    assert of(Regroup, out) == [], "the detector says when"
    out = scene.feed(failure(Severity.SEV3, task="a", node="n2", slot=0, worker="a-3", epoch=0))
    assert [member.worker for order in of(Regroup, out) for member in order.members] == ["a-1", "a-2", "a-3"]


def test_copies_elsewhere_of_what_it_saved_are_removed():
    scene = Remembering(a={}).running(a=["n1:0"])
    [[_, keeper]] = [list(nodes) for nodes in scene.run("a").saves.held.values()]
    out = scene.diverged("a-1", "n1")
    assert [(order.node, order.names) for order in of(DropStates, out)] == [(keeper, ["a-1.0.saved", "a-1.1.saved"])]


def test_its_state_does_not_count_when_all_others_are_gone(scene):
    scene.diverged("a-3", "n2")
    scene.fail("a-1", "n1")
    out = scene.fail("a-2", "n1")
    asked = of(FindStates, out)
    assert [order.node for order in asked] == ["n1", "n2"]
    assert of(Regroup, out) == []


def test_nothing_that_it_saved_is_taken_even_if_it_was_found_before(scene):
    for name, node in (("a-1", "n1"), ("a-2", "n1")):
        scene.fail(name, node)
    asked = of(FindStates, scene.fail("a-3", "n2"))
    there = {"n1": [copy("a-1", "n1", 4)], "n2": [copy("a-3", "n2", 5)]}
    for order in asked:
        scene.feed(StatesFound(node=order.node, task="a", search=order.search, states=there.get(order.node, [])))
    assert scene.run("a").shelf.iteration == 5
    out = scene.diverged("a-3", "n2")  # it was on its way when its node was given up
    assert scene.run("a").shelf is None
    assert [order.search for order in of(FindStates, out)] == [2] * len(asked)
    assert {order.node for order in of(DropStates, out)} >= {"n2"}
