"""States that lie only on nodes that are to go: copied to nodes that stay, or written to storage."""

import pytest
from helpers.transition import Cluster, failure, of, slot, spec

from unicron.contracts.base import CancelTimer, SetTimer, TimerFired
from unicron.contracts.commands import (
    CommitCheckpoint,
    CopyState,
    DropStates,
    Regroup,
    ReleaseNode,
    SaveStates,
    StoreState,
)
from unicron.contracts.events import (
    CheckpointFailed,
    CheckpointFound,
    CheckpointStored,
    NodeLeaving,
    PartStored,
    StateCopied,
    TaskRewound,
)
from unicron.contracts.failures import Severity
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
    shelf = cluster.run("a").snapshots.parked
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
    assert cluster.run("a").snapshots.parked is None
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
    assert cluster.run("a").snapshots.parked.states


def test_a_user_who_goes_back_meanwhile_gets_what_he_goes_back_to():
    cluster, _ = put_aside()
    [order] = of(StoreState, idle(cluster))
    cluster.tell(TaskRewound(task="a", iteration=0))
    assert not of(CommitCheckpoint, write(cluster, order))
    run = cluster.run("a")
    where = StoredState(root=ROOT, folder="step-0", iteration=0, layout=ParallelLayout())
    node, number = run.snapshots.rewind.node, run.snapshots.rewind.number
    cluster.tell(CheckpointFound(node=node, task="a", search=number, stored=where, skipped=[]))
    assert run.snapshots.retirement.attempt is None
    assert cluster.run("a").snapshots.parked.stored == where


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


# --- copies -----------------------------------------------------------------------------------------------------------


NODES = {"n1": 1, "n2": 1, "n3": 1, "n4": 1}


def running(at=("n1:0",), nodes=NODES, **fields):
    cluster = Cluster(nodes, [spec("a", min_workers=len(at), max_workers=len(at), **fields)])
    cluster.settle(a=[slot(each) for each in at])
    return cluster


def left_there(*at, **fields):
    cluster = running(at or ("n1:0",), **fields)
    cluster.settle()
    return cluster


def lies(cluster):
    return sorted(ref.location.node for ref in cluster.run("a").snapshots.parked.states)


def goes_on(cluster, at="n4:0"):
    cluster.settle(a=[slot(at)])
    assert (cluster.said["a"], cluster.anew) == (TaskState.RUNNING, set())
    assert cluster.kept == {}, "nothing is left where it was"


def test_no_copies_are_placed_on_it_and_those_there_are_placed_elsewhere():
    cluster = running()
    [keeper] = {node for node, _ in cluster.saved} - {"n1"}
    out = cluster.drain(keeper)
    [order] = of(SaveStates, out)
    assert [each.node for each in order.savers[0].keepers] not in ([], [keeper])
    cluster.rest()
    cluster.meet("a")
    assert not of(CopyState, out), "its worker has the state"


def test_who_computes_on_it_until_it_moves_still_has_copies_elsewhere():
    cluster = running()
    cluster.drain("n1")
    [keeper] = cluster.run("a").snapshots.saves.ordered["n1"][0].keepers
    assert keeper.node != "n1"
    assert keeper.address == f"{keeper.node}:x"
    assert not cluster.run("a").snapshots.saves.short


@pytest.fixture
def cluster():
    return left_there()


def test_what_was_left_there_only_is_copied_and_the_task_goes_on_when_the_node_is_gone(cluster):
    assert lies(cluster) == ["n1"]
    [order] = of(CopyState, cluster.drain("n1"))
    assert order.node == "n1"
    assert order.state == cluster.run("a").snapshots.parked.states[0]
    assert not of(CopyState, cluster.tell(failure(Severity.SEV2, task="a", worker="no-one"))), "ordered once"
    cluster.rest()
    assert lies(cluster) == ["n1", order.keeper.node]
    cluster.saved.clear()  # what was saved besides
    cluster.lose("n1")
    assert lies(cluster) == [order.keeper.node]
    goes_on(cluster)


def test_a_task_put_aside_while_its_node_is_drained_already_is_handed_over_as_well():
    cluster = running()
    cluster.drain("n1")
    cluster.settle()
    assert len(lies(cluster)) == 2
    cluster.saved.clear()
    cluster.lose("n1")
    goes_on(cluster)


def test_where_another_copy_lies_on_a_node_that_stays_nothing_travels():
    cluster = left_there("n1:0", "n2:0")
    assert lies(cluster) == ["n1", "n2"]
    assert not of(CopyState, cluster.drain("n1"))
    [order] = of(CopyState, cluster.drain("n2"))
    assert order.keeper.node in {"n3", "n4"}


def test_of_a_state_in_parts_only_those_travel_that_lie_on_no_other_node():
    cluster = left_there("n1:0", "n2:0", layout=ParallelLayout(tensor=2))
    [order] = of(CopyState, cluster.drain("n1"))
    assert order.state.place == next(
        ref.place for ref in cluster.run("a").snapshots.parked.states if ref.location.node == "n1"
    )


