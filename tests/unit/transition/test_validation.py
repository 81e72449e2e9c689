"""What contradicts itself in the transition service's state is named."""

import pytest
from helpers.transition import slot
from unicron_transition.core import TransitionCore
from unicron_transition.membership import Membership, WorkerRun
from unicron_transition.state import NodeRun, TaskRun, TransitionState

from unicron.contracts.tasks import ParallelLayout, TaskSpec, TaskState


@pytest.fixture
def core():
    state = TransitionState(nodes={"n1": NodeRun(), "n2": NodeRun()})
    run = TaskRun(spec=TaskSpec(name="t", command=["x"]), started=2)
    run.membership = Membership(epoch=3, layout=ParallelLayout(replicas=2), group=["t-1", "t-2"], since=[0, 3])
    state.tasks["t"] = run
    for name, node in (("t-1", "n1"), ("t-2", "n2")):
        state.add(run, WorkerRun(worker=name, slot=slot(f"{node}:0")))
    state.aim(run, [slot("n1:0"), slot("n2:0")])
    assert state.occupied
    return TransitionCore(state)


def other_slot(state, run):
    run.workers["t-2"].slot = run.workers["t-1"].slot


def gone_behind_the_lookups(state, run):
    run.membership.broken = True
    del run.workers["t-2"]


def unheeded_node(state, run):
    state.nodes["n3"] = NodeRun()
    run.target = [slot("n3:1")]


def ended_with_workers(state, run):
    run.state = TaskState.FINISHED


def newer_replica(state, run):
    run.membership.since = [0, 4]


def member_twice(state, run):
    run.membership.group = ["t-1", "t-1"]


def too_few(state, run):
    run.membership.group = ["t-1"]
    run.membership.since = [0]


def leaving_node(state, run):
    state.leaving = ["n9"]


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (other_slot, "n1:0 has 2 workers"),
        (lambda state, run: state.drop(run, "t-2"), "t-2 of the membership of epoch 3 are no workers"),
        (gone_behind_the_lookups, "are held to be in slots"),
        (lambda state, _: state.nodes.pop("n2"), "t-2 lives on n2, which is not there"),
        (unheeded_node, "what happens to n3 is not held to concern t"),
        (ended_with_workers, "it is finished, and has workers"),
        (lambda _, run: run.membership.joined.update({"t-9": None}), "t-9 joined the membership of epoch 3 without"),
        (newer_replica, "has replicas since"),
        (member_twice, "has a member twice"),
        (too_few, "has 1 members in a layout of 2"),
        (leaving_node, "n9 waits to leave and is not there"),
    ],
)
def test_what_contradicts_itself_is_named(core, plant, words):
    assert core.validate() == []
    plant(core.state, core.state.tasks["t"])
    assert any(words in problem for problem in core.validate())
