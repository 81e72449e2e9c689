"""Workers of replicas of several, and tasks that wait for slots of each other: nobody loses what need not be lost."""

import pytest
from helpers.transition import Cluster, of, slot, spec

from unicron.contracts.commands import Regroup, StartWorker, StopWorker
from unicron.contracts.events import WorkerFinished, WorkerReady
from unicron.contracts.tasks import Healing, ParallelLayout, TaskState

SLOTS = [slot(text) for text in ("n1:0", "n1:1", "n2:0", "n2:1")]


def pairs(slots=SLOTS, *, saving=True, **fields):
    """Return a cluster whose task computes in replicas of two."""
    task = spec("a", **{"min_workers": 2, "layout": ParallelLayout(tensor=2), **fields})
    cluster = Cluster({"n1": 2, "n2": 2, "n3": 2}, [task], saving=saving)
    cluster.settle(a=list(slots))
    return cluster


def test_each_order_tells_the_layout():
    cluster = pairs()
    assert {order.layout for order in cluster.orders["a"]} == {ParallelLayout(tensor=2, replicas=2)}
    assert [cluster.processes[name].place for name in cluster.group("a")] == [0, 1, 0, 1]


def test_the_whole_replica_goes_on_alone_and_the_broken_one_joins_again_when_it_is_whole():
    cluster = pairs()
    out = cluster.kill("a-2")
    assert cluster.group("a") == ["a-3", "a-4"]
    assert {order.layout.replicas for order in of(Regroup, out)} == {1}
    assert [order.worker for order in of(StopWorker, out)] == ["a-2"], "a-1 is a spare"
    assert cluster.run("a").describe_waiting() == "; the replica of a-1 waits for place 1"
    cluster.rest()
    assert cluster.run("a").describe_waiting() == ""
    assert cluster.group("a") == ["a-3", "a-4", "a-1", "a-5"]
    assert cluster.processes["a-5"].place == 1


def test_two_half_replicas_make_a_whole_one_where_places_fit():
    cluster = pairs()
    cluster.end(cluster.processes["a-2"])
    cluster.kill("a-3", "a-2")
    assert cluster.group("a") == ["a-1", "a-4"]


def test_two_halves_with_the_same_place_wait_for_the_other():
    cluster = pairs([*SLOTS, slot("n3:0"), slot("n3:1")], max_workers=6)
    cluster.kill("a-6")
    cluster.kill("a-4")
    assert cluster.group("a") == ["a-1", "a-2"]


@pytest.mark.parametrize("saving", [True, False])
def test_a_place_of_a_state_that_is_lost_is_taken_from_memory_or_the_task_begins_anew(saving):
    cluster = pairs(SLOTS[:2], saving=saving)
    cluster.kill("a-2")
    cluster.rest()
    assert cluster.anew == (set() if saving else {"a"})
    assert set(cluster.group("a")) == ({"a-1", "a-3"} if saving else {"a-3", "a-4"}), "what a-1 has is no use alone"


def test_who_may_have_taken_a_part_of_a_lost_state_unreported_does_not_begin_anew_with_it():
    cluster = pairs(SLOTS[:2], saving=False)
    cluster.plan(a=list(SLOTS))
    while len(cluster.group("a")) < 4:
        cluster.step()
    cluster.kill("a-4", "a-2")  # a-3 may have got its state from a-1 by then, and nobody has met
    cluster.rest()
    assert cluster.anew == {"a"}
    assert len(cluster.group("a")) == 4
    assert not {"a-1", "a-3"} & set(cluster.group("a"))


def test_who_is_started_again_with_another_place_gets_one_that_is_lacking_though_the_plan_meant_another():
    order = ("n1:0", "n1:1", "n3:0", "n2:1", "n3:1", "n2:0")
    cluster = pairs([slot(text) for text in order], max_workers=6)
    cluster.lose("n2")
    cluster.rest()
    assert sorted(cluster.places("a")) == ["n1:0", "n1:1", "n3:0", "n3:1"]