def test_what_was_saved_and_found_there_only_is_copied_too():
    cluster = running()
    cluster.end(cluster.processes["a-1"])
    keeper = next(node for node, _ in cluster.saved if node != "n1")
    cluster.report("a-1")
    while cluster.run("a").snapshots.parked is None:
        assert cluster.found()
    cluster.drain("n1")
    assert of(CopyState, cluster.drain(keeper))
    cluster.copy()
    [new] = set(lies(cluster)) - {"n1", keeper}
    cluster.lose("n1")
    cluster.lose(keeper)
    cluster.settle(a=[slot(f"{new}:0")])
    assert (cluster.said["a"], cluster.anew) == (TaskState.RUNNING, set())


def test_a_copy_that_fails_is_tried_on_the_next_node_and_then_when_another_comes(cluster):
    cluster.drain("n1")
    tried = []
    while cluster.copying:
        tried.append(cluster.copying[0].keeper.node)
        cluster.copy("no room")
    assert sorted(tried) == ["n2", "n3", "n4"]
    cluster.join("n2", "another")
    assert [each.keeper.node for each in cluster.copying] == ["n2"]


def test_where_no_node_stays_it_waits_for_one():
    cluster = left_there(nodes={"n1": 1, "n2": 1})
    assert not of(CopyState, [*cluster.drain("n2"), *cluster.drain("n1")])
    assert of(CopyState, cluster.drain("n2", drain=False))


@pytest.mark.parametrize("lost", ["n1", "keeper"])
def test_a_node_that_comes_back_meanwhile_is_told_again(cluster, lost):
    [order] = of(CopyState, cluster.drain("n1"))
    out = cluster.join("n1", "another") if lost == "n1" else cluster.lose(order.keeper.node)
    [again] = of(CopyState, out)
    assert (again.keeper == order.keeper) is (lost == "n1")
    cluster.copying.remove(order)
    cluster.rest()
    assert lies(cluster) == sorted(["n1", again.keeper.node])


def test_one_drained_stays_so_when_its_agent_comes_back(cluster):
    cluster.drain("n2")
    cluster.join("n2")
    for node in ("n3", "n4"):
        cluster.drain(node)
    assert not of(CopyState, cluster.drain("n1"))


def test_a_copy_that_comes_when_the_task_has_gone_on_is_removed(cluster):
    [order] = of(CopyState, cluster.drain("n1"))
    cluster.copying.clear()
    cluster.settle(a=[slot("n4:0")])
    assert cluster.run("a").snapshots.parked is None
    here = order.state.at(order.keeper.node, order.keeper.address)
    [drop] = of(DropStates, cluster.tell(StateCopied(node="n1", task="a", state=here)))
    assert (drop.node, drop.names) == (order.keeper.node, [order.state.location.name])


def test_told_twice_it_stays(cluster):
    [order] = of(CopyState, cluster.drain("n1"))
    cluster.rest()
    here = order.state.at(order.keeper.node, order.keeper.address)
    assert cluster.tell(StateCopied(node="n1", task="a", state=here)) == []
    assert len(lies(cluster)) == 2


def leaves(cluster, node="n1", incarnation="x"):
    """Have an agent say that it leaves, and the registry drain the node."""
    return cluster.tell(NodeLeaving(node=node, incarnation=incarnation, seconds=9.0)) + cluster.drain(node)


def released(cluster, act):
    """Return the nodes that are told while `act` is done that they may go."""
    told = []
    take = cluster.take

    def watch(message):
        take(message)
        if isinstance(message, ReleaseNode):
            told.append(message.node)

    cluster.take = watch
    act()
    cluster.take = take
    return told


def test_a_node_on_which_nothing_is_may_go_once_it_is_drained():
    cluster = running()
    assert not of(ReleaseNode, cluster.tell(NodeLeaving(node="n4", incarnation="x", seconds=9.0)))
    [order] = of(ReleaseNode, cluster.drain("n4"))
    assert (order.node, order.incarnation) == ("n4", "x")
    assert not of(ReleaseNode, cluster.drain("n3")), "it did not ask"
    assert of(ReleaseNode, cluster.tell(NodeLeaving(node="n3", incarnation="x", seconds=9.0))), "drained before"


def test_one_with_a_worker_may_go_when_that_has_moved():
    cluster = running()
    assert not of(ReleaseNode, leaves(cluster))
    moved = []

    def act():
        moved.append(of(ReleaseNode, cluster.settle(a=[slot("n4:0")])))

    assert released(cluster, act) == ["n1"]
    assert moved == [[]], "not before"
    assert cluster.anew == set()


def test_one_with_the_only_copy_may_go_when_another_has_one(cluster):
    assert not of(ReleaseNode, leaves(cluster))
    assert released(cluster, cluster.copy) == ["n1"]


def test_one_that_is_back_or_is_to_stay_is_not_told_to_go(cluster):
    leaves(cluster)
    cluster.join("n1", "another")
    assert released(cluster, cluster.rest) == []
    cluster = left_there()
    leaves(cluster)
    cluster.drain("n1", drain=False)
    assert released(cluster, cluster.rest) == []
    assert not of(ReleaseNode, leaves(cluster, "n2", "an earlier one"))
