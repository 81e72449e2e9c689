"""What lies on nodes that are to go, and nowhere else, is copied to nodes that stay; nothing more is placed there."""

import pytest
from helpers.transition import Cluster, failure, of, slot, spec

from unicron.contracts.commands import CopyState, DropStates, ReleaseNode, SaveStates
from unicron.contracts.events import NodeLeaving, StateCopied
from unicron.contracts.failures import Severity
from unicron.contracts.tasks import ParallelLayout, TaskState

NODES = {"n1": 1, "n2": 1, "n3": 1, "n4": 1}


def running(at=("n1:0",), nodes=NODES, **fields):
    cluster = Cluster(nodes, [spec("a", min_workers=len(at), max_workers=len(at), **fields)])
    cluster.settle(a=[slot(each) for each in at])
    return cluster


def put_aside(*at, **fields):
    cluster = running(at or ("n1:0",), **fields)
    cluster.settle()
    return cluster


def lies(cluster):
    return sorted(ref.location.node for ref in cluster.run("a").shelf.states)


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
    [keeper] = cluster.run("a").saves.ordered["n1"][0].keepers
    assert keeper.node != "n1"
    assert keeper.address == f"{keeper.node}:x"
    assert not cluster.run("a").saves.short


@pytest.fixture
def cluster():
    return put_aside()


def test_what_was_left_there_only_is_copied_and_the_task_goes_on_when_the_node_is_gone(cluster):
    assert lies(cluster) == ["n1"]
    [order] = of(CopyState, cluster.drain("n1"))
    assert order.node == "n1"
    assert order.state == cluster.run("a").shelf.states[0]
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
    cluster = put_aside("n1:0", "n2:0")
    assert lies(cluster) == ["n1", "n2"]
    assert not of(CopyState, cluster.drain("n1"))
    [order] = of(CopyState, cluster.drain("n2"))
    assert order.keeper.node in {"n3", "n4"}


def test_of_a_state_in_parts_only_those_travel_that_lie_on_no_other_node():
    cluster = put_aside("n1:0", "n2:0", layout=ParallelLayout(tensor=2))
    [order] = of(CopyState, cluster.drain("n1"))
    assert order.state.place == next(ref.place for ref in cluster.run("a").shelf.states if ref.location.node == "n1")


def test_what_was_saved_and_found_there_only_is_copied_too():
    cluster = running()
    cluster.end(cluster.processes["a-1"])
    keeper = next(node for node, _ in cluster.saved if node != "n1")
    cluster.report("a-1")
    while cluster.run("a").shelf is None:
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
    cluster = put_aside(nodes={"n1": 1, "n2": 1})
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
    assert cluster.run("a").shelf is None
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
    cluster = put_aside()
    leaves(cluster)
    cluster.drain("n1", drain=False)
    assert released(cluster, cluster.rest) == []
    assert not of(ReleaseNode, leaves(cluster, "n2", "an earlier one"))
