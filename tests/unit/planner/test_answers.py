"""The planner's answers: the plan with its runner-up, what-if, and the curve of a task."""

import msgspec
import pytest
from helpers.planner import CONCAVE, STEEPER, TWO, admitted, cluster, feed, lost, measure, sizes, spec, submitted
from msgspec.structs import replace
from unicron_planner.core import PlannerCore
from unicron_planner.estimates import PlannerOptions

from unicron.contracts.events import NodeDrained, TaskSubmitted
from unicron.contracts.queries import GetCurve, GetPlan, WhatIf
from unicron.contracts.tasks import ModelSpec


def ask(planner, query):
    reply, out = planner.answer(query)
    assert out == []
    return reply


def test_the_plan_names_the_best_other_assignment():
    view = ask(cluster(*TWO), GetPlan()).plan
    assert sizes(view.plan) == {"a": 2, "b": 4}
    assert view.runner_up.event == view.plan.trigger
    assert view.runner_up.changes == {"a": 3, "b": 3}
    lost_waf = (1.8e9 + 2 * 2.8e9) - (2.4e9 + 2 * 2.4e9)
    # the other would have left task a its three workers, and disturbed nobody
    better = lost_waf * view.plan.running_s - view.plan.transition_s * 2.7e9
    assert view.plan.reward - view.runner_up.reward == pytest.approx(better, rel=1e-3)


def test_where_there_is_no_other_assignment_none_is_named():
    planner = cluster(submitted("a", least=6, most=6, throughput={}), nodes=1)
    assert sizes(planner.state.plan) == {"a": 0}
    assert ask(planner, GetPlan()).plan.runner_up is None


def test_a_plan_says_what_each_task_gains_and_loses():
    planner = cluster(*TWO)
    (plan,) = feed(planner, lost("n1"))
    assert {share.task: (share.waf_before, share.waf) for share in plan.shares} == {
        "a": (pytest.approx(1.8e9), pytest.approx(1.0e9)),
        "b": (pytest.approx(5.6e9), pytest.approx(4.8e9)),
    }
    assert (plan.transition_s, plan.running_s > 0) == (5.0, True)


def test_a_plan_says_how_long_it_took_where_there_is_a_clock():
    ticks = iter(range(1000))
    planner = PlannerCore(stopwatch=lambda: float(next(ticks)))
    feed(planner, admitted("n1"), submitted("a"))
    (plan,) = feed(planner, admitted("n2"))
    assert (plan.lookup_s, plan.refresh_s) == (1.0, 1.0)


@pytest.mark.parametrize("node", ["n1", "n2", "n3"])
def test_what_would_happen_is_what_happens(node):
    planner = cluster(*TWO)
    before = msgspec.msgpack.encode(planner.state)
    view = ask(planner, WhatIf(lose=[node])).plan
    assert msgspec.msgpack.encode(planner.state) == before, "asking changes nothing"
    (plan,) = feed(planner, lost(node))
    assert [share.slots for share in view.plan.shares] == [share.slots for share in plan.shares]
    assert (view.plan.reward, view.plan.trigger) == (pytest.approx(plan.reward), "what_if")
    assert view.runner_up.reward < view.plan.reward


def test_several_things_can_happen_at_once():
    planner = cluster(*TWO)
    assert sizes(ask(planner, WhatIf(lose=["n1", "n2"])).plan.plan) == {"a": 0, "b": 2}
    assert sizes(ask(planner, WhatIf(lose=["n1"], join=2)).plan.plan) == {"a": 4, "b": 4}
    assert sizes(ask(planner, WhatIf(finish=["b"])).plan.plan) == {"a": 4}
    heavy = spec("c", weight=9.0, throughput=CONCAVE)
    assert sizes(ask(planner, WhatIf(submit=heavy)).plan.plan)["c"] == 4


