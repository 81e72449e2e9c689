"""States that must not be believed: of a worker that diverged, what it saved, and what turns out to be no good."""

import pytest
from helpers.transition import failure, of

from tests.unit.transition.test_core import TransitionHarness
from unicron.contracts import events
from unicron.contracts.commands import DropStates, FindCheckpoint, FindStates, Regroup, SaveStates, StopWorker
from unicron.contracts.failures import Severity
from unicron.contracts.states import Saver, StateLocation, StateRef
from unicron.contracts.storage import StoredState
from unicron.contracts.tasks import ParallelLayout, Slot, TaskState


class Remembering(TransitionHarness):
    """One whose nodes answer nothing by themselves."""

    def taken(self, message):
        return [message]

    def diverged(self, worker, node):
        told = {"epoch": 0, "iteration": 5, "place": 0, "replica": 1, "digests": ["a", "b", "a"]}
        return self.feed(events.StateDiverged(node=node, slot=0, task="a", worker=worker, **told))


@pytest.fixture
def scene():
    scene = Remembering(a={}).running(a=["n1:0", "n1:1", "n2:0"])
    held = scene.run("a").snapshots.saves.held
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
    [[_, keeper]] = [list(nodes) for nodes in scene.run("a").snapshots.saves.held.values()]
    out = scene.diverged("a-1", "n1")
    assert [(order.node, order.names) for order in of(DropStates, out)] == [(keeper, ["a-1.0.saved", "a-1.1.saved"])]


def test_its_state_does_not_count_when_all_others_are_gone(scene):
    scene.diverged("a-3", "n2")
    scene.killed("a-1")
    out = scene.killed("a-2")
    asked = of(FindStates, out)
    assert [order.node for order in asked] == ["n1", "n2"]
    assert of(Regroup, out) == []


def test_nothing_that_it_saved_is_taken_even_if_it_was_found_before(scene):
    asked = of(FindStates, scene.killed("a-1", "a-2", "a-3"))
    there = {"n1": [copy("a-1", "n1", 4)], "n2": [copy("a-3", "n2", 5)]}
    for order in asked:
        scene.feed(events.StatesFound(node=order.node, task="a", search=order.search, states=there.get(order.node, [])))
    assert scene.run("a").snapshots.parked.iteration == 5
    out = scene.diverged("a-3", "n2")  # it was on its way when its node was given up
    assert scene.run("a").snapshots.parked is None
    assert [order.search for order in of(FindStates, out)] == [2] * len(asked)
    assert {order.node for order in of(DropStates, out)} >= {"n2"}


THERE = [copy("a-1", "n1", 5), copy("a-3", "n2", 4)]


def unusable(scene, iteration, copies="the memory of n1", worker=""):
    run = scene.run("a")
    worker = worker or run.membership.group[0]
    node = run.workers[worker].slot.node
    told = {"epoch": run.membership.epoch, "iteration": iteration, "copies": copies, "reason": "not finite"}
    return scene.feed(events.StateUnusable(node=node, slot=0, task="a", worker=worker, **told))


def answered(scene, out, *copies):
    """Answer the search that `out` begins."""
    for order in of(FindStates, out):
        there = [each for each in copies if each.location.node == order.node]
        out = scene.feed(events.StatesFound(node=order.node, task="a", search=order.search, states=there))
    return out


def restored(scene, *copies):
    """Kill all workers and have new ones go on from these copies; return the copies that are then taken."""
    answered(scene, scene.killed("a-1", "a-2", "a-3"), *copies)
    shelf = scene.run("a").snapshots.parked
    scene.ready("a")
    scene.join("a")
    return shelf


def test_of_what_turns_out_to_be_no_good_the_next_older_is_taken_and_never_the_same_again(scene):
    assert restored(scene, *THERE).iteration == 5
    out = unusable(scene, 5)
    assert scene.run("a").state is TaskState.RECOVERING
    assert of(Regroup, out) == []
    out = answered(scene, out, *THERE)
    [order] = [order for order in of(Regroup, out) if order.shelf]
    assert order.shelf.iteration == 4
    assert [ref.location.node for ref in order.shelf.states] == ["n2"]


def test_what_several_workers_tell_of_one_state_counts_once(scene):
    restored(scene, *THERE)
    group = scene.run("a").membership.group
    out = unusable(scene, 5)
    assert unusable(scene, 5, worker=group[1]) == []
    assert of(Regroup, answered(scene, out, copy("a-3", "n2", 4)))
    late = {"epoch": 1, "iteration": 5, "copies": "x", "reason": "not finite"}
    assert scene.feed(events.StateUnusable(node="n1", slot=0, task="a", worker=group[1], **late)) == []


