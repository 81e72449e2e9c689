"""A task that a plan takes off all its slots finishes its iteration, leaves its state behind, and takes it later."""

from helpers.transition import Cluster, of, slot, spec

from unicron.contracts.commands import DropStates, FindStates, Regroup, StartWorker, StopWorker
from unicron.contracts.events import NodeAdmitted, TaskPaused, TaskRemoved
from unicron.contracts.tasks import ParallelLayout, Slot, TaskState

TWO = [slot("n1:0"), slot("n2:0")]


def running(*names, **fields):
    cluster = Cluster({"n1": 1, "n2": 1}, [spec(name, **fields) for name in names])
    cluster.settle(**{names[0]: TWO})
    return cluster


def put_aside():
    cluster = running("a")
    cluster.settle()
    return cluster


def test_its_workers_finish_the_iteration_and_leave_their_states_before_others_get_the_slots():
    cluster = running("a", "b")
    out = cluster.plan(b=TWO)
    assert [order.leaving for order in of(Regroup, out)] == [True, True]
    assert not of(StopWorker, out)
    assert not of(StartWorker, out)
    assert cluster.said["a"] is TaskState.WAITING
    while cluster.run("a").shelf is None:
        assert not cluster.run("b").workers, "its slots are in use"
        assert cluster.step()
    assert len(cluster.run("a").shelf.states) == 2, "two copies"
    assert cluster.run("a").workers == {}
    cluster.rest()
    assert cluster.said["b"] is TaskState.RUNNING
    assert len(cluster.kept) == 2, "they lie there until they are taken"


def test_it_takes_that_state_when_it_gets_slots_again():
    cluster = put_aside()
    left = cluster.run("a").shelf
    out = cluster.plan(a=TWO)
    assert not of(FindStates, out)
    cluster.rest()
    assert cluster.said["a"] is TaskState.RUNNING
    assert cluster.run("a").shelf is None
    assert left.iteration >= 0
    assert (cluster.anew, cluster.kept) == (set(), {})


def test_slots_given_back_meanwhile_are_used_on_without_anybody_stopped():
    cluster = running("a")
    cluster.plan()
    workers = list(cluster.group("a"))
    out = cluster.settle(a=TWO)
    assert not of(StopWorker, out)
    assert cluster.group("a") == workers
    assert cluster.said["a"] is TaskState.RUNNING
    assert cluster.kept == {}


def test_one_that_dies_while_it_leaves_is_not_waited_for():
    cluster = running("a")
    cluster.plan()
    out = cluster.kill("a-1")
    assert [order.world_size for order in of(Regroup, out)] == [1]
    cluster.rest()
    assert [ref.location.worker for ref in cluster.run("a").shelf.states] == ["a-2"]
    assert cluster.run("a").workers == {}


def test_where_a_part_of_the_state_is_lost_the_slots_are_given_up_at_once_and_what_was_saved_counts():
    cluster = running("a", layout=ParallelLayout(tensor=2), min_workers=2)
    cluster.kill("a-1")
    out = cluster.plan()
    assert {order.worker for order in of(StopWorker, out)} >= {"a-2"}
    cluster.rest()
    assert cluster.run("a").workers == {}
    cluster.settle(a=TWO)
    assert (cluster.said["a"], cluster.anew) == (TaskState.RUNNING, set())


def test_what_it_left_is_removed_with_the_task():
    cluster = put_aside()
    out = cluster.tell(TaskRemoved(task="a"))
    assert {order.node for order in of(DropStates, out)} == {"n1", "n2"}
    assert (cluster.kept, cluster.saved) == ({}, {})


def test_a_paused_task_gives_its_slots_up_by_itself_and_takes_no_plan_until_it_is_resumed():
    cluster = running("a")
    out = cluster.tell(TaskPaused(task="a"))
    assert [order.leaving for order in of(Regroup, out)] == [True, True]
    cluster.rest()
    assert cluster.said["a"] is TaskState.WAITING
    cluster.plan(a=TWO)  # made before the planner knew
    assert cluster.run("a").workers == {}
    cluster.tell(TaskPaused(task="a", paused=False))
    cluster.settle(a=TWO)
    assert (cluster.said["a"], cluster.anew) == (TaskState.RUNNING, set())


def test_one_that_dies_before_it_takes_back_what_it_left_leaves_nothing():
    cluster = running("a")
    cluster.plan()
    while not cluster.kept:
        assert cluster.step()
    [(_, name)] = cluster.kept
    cluster.plan(a=TWO)
    worker = cluster.processes[name.partition(".")[0]]
    cluster.end(worker)
    out = cluster.report(worker.name)
    assert [order.names for order in of(DropStates, out)] == [[name]]
    cluster.rest()
    assert cluster.kept == {}


def test_what_it_left_is_had_from_where_the_nodes_agent_is_now():
    cluster = put_aside()
    kept = [name for node, name in cluster.kept if node == "n1"]
    fields = {"host": "n1", "slots": [Slot(index=0)], "rendezvous": "n1:1", "kept": kept}
    cluster.tell(NodeAdmitted(node="n1", incarnation="y", state_server="n1:9", **fields))
    there = {ref.location.node: ref.location.address for ref in cluster.run("a").shelf.states}
    assert there["n1"] == "n1:9"
    assert there["n2"] != "n1:9"
