"""What the planner learns of a cluster: iteration times, failures, transitions."""

import math

import msgspec
import pytest
from helpers.planner import (
    CONCAVE,
    TWO,
    admitted,
    cluster,
    ended,
    feed,
    iteration,
    lost,
    measure,
    reasons,
    sizes,
    state,
    submitted,
    table,
)
from unicron_planner.core import REFRESH, PlannerCore
from unicron_planner.estimates import LONGEST_S, Options
from unicron_planner.state import LEARNT, PlannerState

from unicron.commit import Commit
from unicron.contracts.base import Started, TimerFired
from unicron.contracts.events import FailureDetected, NodeDrained, TaskRecovered
from unicron.contracts.failures import Severity
from unicron.contracts.queries import GetPlan


def test_measured_iterations_change_the_next_plan_but_disturb_nobody():
    curve = {1: 1.0, 2: 1.8, 3: 2.4, 4: 2.7}
    planner = cluster(*(submitted(name, most=4, throughput=curve, flops=2.4) for name in "ab"))
    assert sizes(planner.state.plan) == {"a": 3, "b": 3}
    assert table(planner)["node_lost:n1"].sizes == {"a": 2, "b": 2}
    before = planner.state.plan
    measure(planner, "b", 3, 0.1)
    measure(planner, "a", 3, 1.0)
    assert planner.state.plan == before
    assert table(planner)["node_lost:n1"].sizes == {"a": 0, "b": 4}


def test_tasks_that_earn_alike_are_served_in_order():
    planner = cluster(submitted("a", most=6, throughput={}), submitted("b", throughput={}))
    assert sizes(planner.state.plan) == {"a": 6, "b": 0}
    assert reasons(planner.state.plan) == {"b": "needs 1 worker; other tasks use all 6 slots and achieve no less there"}


def test_only_what_is_believed_and_new_makes_the_table_again():
    planner = cluster(submitted("a", flops=1e9))
    times = [planner.handle(iteration("a", 2, 1.0, number=number)) for number in range(22)]
    assert times == [[]] * 20 + [[REFRESH], []], "it is asked for once, however many more come before it is made"
    feed(planner, iteration("a", 2, 1.0))
    assert planner.handle(iteration("a", 2, 1.0)) == []


def test_the_first_iteration_of_a_membership_is_not_counted():
    planner = cluster(submitted("a", flops=1e9))
    for epoch in range(30):
        planner.handle(iteration("a", 2, 9.0, epoch=epoch))
    assert planner.state.measured == {}


def test_what_was_measured_counts_for_no_other_configuration_of_the_task():
    planner = cluster(submitted("a", flops=1e9))
    measure(planner, "a", 2, 1.0)
    assert planner.state.measured.keys() == {"a"}
    planner.handle(submitted("a", flops=2e9))
    assert planner.state.measured == {}


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, -1.0, 0.0])
def test_a_senseless_duration_has_no_effect(seconds):
    planner = cluster(*TWO)
    measure(planner, "a", 2, 1.0)
    before = state(planner)
    assert planner.handle(iteration("a", 2, seconds)) == []
    assert planner.handle(iteration("a", 2, seconds, epoch=1)) == []
    assert state(planner) == before


def test_iterations_of_unknown_tasks_and_impossible_sizes_have_no_effect():
    planner = cluster(*TWO)
    before = state(planner)
    for stray in (iteration("x", 2, 1.0), iteration("a", 0, 1.0), iteration("a", 5, 1.0)):
        assert planner.handle(stray) == planner.handle(stray) == []
    assert state(planner) == before


def test_an_ended_task_is_forgotten():
    planner = cluster(*TWO)
    measure(planner, "a", 2, 1.0)
    feed(planner, ended("a"))
    assert (planner.state.measured, planner.state.epochs) == ({}, {})


def test_the_failure_rate_is_learned_from_failures_and_time():
    planner = PlannerCore(options=Options(prior_failures=1.0, prior_worker_s=1000.0))
    assert planner._situate().failure_rate == pytest.approx(1 / 1000)
    feed(planner, admitted("n1", at=100.0), admitted("n2", at=100.0))
    feed(planner, NodeDrained(node="n9", at=350.0), admitted("n2", at=200.0))
    planner._refresh()
    assert planner._situate().failure_rate == pytest.approx(1 / 2000)
    feed(planner, lost("n1", at=600.0))
    assert planner._situate().failure_rate == pytest.approx(2 / 3000)
    assert planner._situate().running_s(4) == pytest.approx(1 / (4 * 2 / 3000))
    feed(planner, lost("n1", at=700.0), lost("n1", at=math.inf), lost("n1"))
    assert planner._situate().failure_rate == pytest.approx(2 / 3200)