def test_what_a_worker_brings_in_again_that_missed_its_being_ruled_out_is_ruled_out_again(scene):
    restored(scene, *THERE)
    answered(scene, unusable(scene, 5), *THERE)
    scene.join("a")
    out = unusable(scene, 5)
    assert scene.run("a").state is TaskState.RECOVERING
    [order] = [order for order in of(Regroup, answered(scene, out, *THERE)) if order.shelf]
    assert order.shelf.iteration == 4


def test_where_nothing_older_is_left_the_task_ends_and_says_what_was_tried(scene):
    restored(scene, *THERE)
    answered(scene, unusable(scene, 5), *THERE)
    scene.join("a")
    out = answered(scene, unusable(scene, 4, "the memory of n2"), *THERE)
    [changed] = of(events.TaskStateChanged, out)
    assert changed.state is TaskState.FAILED
    assert changed.reason == (
        "no copy of its state can be used: iteration 5 from the memory of n1 (not finite); "
        "iteration 4 from the memory of n2 (not finite); nothing older is there"
    )
    assert of(Regroup, out) == []
    assert {order.worker for order in of(StopWorker, out)} == {"a-4", "a-5", "a-6"}


def test_on_storage_only_what_is_older_is_looked_for():
    scene = Remembering(a={"checkpoints": "/r"}).running(a=["n1:0", "n1:1", "n2:0"])
    restored(scene, copy("a-1", "n1", 5))
    [find] = of(FindCheckpoint, answered(scene, unusable(scene, 5), copy("a-1", "n1", 5)))
    assert find.before == 5
    found = {"task": "a", "search": find.search, "skipped": []}
    stored = StoredState(root="/r", folder="a/step-3", iteration=3, layout=ParallelLayout(replicas=3))
    out = scene.feed(events.CheckpointFound(node=find.node, stored=stored, **found))
    assert [order.shelf.stored for order in of(Regroup, out) if order.shelf] == [stored]


def test_once_a_newer_state_is_safe_what_was_no_good_is_forgotten(scene):
    restored(scene, *THERE)
    answered(scene, unusable(scene, 5), copy("a-3", "n2", 4))
    scene.join("a")
    run = scene.run("a")
    assert run.snapshots.before == 5
    savers = [(node, saver.worker) for node, each in run.snapshots.saves.ordered.items() for saver in each]
    for node, name in savers:
        scene.feed(events.StateSecured(node=node, slot=0, task="a", worker=name, iteration=5, nodes=[]))
    assert (scene.run("a").snapshots.before, scene.run("a").snapshots.tried) == (None, [])


def test_who_tells_of_copies_that_an_earlier_order_named_has_not_followed_the_newest():
    scene = Remembering(a={"layout": ParallelLayout(tensor=2)}).running(a=["n1:0", "n1:1"])
    scene.join("a")
    orders = scene.run("a").snapshots.saves.ordered
    assert {saver.worker for saver in orders["n1"]} == {"a-1", "a-2"}
    (keeper,) = orders["n1"][0].keepers
    told = {"node": "n1", "task": "a", "iteration": 3}
    scene.feed(events.StateSecured(slot=0, worker="a-1", nodes=[], **told))
    scene.feed(events.StateSecured(slot=1, worker="a-2", nodes=["n9"], **told))
    assert not scene.run("a").snapshots.saves.secured
    scene.feed(events.StateSecured(slot=0, worker="a-1", nodes=[keeper.node], **told))
    assert list(scene.run("a").snapshots.saves.secured) == ["a-1"]


def test_what_others_left_is_removed_though_a_node_is_away_that_may_save_something_else(scene):
    saves = scene.run("a").snapshots.saves
    saves.held["a-9"], saves.ordered["away"] = {"n1": None}, [Saver(worker="")]
    out = []
    for worker, node in (("a-1", "n1"), ("a-3", "n2")):
        out += scene.feed(events.StateSecured(node=node, slot=0, task="a", worker=worker, iteration=6, nodes=[]))
    assert [(order.node, order.workers) for order in of(DropStates, out)] == [("n1", ["a-9"])]


@pytest.mark.parametrize(
    ("name", "names", "workers"),
    [("", [""], []), ("a", ["a"], []), ("a.b", ["a.b"], []), ("..", [".."], []), ("b-1.0.1.saved", [], ["b-1"])],
)
def test_a_name_of_a_state_that_no_agent_gives_is_a_strays(scene, name, names, workers):
    out = scene.feed(events.NodeAdmitted(node="n3", incarnation="x", host="n3", slots=[Slot(index=0)], kept=[name]))
    [order] = of(DropStates, out)
    assert (order.node, order.names, order.workers) == ("n3", names, workers)
