"""What goes from the memories of nodes to storage: of tasks that wait for long, and of nodes where none stays."""

import pytest
from helpers.transition import Cluster, of, slot, spec

from unicron.contracts.base import CancelTimer, SetTimer, TimerFired
from unicron.contracts.commands import CommitCheckpoint, CopyState, DropStates, Regroup, ReleaseNode, StoreState
from unicron.contracts.events import (
    CheckpointFailed,
    CheckpointFound,
    CheckpointStored,
    NodeLeaving,
    PartStored,
    TaskRewound,
)
from unicron.contracts.storage import StoredFile, StoredPart, StoredState
from unicron.contracts.tasks import ParallelLayout, TaskState

ROOT = "/storage"
PAIR = ParallelLayout(tensor=2)


def put_aside(*at, nodes=("n1", "n2", "n3"), **fields):
    """A task that has trained on these slots and has none any more; return also what it said then."""
    at = at or ("n1:0",)
    fields = {"checkpoints": ROOT, "min_workers": len(at), "max_workers": len(at), **fields}
    cluster = Cluster(dict.fromkeys(nodes, 1), [spec("a", **fields)])
    cluster.settle(a=[slot(each) for each in at])
    told, take = [], cluster.take

    def watch(message):
        told.append(message)
        take(message)

    cluster.take = watch
    cluster.settle()
    return cluster, told


def idle(cluster):
    return cluster.tell(TimerFired(name="idle.a"))


def write(cluster, order, seconds=1.0):
    file = StoredFile(name="x", size=1, checksum="x")
    part = StoredPart(place=order.state.place, index=file, data=file)
    return cluster.tell(PartStored(node=order.node, task="a", saving=order.saving, part=part, seconds=seconds))


def complete(cluster, saving, **more):
    where = {"node": "n1", "iteration": saving.iteration, "address": "x", "folder": "step-7", "removed": []}
    return cluster.tell(CheckpointStored(task="a", **{**where, **more}))


def stored(cluster, orders):
    """Let all parts be written, and the checkpoint be complete."""
    out = [message for order in orders for message in write(cluster, order)]
    [commit] = of(CommitCheckpoint, out)
    assert commit.saving == orders[0].saving
    return complete(cluster, commit.saving, node=commit.node)


def goes_on_from_storage(cluster, at="n3:0"):
    cluster.settle(a=[slot(each) for each in at.split()])
    [order] = [each for each in cluster.orders["a"] if 0 in each.ranks]
    assert (order.shelf.states, order.shelf.stored.folder) == ([], "step-7")
    assert (cluster.said["a"], cluster.anew) == (TaskState.RUNNING, set())


# --- tasks that wait -------------------------------------------------------------------------------------------------


def test_what_waits_for_long_is_written_and_only_then_removed_from_memory():
    cluster, told = put_aside()
    [timer] = [each for each in of(SetTimer, told) if each.name == "idle.a"]
    assert timer.after_s == 600
    assert not of(StoreState, told)
    [order] = of(StoreState, idle(cluster))
    shelf = cluster.run("a").shelf
    assert (order.node, order.state, order.saving.root) == ("n1", shelf.states[0], ROOT)
    assert (order.saving.iteration, order.saving.layout) == (shelf.iteration, shelf.layout.with_workers(0))
    assert not of(DropStates, write(cluster, order))
    assert of(DropStates, complete(cluster, order.saving))
    assert (cluster.kept, cluster.saved) == ({}, {})
    goes_on_from_storage(cluster)


def test_of_a_state_in_parts_each_is_written_by_a_node_that_has_it():
    cluster, _ = put_aside("n1:0", "n2:0", layout=PAIR)
    orders = of(StoreState, idle(cluster))
    assert sorted(each.state.place for each in orders) == [0, 1]
    assert len({each.saving.attempt for each in orders}) == 1
    assert not of(CommitCheckpoint, write(cluster, orders[0]))
    [commit] = of(CommitCheckpoint, write(cluster, orders[1]))
    complete(cluster, commit.saving)
    goes_on_from_storage(cluster, "n3:0 n1:0")


def test_without_a_storage_it_stays_in_memory():
    cluster, told = put_aside(checkpoints="")
    assert not [each for each in of(SetTimer, told) if each.name == "idle.a"]
    assert idle(cluster) == []
    assert cluster.kept


def test_who_gets_slots_in_time_keeps_it_in_memory():
    cluster, told = put_aside()
    cluster.plan(a=[slot("n3:0")])
    assert [each.name for each in of(CancelTimer, told)].count("idle.a") == 1
    assert not of(StoreState, idle(cluster))


def test_who_gets_slots_while_it_is_written_goes_on_from_memory():
    cluster, _ = put_aside()
    [order] = of(StoreState, idle(cluster))
    cluster.plan(a=[slot("n1:0")])
    out = stored(cluster, [order])
    assert not of(DropStates, out)
    cluster.rest()
    assert cluster.said["a"] is TaskState.RUNNING
    assert cluster.run("a").shelf is None
    assert cluster.anew == set()


def test_what_died_and_is_found_in_memory_while_nobody_has_slots_goes_too():
    cluster, _ = put_aside(nodes=("n1", "n2"))
    cluster.settle(a=[slot("n1:0")])
    cluster.processes["a-2"].living = False
    cluster.plan()
    cluster.report("a-2")
    while cluster.found():
        pass
    [order] = of(StoreState, idle(cluster))
    assert order.state.location.name.endswith("saved")
    stored(cluster, [order])
    assert (cluster.kept, cluster.saved) == ({}, {})