def test_a_task_whose_last_whole_replica_is_through_does_not_begin_anew_for_those_that_came_too_late():
    cluster = pairs()
    cluster.kill("a-2")
    while cluster.meet("a"):
        pass  # a-3 and a-4 compute
    new = cluster.processes["a-5"]
    new.ready = True
    out = cluster.tell(WorkerReady(node="n1", slot=1, task="a", worker="a-5", pid=1))
    assert {order.layout.replicas for order in of(Regroup, out)} == {2}
    out = cluster.tell(WorkerFinished(**cluster.processes["a-4"].who, iterations=9))
    out += cluster.tell(WorkerFinished(**cluster.processes["a-3"].who, iterations=9))
    assert cluster.said["a"] is TaskState.FINISHED
    assert {order.worker for order in of(StopWorker, out)} == {"a-1", "a-5"}, "a-3 and a-4 may be writing their results"


def test_half_a_replica_that_missed_the_end_does_not_keep_a_task_alive_that_another_has_finished():
    cluster = pairs([slot("n1:0"), slot("n3:0"), *SLOTS[2:]])
    cluster.lose("n3")
    cluster.tell(WorkerFinished(node="n2", slot=0, task="a", worker="a-3", iterations=9))
    assert cluster.said["a"] is not TaskState.FINISHED, "a-4 is about to say the same"
    out = cluster.tell(WorkerFinished(node="n2", slot=1, task="a", worker="a-4", iterations=9))
    assert cluster.said["a"] is TaskState.FINISHED
    assert "a-1" in {order.worker for order in of(StopWorker, out)}
    assert cluster.anew == set()


def test_workers_that_end_their_last_iteration_are_not_stopped_as_a_plan_takes_their_slots():
    cluster = pairs()
    out = cluster.plan()
    for name in ("a-3", "a-1", "a-2"):
        out += cluster.tell(WorkerFinished(**cluster.processes[name].who, iterations=9))
    assert cluster.said["a"] is TaskState.FINISHED
    assert {order.worker for order in of(StopWorker, out)} <= {"a-4"}, "the others may be writing their results"


@pytest.mark.parametrize("to", [["n3:0", "n3:1"], ["n1:1", "n2:0"]], ids=["altogether", "in part"])
def test_a_task_that_moves_takes_its_replica_along_and_who_stays_keeps_its_place(to):
    cluster = pairs(SLOTS[:2])
    cluster.settle(a=[slot(each) for each in to])
    assert cluster.anew == set()
    assert sorted(cluster.places("a")) == to
    assert cluster.processes["a-2"].living is ("n1:1" in to)


def test_workers_of_a_script_in_place_are_told_who_is_beside_them_on_their_node():
    layout = ParallelLayout(shard=3)
    task = spec(
        "a", heal=Healing.IN_PLACE, drill=False, min_workers=3, max_workers=3, layout=layout, layouts={3: layout}
    )
    cluster = Cluster({"n1": 2, "n2": 2}, [task])
    beside = lambda out: [(o.place, o.local_slots, o.group, o.groups) for o in of(StartWorker, out)]  # noqa: E731
    out = cluster.plan(a=[slot(text) for text in ("n2:1", "n1:0", "n2:0")])
    assert beside(out) == [(0, [1, 0], 0, 2), (1, [0], 1, 2), (2, [1, 0], 0, 2)]
    cluster.rest()
    assert beside(cluster.kill("a-3")) == [(2, [1, 0], 0, 2)]
    assert beside(cluster.kill("a-1")) == [(0, [1, 0], 0, 2)]


def test_sizes_are_whole_replicas_in_multiples_of_the_unit():
    cluster = pairs(unit=4, min_workers=4)
    out = cluster.kill("a-2")
    assert of(Regroup, out) == []
    assert len(of(StartWorker, out)) == 1
    cluster.rest()
    assert len(cluster.group("a")) == 4


def test_where_too_many_have_the_same_place_one_is_started_again_with_another():
    cluster = pairs([*SLOTS, slot("n3:0"), slot("n3:1")], max_workers=6)
    cluster.settle(a=[slot("n1:1"), slot("n2:1"), slot("n3:0"), slot("n3:1")])
    assert cluster.anew == set()
    assert sorted(cluster.places("a")) == ["n1:1", "n2:1", "n3:0", "n3:1"]
    assert [cluster.processes[name].built for name in cluster.group("a")] == [0, 1, 0, 1]


