"""The transition service's small values, and what contradicts itself in its state."""

import pytest
from helpers.transition import slot
from unicron_transition.cluster import NodeRun
from unicron_transition.core import TransitionCore
from unicron_transition.deadlines import TIMEOUT_S, Deadline, WaitKind
from unicron_transition.group import WorkerGroup
from unicron_transition.membership import TaskMembership, WorkerRun, WorkerStage
from unicron_transition.state import TaskRun, TransitionState

from unicron.contracts.tasks import ParallelLayout, SlotRef, TaskSpec, TaskState

SLOT = SlotRef(node="n1", slot=0)


def group():
    found = WorkerGroup(spec=TaskSpec(name="t", command=["x"]))
    for worker, place, iteration, node in [("a", 0, 5, "n1"), ("b", 0, 7, "n2"), ("c", 1, 7, "n2")]:
        found.record_state(worker, place, iteration, node)
    return found


def test_who_has_a_place_is_the_furthest_of_those_that_count():
    assert group().newest_holder(0, "abcd") == "b"
    assert group().newest_holder(0, "ac") == "a"


def test_places_are_those_that_somebody_has():
    assert group().held_places("abcd") == {0, 1}
    assert group().held_places("ad") == {0}


def test_who_ended_with_its_node_has_nothing_and_who_is_away_still_does():
    found = group()
    found.forget_others("n2", ["c"])
    assert found.held_places("abc") == {0, 1}
    assert found.held_places("bc") == {1}
    found.forget_others("n1", [])
    assert list(found.holders) == ["c"]


@pytest.mark.parametrize(
    "deadline", [Deadline(WaitKind.START, "my-task_1", "my-task_1-3"), Deadline(WaitKind.REGROUP, "gpt")]
)
def test_a_deadline_is_read_from_the_name_of_its_timer(deadline):
    assert Deadline.read(deadline.name) == deadline
    assert (deadline.set().name, deadline.set().after_s) == (deadline.name, TIMEOUT_S[deadline.wait])
    assert deadline.cancel().name == deadline.name


def workers(*names, through=()):
    stages = {name: WorkerStage.FINISHED if name in through else WorkerStage.READY for name in names}
    return {name: WorkerRun(worker=name, slot=SLOT, stage=stage) for name, stage in stages.items()}


def test_a_membership_is_met_by_the_first_and_complete_with_the_last():
    found = TaskMembership().successor(["a", "b"], ParallelLayout(replicas=2))
    assert (found.epoch, found.has_met, found.complete, found.met) == (0, False, False, [])
    found.record_join("b")
    assert (found.has_met, found.complete, found.met) == (True, False, ["a", "b"])
    found.record_join("a")
    assert found.complete
    later = found.successor(["a"], ParallelLayout(replicas=1))
    assert (later.epoch, later.joined, later.met) == (1, {}, ["a", "b"])


def test_a_membership_is_intact_while_all_live_and_none_was_lost():
    found = TaskMembership().successor(["a", "b"], ParallelLayout(replicas=2))
    assert found.intact(workers("a", "b"))
    assert not found.intact(workers("a"))
    assert not found.intact(workers("a", "b", through="b")), "who is through can't come any more"
    found.record_join("b")
    assert found.intact(workers("a", "b", through="b"))
    found.record_loss("c")
    assert found.intact(workers("a", "b"))
    found.record_loss("a")
    assert not found.intact(workers("a", "b"))
    assert not found.has_met
    assert found.survivors(workers("b")) == ["b"]


@pytest.mark.parametrize("lost", [True, False])
def test_who_only_takes_a_state_does_not_keep_a_task_alive_whose_computing_members_are_through(lost):
    layout = ParallelLayout(tensor=2, replicas=1)
    found = TaskMembership(epoch=1, layout=layout, group=["a", "b", "c"], through={"a": None, "b": None})
    found.record_join("c")
    assert found.met == ["a", "b"]
    assert found.has_ended(workers("c"), lost=lost)


# --- what contradicts itself ------------------------------------------------------------------------------------------


@pytest.fixture
def core():
    state = TransitionState(nodes={"n1": NodeRun(), "n2": NodeRun()})
    run = TaskRun(spec=TaskSpec(name="t", command=["x"]), started=2)
    run.membership = TaskMembership(epoch=3, layout=ParallelLayout(replicas=2), group=["t-1", "t-2"], since=[0, 3])
    state.tasks["t"] = run
    for name, node in (("t-1", "n1"), ("t-2", "n2")):
        state.add_worker(run, WorkerRun(worker=name, slot=slot(f"{node}:0")))
    state.set_target(run, [slot("n1:0"), slot("n2:0")])
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
        (lambda state, run: state.drop_worker(run, "t-2"), "t-2 of membership 3 are no workers"),
        (gone_behind_the_lookups, "are held to be in slots"),
        (lambda state, _: state.nodes.pop("n2"), "t-2 lives on n2, which is not there"),
        (unheeded_node, "what happens to n3 is not held to concern t"),
        (ended_with_workers, "it is finished, and has workers"),
        (lambda _, run: run.membership.joined.update({"t-9": None}), "t-9 joined membership 3 without"),
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