@pytest.mark.parametrize(
    ("query", "text"),
    [
        (WhatIf(lose=["n9"]), "node 'n9' is not up; these are: n1, n2, n3"),
        (WhatIf(finish=["x"]), "no task 'x' to finish; there are: a, b"),
        (WhatIf(submit=spec("c", weight=0.0)), "weight"),
        (GetCurve(task="x"), "no task 'x'; there are: a, b"),
    ],
)
def test_what_can_not_be_asked_is_explained(query, text):
    assert text in ask(cluster(*TWO), query).error


def test_a_curve_tells_where_each_point_comes_from():
    planner = cluster(submitted("a", weight=2.0, throughput=STEEPER, flops=3.0e9))
    measure(planner, "a", 3, 1.0)
    curve = ask(planner, GetCurve(task="a")).curve
    assert (curve.task, curve.held) == ("a", 4)
    sources = {point.workers: point.source for point in curve.points}
    assert sources == {1: "table", 2: "table", 3: "measured", 4: "table"}
    assert curve.points[2].flops == pytest.approx(3.0e9)
    assert [point.waf for point in curve.points] == pytest.approx([2 * point.flops for point in curve.points])


def test_a_spare_node_takes_the_place_of_a_lost_one():
    planner = PlannerCore(options=PlannerOptions(spare_nodes=1))
    feed(planner, *(admitted(f"n{number}") for number in (1, 2, 3, 4)))
    feed(planner, submitted("a", most=8, throughput={}))
    whole = planner.state.plan
    assert (whole.workers, sizes(whole)) == (6, {"a": 6})
    (plan,) = feed(planner, lost("n1"))
    assert (plan.workers, sizes(plan), plan.prepared) == (6, {"a": 6}, True)
    assert "n4" in {slot.node for share in plan.shares for slot in share.slots}
    (smaller,) = feed(planner, lost("n2"))
    assert (smaller.workers, smaller.prepared) == (4, True)
    feed(planner, admitted("n1"))
    feed(planner, admitted("n2"))
    assert (planner.state.plan.workers, sizes(planner.state.plan)) == (6, {"a": 6})


def test_a_drained_node_is_no_spare():
    planner = PlannerCore(options=PlannerOptions(spare_nodes=1))
    feed(planner, *(admitted(f"n{number}") for number in (1, 2, 3)), submitted("a", most=8, throughput={}))
    assert planner.state.plan.workers == 4
    feed(planner, NodeDrained(node="n3", drain=True))
    assert planner._usable() == {"n1": [0, 1]} or planner._usable() == {"n2": [0, 1]}


def test_a_task_that_fits_nowhere_waits_and_says_why():
    huge = ModelSpec(layers=96, hidden=12288, heads=96, sequence=2048, vocabulary=51200, batch=1024)
    planner = cluster(submitted("a"))
    told = submitted("big", most=6, throughput={})
    (plan,) = feed(planner, TaskSubmitted(task="big", spec=replace(told.spec, model=huge)))
    (waits,) = [share for share in plan.shares if share.task == "big"]
    assert waits.slots == []
    assert "no size is feasible" in waits.reason
    assert "needs at least 48 A100" in waits.reason


def test_tensor_parallel_groups_stay_inside_nodes():
    model = ModelSpec(layers=48, hidden=8192, heads=64, sequence=2048, vocabulary=51200, batch=1536)
    planner = PlannerCore()
    feed(planner, *(admitted(f"n{number}", slots=8) for number in (1, 2, 3)))
    small = submitted("small", weight=9.0, most=3, throughput={1: 1e15, 3: 4e15})
    told = submitted("big", most=24, throughput={})
    feed(planner, small, TaskSubmitted(task="big", spec=replace(told.spec, model=model)))
    (share,) = [share for share in planner.state.plan.shares if share.task == "big"]
    (point,) = [one for one in ask(planner, GetCurve(task="big")).curve.points if one.workers == len(share.slots)]
    tensor = int(point.text.split()[1])
    assert tensor > 1
    groups = [share.slots[at : at + tensor] for at in range(0, len(share.slots), tensor)]
    assert all(len({slot.node for slot in group}) == 1 for group in groups)