def test_a_longer_transition_keeps_more_tasks_undisturbed():
    def grown(transition_s):
        planner = PlannerCore(options=Options(transition_s=transition_s, prior_failures=1.0, prior_worker_s=1e4))
        feed(planner, admitted("n1"), submitted("a", most=4, throughput=CONCAVE), admitted("n2"))
        return sizes(planner.state.plan)["a"]

    assert (grown(5.0), grown(1e6)) == (4, 2)


def test_a_task_about_which_nothing_is_known_is_taken_to_be_like_the_others():
    curve = {1: 1.0e9, 6: 1.1e9}
    planner = cluster(submitted("known", most=6, throughput=curve), submitted("new", most=5, throughput={}))
    assert sizes(planner.state.plan) == {"known": 1, "new": 5}


# --- how long transitions take ---------------------------------------------------------------------------------------


def recovered(task, seconds):
    return TaskRecovered(task=task, epoch=1, workers=2, seconds=seconds)


def test_transitions_are_learned_by_kind():
    planner = cluster(submitted("a"), submitted("b"))
    assert (planner._situate().failure_s, planner._situate().resize_s) == (5.0, 5.0)
    feed(planner, recovered("a", 1.0), recovered("b", 1.0))  # they were launched, which is a change of size
    assert planner.state.transitions["resize"].count == 2
    feed(planner, FailureDetected(severity=Severity.SEV2, method="process_supervision", status="x", task="a"))
    feed(planner, recovered("a", 11.0), recovered("a", 11.0), recovered("a", math.nan))
    planner._refresh()
    assert planner._situate().failure_s == pytest.approx((5.0 + 11.0) / 2)
    assert planner._situate().resize_s == pytest.approx((5.0 + 1.0 + 1.0) / 3)


def test_a_lost_node_is_a_failure_to_those_it_hits_and_a_change_of_size_to_others():
    planner = cluster(submitted("a", weight=2.0, most=2, throughput={}), submitted("b", least=1, throughput={}))
    feed(planner, recovered("a", 5.0), recovered("b", 5.0))
    hit = {slot.node for share in planner.state.plan.shares if share.task == "b" for slot in share.slots}
    feed(planner, lost(min(hit)))
    assert planner.state.disturbed["b"] == "failure"


def test_a_small_change_of_an_estimate_is_not_believed():
    planner = cluster(submitted("a"))
    feed(planner, recovered("a", 5.1))
    planner._refresh()
    assert planner._situate().resize_s == pytest.approx(5.05)  # the first one is
    planner.state.disturbed["a"] = "resize"
    feed(planner, recovered("a", 5.2))
    planner._refresh()
    assert planner._situate().resize_s == pytest.approx(5.05)


@pytest.mark.parametrize(
    "poison",
    [
        {"clock": 1e308, "worker_seconds": math.inf},
        {"clock": 9e10, "worker_seconds": 8e11, "believed_rate": 0.0},
        {"measured": {"a": {2: {"count": 25.0, "seconds": math.nan, "squares": math.inf}}}},
        {"transitions": {"failure": {"count": 1.0, "seconds": math.inf, "believed_s": math.inf}}, "failures": 2**63},
    ],
)
def test_a_planner_whose_stored_state_is_poisoned_learns_anew_and_plans_on(poison):
    before = cluster(submitted("a"))
    stored = msgspec.msgpack.decode(msgspec.msgpack.encode(before.state)) | poison
    commit = Commit(state=msgspec.msgpack.encode(stored))
    planner = PlannerCore(commit.restored("planner", PlannerState, learnt=LEARNT))
    planner.handle(Started(token=7, at=1.8e9))
    planner.handle(TimerFired(name="refresh", at=1.8e9))
    [plan] = feed(planner, lost("n1", at=1.8e9 + 5))
    assert sizes(plan) == sizes(feed(before, lost("n1"))[0])
    assert planner.answers[GetPlan](GetPlan())[0].plan.failure_rate > 1e-9
    assert planner.state.clock == 1.8e9 + 5


def test_a_time_that_is_said_to_be_too_short_or_too_long_leaves_estimates_that_can_be_planned_with():
    planner = cluster(submitted("a", flops=1e9))
    measure(planner, "a", 2, 5e-324)
    assert planner.state.measured.get("a", {}) == {}
    feed(planner, FailureDetected(severity=Severity.SEV2, method="process_supervision", status="x", task="a"))
    feed(planner, TaskRecovered(task="a", epoch=1, workers=2, seconds=4e6))
    assert planner.state.transitions["failure"].seconds == LONGEST_S