def test_where_it_can_t_be_written_it_stays_and_is_tried_again_after_as_long_from_another_copy():
    cluster, told = put_aside("n1:0", "n2:0")
    first = of(StoreState, idle(cluster))[0]
    del told[:]
    cluster.tell(CheckpointFailed(node=first.node, task="a", reason="full"))
    assert [(each.name, each.after_s) for each in of(SetTimer, told)] == [("idle.a", 600)]
    assert not of(StoreState, told)
    assert cluster.kept
    [second] = of(StoreState, idle(cluster))
    assert (second.node, second.saving.attempt) != (first.node, first.saving.attempt)
    assert {first.node, second.node} == {"n1", "n2"}
    stored(cluster, [second])
    goes_on_from_storage(cluster, "n3:0 n1:0")


@pytest.mark.parametrize("how", ["lost", "back"])
def test_a_writer_that_is_lost_or_was_started_again_is_not_waited_for(how):
    cluster, told = put_aside("n1:0", "n2:0", nodes=("n1", "n2", "n3", "n4"))
    [first] = of(StoreState, idle(cluster))
    del told[:]
    if how == "lost":
        cluster.lose(first.node)
    else:
        cluster.join(first.node, "another")
    [second] = of(StoreState, told)
    assert second.saving.attempt != first.saving.attempt
    assert (second.node == first.node) <= (how == "back")
    stored(cluster, [second])
    goes_on_from_storage(cluster, "n3:0 n4:0")


def test_another_checkpoint_that_is_completed_meanwhile_is_not_taken_for_it():
    cluster, _ = put_aside()
    [order] = of(StoreState, idle(cluster))
    assert not of(DropStates, complete(cluster, order.saving, iteration=order.saving.iteration - 1))
    assert cluster.run("a").shelf.states


def test_a_user_who_goes_back_meanwhile_gets_what_he_goes_back_to():
    cluster, _ = put_aside()
    [order] = of(StoreState, idle(cluster))
    cluster.tell(TaskRewound(task="a", iteration=0))
    assert not of(CommitCheckpoint, write(cluster, order))
    run = cluster.run("a")
    where = StoredState(root=ROOT, folder="step-0", iteration=0, layout=ParallelLayout())
    node, number = run.saves.rewind.node, run.saves.rewind.number
    cluster.tell(CheckpointFound(node=node, task="a", search=number, stored=where, skipped=[]))
    assert run.saves.retiring is None
    assert cluster.run("a").shelf.stored == where


# --- nodes that go ---------------------------------------------------------------------------------------------------


def come(cluster, node):
    cluster.slots[node] = 1
    cluster.join(node)


def leave(cluster, *nodes):
    out = []
    for node in nodes:
        out += cluster.tell(NodeLeaving(node=node, incarnation="x", seconds=9.0)) + cluster.drain(node)
    return out


def test_where_no_node_stays_it_goes_to_storage_at_once_and_then_the_nodes_may_go():
    cluster, told = put_aside(nodes=("n1", "n2"))
    out = leave(cluster, "n1", "n2")
    cluster.rest()  # what was being copied
    [order] = of(StoreState, told)
    assert not [each for each in of(ReleaseNode, out) if each.node == order.node]
    assert [each.node for each in of(ReleaseNode, stored(cluster, [order]))] == [order.node]
    cluster.lose("n1")
    cluster.lose("n2")
    come(cluster, "n3")
    goes_on_from_storage(cluster)


def test_where_one_stays_it_is_copied_and_not_written():
    cluster, told = put_aside()
    assert of(CopyState, leave(cluster, "n1"))
    cluster.rest()
    assert not of(StoreState, told)


def test_what_no_node_that_stays_has_room_for_goes_to_storage():
    cluster, told = put_aside()
    leave(cluster, "n1")
    while cluster.copying:
        cluster.copy("no room")
    assert len(of(StoreState, told)) == 1


def test_a_failed_attempt_is_soon_followed_by_another():
    cluster, told = put_aside(nodes=("n1",))
    [order] = of(StoreState, leave(cluster, "n1"))
    del told[:]
    cluster.tell(CheckpointFailed(node="n1", task="a", reason="slow"))
    assert [(each.name, each.after_s) for each in of(SetTimer, told)] == [("again.a", 3)]
    assert not of(StoreState, told)
    [again] = of(StoreState, cluster.tell(TimerFired(name="again.a")))
    assert again.saving.attempt != order.saving.attempt
    assert of(ReleaseNode, stored(cluster, [again]))


def test_without_a_storage_it_waits_for_another_node():
    cluster, told = put_aside(nodes=("n1",), checkpoints="")
    leave(cluster, "n1")
    assert not of(StoreState, told)
    come(cluster, "n2")
    assert len(of(CopyState, told)) == 1


def test_members_that_were_told_of_what_is_in_memory_are_told_of_what_is_on_storage():
    cluster, told = put_aside(nodes=("n1", "n2"))
    del told[:]
    cluster.plan(a=[slot("n2:0")])
    while not of(Regroup, told):
        assert cluster.step()
    [*_, order] = of(StoreState, leave(cluster, "n1", "n2"))
    [regroup] = of(Regroup, stored(cluster, [order]))
    assert (regroup.shelf.states, regroup.shelf.stored.folder) == ([], "step-7")
    cluster.rest()
    assert (cluster.said["a"], cluster.anew) == (TaskState.RUNNING, set())
