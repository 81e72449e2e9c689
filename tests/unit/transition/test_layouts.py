"""Tasks that leave their state behind and take it later: in another layout, or when they get slots again."""

import errno

import pytest
from helpers.transition import Cluster, of, slot, spec

from unicron.contracts.commands import DropStates, FindStates, Regroup, StartWorker, StopWorker
from unicron.contracts.events import NodeAdmitted, StateKept, StateUnprotected, TaskPaused, TaskRecovered, TaskRemoved
from unicron.contracts.tasks import ParallelLayout, Slot, TaskState
from unicron.errors import explain_lack

PAIRS, ALONE, TRIPLE = ParallelLayout(tensor=2), ParallelLayout(), ParallelLayout(shard=3)
FOUR = [slot(text) for text in ("n1:0", "n1:1", "n2:0", "n2:1")]


@pytest.fixture
def cluster():
    """A cluster whose task computes on four workers in replicas of two, and may have three that share one."""
    task = spec("a", layouts={1: ALONE, 2: ALONE, 3: TRIPLE, 4: PAIRS})
    cluster = Cluster({"n1": 2, "n2": 2, "n3": 2}, [task])
    cluster.settle(a=FOUR)
    return cluster


def leaving(cluster, slots):
    """Give the task other slots, and let everything happen until its workers have met for the last time."""
    out = cluster.plan(a=slots)
    while not cluster.run("a").membership.complete:
        assert cluster.step()
    return out


def shelved(cluster):
    """Let everything happen until the state is left behind."""
    while cluster.run("a").snapshots.parked is None:
        assert cluster.step()


def steps(cluster, count):
    for _ in range(count):
        cluster.step()


def test_who_has_the_state_leaves_it_behind_and_then_others_start_in_the_same_slots(cluster):
    out = leaving(cluster, FOUR[:3])
    assert {(order.leaving, order.layout) for order in of(Regroup, out)} == {(True, PAIRS.with_workers(4))}
    assert not of(StopWorker, out), "they are busy with an iteration"
    assert not of(StartWorker, out), "the slots are not free"
    shelved(cluster)
    run = cluster.run("a")
    assert run.snapshots.parked.layout.is_like(PAIRS)
    assert [ref.place for ref in run.snapshots.parked.states] == [0, 1, 0, 1]
    assert {worker.layout for worker in run.workers.values()} == {TRIPLE.with_workers(0)}
    assert [worker.place for worker in run.workers.values()] == [0, 1, 2]
    assert run.state is TaskState.RECONFIGURING
    assert len(cluster.kept) == 4
    cluster.rest()
    run = cluster.run("a")
    assert (run.state, run.membership.layout, run.snapshots.parked) == (TaskState.RUNNING, TRIPLE, None)
    assert [cluster.processes[name].place for name in cluster.group("a")] == [0, 1, 2]
    assert (cluster.anew, cluster.kept) == (set(), {})


def test_while_a_place_of_the_state_is_looked_for_nobody_leaves_the_rest_of_it_behind(cluster):
    cluster.kill("a-2", "a-4")  # place 1
    epoch = cluster.run("a").membership.epoch
    assert cluster.asked
    cluster.plan(a=FOUR[:3])
    assert cluster.run("a").membership.epoch == epoch
    cluster.rest()
    assert (cluster.run("a").membership.layout, cluster.anew) == (TRIPLE, set())


def test_the_shelf_is_told_to_rank_0_and_dropped_when_all_have_met(cluster):
    leaving(cluster, FOUR[:3])
    shelved(cluster)
    while not cluster.run("a").membership.layout.is_like(TRIPLE):
        cluster.step()
    told = [(order.node, order.shelf is not None, 0 in order.ranks) for order in cluster.orders["a"]]
    assert sorted(told) == [("n1", True, True), ("n2", False, False)]
    out = []
    tell = cluster.tell
    cluster.tell = lambda message: out.extend(tell(message)) or out
    cluster.step()
    assert sorted(order.node for order in of(DropStates, out)) == ["n1", "n2"]
    assert not of(TaskRecovered, out)
    cluster.rest()
    assert len(of(TaskRecovered, out)) == 1


