"""Tasks that wait for each other's slots: somebody gives way, and no state is lost that need not be."""

import pytest
from helpers.transition import Cluster, slot, spec


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