def test_a_worker_that_came_back_to_a_task_without_slots_makes_room_for_the_task_that_gets_its_slot():
    two = spec("a", min_workers=2, layout=ParallelLayout(tensor=2))
    cluster = Cluster({"n1": 2, "n2": 2, "n3": 2}, [two, spec("b")], saving=False)
    cluster.settle(a=[slot("n1:0"), slot("n2:0")])
    cluster.lose("n2", alive=True)
    cluster.settle(b=[slot("n1:0")])
    cluster.join("n2")
    cluster.rest()
    assert cluster.processes["a-2"].living, "nobody else has its place of the state"
    cluster.settle(b=[slot("n1:0"), slot("n2:0")])
    assert cluster.places("b") == ["n1:0", "n2:0"]


def test_a_part_of_a_state_that_comes_back_too_late_does_not_hold_up_who_begins_anew():
    cluster = pairs([slot("n1:0"), slot("n2:0")])
    cluster.lose("n2", alive=True)
    cluster.settle(a=[slot("n1:0"), slot("n3:0")])
    cluster.join("n2")
    cluster.rest()
    assert cluster.places("a") == ["n1:0", "n3:0"]
    assert len(cluster.group("a")) == 2


# --- tasks that wait for slots of each other --------------------------------------------------------------------------


def swapped(before, after, *, saving=True, **specs):
    """Return a cluster that was told to go from one plan to another, at rest."""
    cluster = Cluster({"n1": 4, "n2": 4}, [spec(name, **fields) for name, fields in specs.items()], saving=saving)
    cluster.settle(**{task: [slot(text) for text in texts] for task, texts in before.items()})
    cluster.settle(**{task: [slot(text) for text in texts] for task, texts in after.items()})
    return cluster


def computes_in(cluster, task, places):
    group = [str(cluster.run(task).workers[name].slot) for name in cluster.group(task)]
    return sorted(group) == cluster.places(task) == sorted(places)


def has_kept_its_state(cluster, task):
    return task not in cluster.anew


PLANS = {
    "part": ({"a": ["n1:0", "n1:1"], "b": ["n2:0", "n2:1"]}, {"a": ["n1:0", "n2:1"], "b": ["n2:0", "n1:1"]}),
    "all": ({"a": ["n1:0", "n1:1"], "b": ["n2:0", "n2:1"]}, {"a": ["n2:0", "n2:1"], "b": ["n1:0", "n1:1"]}),
}


@pytest.mark.parametrize("plans", PLANS.values(), ids=PLANS)
def test_two_tasks_that_swap_slots_at_their_minimum_both_get_them_and_keep_their_states(plans):
    cluster = swapped(*plans, a={"min_workers": 2}, b={"min_workers": 2})
    for task, places in plans[1].items():
        assert computes_in(cluster, task, places)
        assert has_kept_its_state(cluster, task)


def test_three_tasks_that_swap_slots_in_a_ring_all_get_them():
    before = {"a": ["n1:0", "n1:1"], "b": ["n2:0", "n2:1"], "c": ["n1:2", "n1:3"]}
    after = {"a": before["b"], "b": before["c"], "c": before["a"]}
    cluster = swapped(before, after, **{task: {"min_workers": 2} for task in "abc"})
    for task, places in after.items():
        assert computes_in(cluster, task, places)
        assert has_kept_its_state(cluster, task)


@pytest.mark.parametrize("saving", [True, False])
def test_where_a_state_can_not_be_handed_on_the_least_weighty_task_takes_it_from_memory_or_begins_anew(saving):
    one = {"min_workers": 1, "max_workers": 1}
    before, after = {"a": ["n1:0"], "b": ["n2:0"]}, {"a": ["n2:0"], "b": ["n1:0"]}
    cluster = swapped(before, after, saving=saving, a=one, b={**one, "weight": 0.5})
    assert computes_in(cluster, "a", ["n2:0"])
    assert computes_in(cluster, "b", ["n1:0"])
    assert has_kept_its_state(cluster, "a")
    assert has_kept_its_state(cluster, "b") is saving


def test_who_waits_for_tasks_that_go_on_without_it_goes_on_itself():
    cluster = Cluster({"n1": 4, "n2": 4}, [spec("a", min_workers=2), spec("b", min_workers=1)])
    cluster.settle(a=[slot("n1:0"), slot("n1:1")], b=[slot("n2:0"), slot("n2:1")])
    group = cluster.group("a")
    cluster.plan(a=[slot("n1:0"), slot("n2:1")], b=[slot("n2:0"), slot("n1:1")])
    assert cluster.group("a") == group
    assert all(cluster.processes[name].living for name in group), "b gives its slot up first: it can do with one"