def test_a_task_that_grows_computes_on_until_who_starts_in_the_free_slots_is_ready(cluster):
    cluster.settle(a=FOUR[:3])
    epoch = cluster.run("a").membership.epoch
    out = cluster.plan(a=FOUR)
    assert [order.layout for order in of(StartWorker, out)] == [PAIRS.with_workers(0)]
    assert cluster.run("a").membership.epoch == epoch
    cluster.step()
    assert cluster.run("a").membership.leaving
    cluster.rest()
    assert cluster.run("a").membership.layout == PAIRS.with_workers(4)


def test_one_copy_of_each_place_is_enough(cluster):
    leaving(cluster, [FOUR[0], FOUR[1], slot("n3:0")])
    shelved(cluster)
    cluster.lose("n2")
    cluster.settle(a=[FOUR[0], FOUR[1], slot("n3:0")])
    assert cluster.run("a").membership.layout == TRIPLE
    assert cluster.anew == set()


def test_a_task_begins_anew_where_what_was_left_behind_is_gone(cluster):
    leaving(cluster, [slot("n3:0"), slot("n3:1")])
    shelved(cluster)
    for node in ("n1", "n2"):
        cluster.lose(node)
    cluster.rest()
    run = cluster.run("a")
    assert (run.snapshots.parked, run.state, cluster.anew) == (None, TaskState.RUNNING, {"a"})


def test_what_is_of_no_use_without_a_part_that_is_gone_is_removed():
    cluster = Cluster({"n1": 1, "n2": 1, "n3": 1}, [spec("a", layouts={1: ALONE, 2: PAIRS})])
    cluster.settle(a=[slot("n1:0"), slot("n2:0")])
    leaving(cluster, [slot("n3:0")])
    shelved(cluster)
    left = [name for node, name in cluster.kept if node == "n1"]
    out = cluster.lose("n2")
    [lost, other] = of(DropStates, out)
    assert lost.node == "n2", "its agent may well live"
    assert (other.node, other.names) == ("n1", left)
    assert cluster.run("a").snapshots.parked is None
    cluster.rest()
    assert cluster.kept == {}


def test_who_dies_before_it_has_left_its_state_is_not_waited_for(cluster):
    leaving(cluster, FOUR[:3])
    steps(cluster, 2)
    out = cluster.kill("a-4")
    assert [(order.leaving, order.layout.replicas) for order in of(Regroup, out)] == [(True, 1)]
    cluster.rest()
    assert cluster.run("a").membership.layout == TRIPLE
    assert cluster.anew == set()


def test_what_is_left_behind_is_taken_though_a_node_has_yet_to_tell_what_older_states_it_has(cluster):
    leaving(cluster, [slot("n1:0")])
    order, group = cluster.orders["a"][0], [cluster.processes[name] for name in cluster.group("a")]
    for _ in range(3):
        assert cluster.leave("a", order, group)
    cluster.kill("a-1", "a-3")  # those of one place, one of whom has left its state behind
    cluster.found()
    assert [each.node for each in cluster.asked] == ["n2"]
    assert cluster.leave("a", order, group), "the last has left its state behind, too"
    shelf = cluster.run("a").snapshots.parked
    assert {ref.location.name.rpartition(".")[2] for ref in shelf.states} == {"kept"}
    cluster.found()
    assert cluster.run("a").snapshots.parked == shelf
    cluster.rest()
    assert cluster.kept == {}
    assert cluster.said["a"] is TaskState.RUNNING


def test_what_only_some_have_left_behind_is_removed_when_older_states_are_taken():
    cluster = Cluster({"n1": 1, "n2": 1, "n3": 1}, [spec("a", layouts={1: ALONE, 2: PAIRS})])
    cluster.settle(a=[slot("n1:0"), slot("n2:0")])
    leaving(cluster, [slot("n1:0")])
    order, group = cluster.orders["a"][0], [cluster.processes[name] for name in cluster.group("a")]
    assert cluster.leave("a", order, group)
    assert [name for _, name in cluster.kept] == ["a-1.1.kept"]
    cluster.kill("a-2")
    assert cluster.asked, "nobody has its place any more"
    while cluster.asked:
        cluster.found()
    shelf = cluster.run("a").snapshots.parked
    assert {ref.location.name.rpartition(".")[2] for ref in shelf.states} == {"saved"}
    assert cluster.kept == {}
    cluster.rest()
    assert (cluster.said["a"], cluster.anew) == (TaskState.RUNNING, set())


def test_a_task_whose_old_layout_is_wanted_again_simply_goes_on(cluster):
    leaving(cluster, FOUR[:3])
    steps(cluster, 2)
    out = cluster.plan(a=FOUR)
    assert [order.leaving for order in of(Regroup, out)] == [False, False]
    assert not of(StopWorker, out)
    cluster.rest()
    assert cluster.group("a") == ["a-1", "a-2", "a-3", "a-4"]
    assert cluster.kept == {}


@pytest.mark.parametrize(("slots", "layout"), [(FOUR[:2], ALONE), (FOUR, PAIRS)], ids=["another", "the first"])
def test_a_third_layout_may_be_wanted_before_the_second_has_met(cluster, slots, layout):
    leaving(cluster, FOUR[:3])
    steps(cluster, 5)
    cluster.settle(a=slots)
    assert cluster.run("a").membership.layout == layout.with_workers(len(slots))
    assert (cluster.anew, cluster.kept) == (set(), {})


def test_a_node_that_comes_back_without_a_state_is_not_counted_on_and_strays_are_removed(cluster):
    leaving(cluster, [FOUR[0], FOUR[1], slot("n3:0")])
    shelved(cluster)
    cluster.kept = {key: task for key, task in cluster.kept.items() if key[0] != "n2"}
    cluster.kept["n2", "a-99.7.kept"] = "a"
    out = cluster.join("n2")
    assert [order.names for order in of(DropStates, out)] == [["a-99.7.kept"]]
    assert {ref.location.node for ref in cluster.run("a").snapshots.parked.states} == {"n1"}
    cluster.rest()
    assert cluster.anew == set()


@pytest.mark.parametrize("state", [TaskState.RECOVERING, TaskState.WAITING])
def test_a_task_says_what_it_waits_for_where_a_member_finds_no_room_for_its_state_and_nobody_is_stopped(cluster, state):
    leaving(cluster, FOUR[:3] if state is TaskState.RECOVERING else [])
    member = cluster.processes[cluster.group("a")[0]]
    why = explain_lack(OSError(errno.ENOSPC, "No space left on device"))
    assert not cluster.tell(StateUnprotected(**member.who, reason="a disk is full")), "this is of another concern"
    [changed] = cluster.tell(StateUnprotected(**member.who, reason=why))
    assert changed.state is state
    assert why in changed.reason
    cluster.rest()
    assert not cluster.tell(StateUnprotected(**member.who, reason=why)), "it has left it behind meanwhile"
    assert cluster.anew == set()


def test_what_was_left_behind_and_is_told_twice_stays(cluster):
    told = []
    tell = cluster.tell
    cluster.tell = lambda message: told.append(message) or tell(message)
    leaving(cluster, FOUR[:3])
    shelved(cluster)
    while not cluster.run("a").membership.layout.is_like(TRIPLE):
        cluster.step()
    kept = next(each for each in told if isinstance(each, StateKept))
    assert tell(kept) == [], "its agent was started again, and it greeted the new one"
    cluster.rest()
    assert cluster.anew == set()
    assert of(DropStates, tell(kept)), "nobody is to take it any more"


def test_a_task_that_waits_for_slots_keeps_what_it_left_behind(cluster):
    leaving(cluster, FOUR[:3])
    steps(cluster, 5)
    cluster.settle()
    assert len(cluster.kept) == 4
    cluster.settle(a=FOUR[:3])
    assert cluster.anew == set()


# --- a task that a plan takes off all its slots finishes its iteration, and takes its state later --------------------


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
    while cluster.run("a").snapshots.parked is None:
        assert not cluster.run("b").workers, "its slots are in use"
        assert cluster.step()
    assert len(cluster.run("a").snapshots.parked.states) == 2, "two copies"
    assert cluster.run("a").workers == {}
    cluster.rest()
    assert cluster.said["b"] is TaskState.RUNNING
    assert len(cluster.kept) == 2, "they lie there until they are taken"


def test_it_takes_that_state_when_it_gets_slots_again():
    cluster = put_aside()
    left = cluster.run("a").snapshots.parked
    out = cluster.plan(a=TWO)
    assert not of(FindStates, out)
    cluster.rest()
    assert cluster.said["a"] is TaskState.RUNNING
    assert cluster.run("a").snapshots.parked is None
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
    assert [ref.location.worker for ref in cluster.run("a").snapshots.parked.states] == ["a-2"]
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
    there = {ref.location.node: ref.location.address for ref in cluster.run("a").snapshots.parked.states}
    assert there["n1"] == "n1:9"
    assert there["n2"] != "n1:9"
