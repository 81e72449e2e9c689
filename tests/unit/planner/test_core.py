"""The planner's core: messages in, plans out; and what it learns of a cluster from them."""

import math
import random

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
    nodes,
    reasons,
    sizes,
    slots,
    spec,
    state,
    submitted,
    table,
)
from msgspec import structs
from unicron_planner.core import ADMISSIONS, REFRESH, PlannerCore
from unicron_planner.estimates import LONGEST_S, PlannerOptions
from unicron_planner.main import PlannerSettings, wiring
from unicron_planner.state import LEARNT, PlannerState

from unicron.contracts import events
from unicron.contracts.base import SetTimer, Started, TimerFired
from unicron.contracts.events import FailureDetected, NodeDrained, TaskRecovered
from unicron.contracts.failures import Severity
from unicron.contracts.queries import GetPlan, WhatIf
from unicron.contracts.tasks import ParallelLayout, TaskState
from unicron.errors import InvalidInputError
from unicron.service.commit import Commit

# --- the example: three nodes of two slots, weights 1.0 and 2.0 ------------------------------------------------------


@pytest.fixture
def planner():
    """Three nodes of two slots, with two tasks."""
    return cluster(*TWO)


def test_the_heavier_task_gets_more_and_each_task_spans_nodes(planner):
    plan = planner.state.plan
    assert (plan.trigger, plan.workers, sizes(plan)) == ("task_submitted:b", 6, {"a": 2, "b": 4})
    assert set(nodes(plan, "b")) == {"n1", "n2", "n3"}
    assert len(set(nodes(plan, "a"))) == 2
    assert [share.waf for share in plan.shares] == pytest.approx([1.8e9, 5.6e9])
    assert plan.waf == pytest.approx(7.4e9)


@pytest.mark.parametrize("node", ["n1", "n2", "n3"])
def test_a_lost_node_is_answered_from_the_table_and_its_return_gives_the_same_plan_back(planner, node):
    whole = planner.state.plan
    (plan,) = feed(planner, lost(node))
    assert plan.prepared
    assert (plan.trigger, plan.workers, sizes(plan)) == (f"node_lost:{node}", 4, {"a": 1, "b": 3})
    assert node not in nodes(plan, "a") + nodes(plan, "b")
    assert {share.task: share.before for share in plan.shares} == {"a": 2, "b": 4}
    assert plan.number == whole.number + 1

    (back,) = feed(planner, admitted(node, incarnation="2"))
    assert (back.trigger, back.prepared, sizes(back)) == (f"node_joined:{node}", True, sizes(whole))
    assert back.waf == pytest.approx(whole.waf)
    assert all(len(set(nodes(back, task))) > 1 for task in "ab")


def test_where_both_achieve_the_same_the_task_that_would_be_disturbed_less_wins():
    heavy, light = submitted("b", weight=2.0), submitted("a")  # a's third worker earns 0.6e9 and so does b's fourth
    assert sizes(cluster(heavy, light).state.plan) == {"b": 4, "a": 2}
    assert sizes(cluster(light, heavy).state.plan) == {"a": 3, "b": 3}
    planner = cluster(heavy, light)
    (shrunk, back) = feed(planner, lost("n1"), admitted("n1"))
    assert sizes(shrunk) == {"b": 3, "a": 1}
    assert sizes(back) == {"b": 3, "a": 3}


def test_a_node_whose_loss_moves_nobody_else_comes_back_to_the_same_slots():
    planner = cluster(submitted("a", least=2, most=6, throughput={}))
    whole = planner.state.plan
    feed(planner, lost("n3"))
    assert sizes(planner.state.plan) == {"a": 4}
    (back,) = feed(planner, admitted("n3", incarnation="2"))
    assert slots(back) == slots(whole)


@pytest.mark.parametrize(
    ("end", "trigger"),
    [
        (ended("b"), "task_finished:b"),
        (ended("b", TaskState.FAILED), "task_failed:b"),
        (ended("b", TaskState.REMOVED), "task_removed:b"),
        (events.TaskRemoved(task="b"), "task_removed:b"),
        (events.TaskBroken(task="b", reason="ValueError"), "task_failed:b"),
    ],
)
def test_however_a_task_ends_its_workers_are_free_once_and_its_name_can_be_used_again(planner, end, trigger):
    (plan,) = feed(planner, end)
    assert (plan.trigger, sizes(plan), plan.prepared) == (trigger, {"a": 4}, True)
    assert feed(planner, end, ended("b", TaskState.REMOVED)) == []
    (again,) = feed(planner, TWO[1])
    assert sizes(again) == {"a": 2, "b": 4}


def test_states_of_a_task_that_goes_on_change_nothing(planner):
    before = state(planner)
    for going_on in TaskState:
        if not going_on.ended:
            assert planner.handle(ended("a", going_on)) == []
    assert state(planner) == before


# --- nodes -----------------------------------------------------------------------------------------------------------


def test_an_agent_that_was_started_again_disturbs_nothing(planner):
    before = state(planner)
    assert planner.handle(admitted("n2", incarnation="2", returned=True)) == []
    assert planner.handle(admitted("n2", incarnation="3")) == []
    assert state(planner) == before


def test_a_node_that_comes_back_smaller_is_planned_for_as_it_is(planner):
    (plan,) = feed(planner, admitted("n2", slots=1, incarnation="2"))
    assert (plan.workers, plan.prepared) == (5, False)
    assert "n2:1" not in [slot for taken in slots(plan).values() for slot in taken]


def test_a_node_of_unusual_size_is_computed_for():
    planner = cluster(submitted("a", most=16, throughput={}))
    (usual,) = feed(planner, admitted("n4"))
    assert (usual.workers, usual.prepared, sizes(usual)) == (8, True, {"a": 8})
    (odd,) = feed(planner, admitted("n5", slots=3))
    assert (odd.workers, odd.prepared, sizes(odd)) == (11, False, {"a": 11})
    assert table(planner)["node_joined"].workers == 13


def test_a_drained_node_is_emptied_and_used_again_after(planner):
    (plan,) = feed(planner, events.NodeDrained(node="n1"))
    assert (plan.trigger, plan.prepared, sizes(plan)) == ("node_drained:n1", True, {"a": 1, "b": 3})
    assert "n1" not in nodes(plan, "a") + nodes(plan, "b")
    assert feed(planner, events.NodeDrained(node="n1")) == []
    (plan,) = feed(planner, events.NodeDrained(node="n1", drain=False))
    assert (plan.trigger, plan.prepared, sizes(plan)) == ("node_undrained:n1", True, {"a": 2, "b": 4})


def test_a_drained_node_stays_out_of_use_when_it_is_lost_and_comes_back(planner):
    (_, answer) = feed(planner, events.NodeDrained(node="n1"), lost("n1"))
    assert sizes(answer) == {"a": 1, "b": 3}
    assert feed(planner, admitted("n1", incarnation="2")) == []
    (plan,) = feed(planner, events.NodeDrained(node="n1", drain=False))
    assert sizes(plan) == {"a": 2, "b": 4}


def test_a_node_that_says_goodbye_is_not_a_failure(planner):
    (plan,) = feed(planner, events.NodeGone(node="n1"))
    assert (plan.trigger, plan.prepared, sizes(plan)) == ("node_left:n1", True, {"a": 1, "b": 3})
    assert planner.state.failures == 0
    assert feed(planner, events.NodeGone(node="n1")) == []


def test_only_sev1_is_the_planners_business(planner):
    for severity in (Severity.SEV2, Severity.SEV3):
        failure = events.FailureDetected(severity=severity, method="x", status="y", node="n1", task="a")
        assert planner.handle(failure) == []


def test_every_sev1_failure_gets_an_answer_and_counts_once():
    planner = cluster(submitted("a", most=1))
    assert nodes(planner.state.plan, "a") == ["n1"]
    (idle,) = feed(planner, lost("n3"))
    assert nodes(idle, "a") == ["n1"]
    (again,) = feed(planner, lost("n3"))
    assert again.number == idle.number + 1
    assert slots(again) == slots(idle)
    assert len(feed(planner, lost("never-seen"))) == 1
    assert planner.state.failures == 1


def test_a_healthy_task_keeps_its_slots_when_another_is_hit():
    planner = cluster(submitted("a", least=2, most=2), submitted("b", most=1))
    before = slots(planner.state.plan)
    assert (nodes(planner.state.plan, "a"), nodes(planner.state.plan, "b")) == (["n1", "n2"], ["n3"])
    (plan,) = feed(planner, lost("n1"))
    assert slots(plan)["b"] == before["b"]
    assert nodes(plan, "a") == ["n2", "n3"]


# --- tasks that wait -------------------------------------------------------------------------------------------------


def test_a_task_that_needs_more_than_there_is_waits_and_says_so_until_it_fits():
    planner = cluster(submitted("big", least=8, most=8, throughput={}))
    assert reasons(planner.state.plan) == {"big": "needs 8 workers, the cluster has 6 healthy slots"}
    (plan,) = feed(planner, admitted("n4"))
    assert (sizes(plan), reasons(plan), plan.prepared) == ({"big": 8}, {}, True)


def test_a_task_that_others_crowd_out_says_so():
    rich = submitted("rich", weight=2.0, least=6, most=6, throughput={})
    planner = cluster(rich, submitted("poor", least=2, throughput={}))
    assert reasons(planner.state.plan) == {"poor": "needs 2 workers; higher-weighted tasks use all 6 slots"}
    (plan,) = feed(planner, ended("rich"))
    assert sizes(plan) == {"poor": 4}


def test_a_task_is_never_given_less_than_its_minimum_nor_a_part_of_a_unit():
    planner = cluster(submitted("a", unit=4, least=3, most=9, throughput={}))
    assert sizes(planner.state.plan) == {"a": 4}
    (plan,) = feed(planner, lost("n1"))
    assert sizes(plan) == {"a": 4}
    (plan,) = feed(planner, lost("n2"))
    assert reasons(plan) == {"a": "needs 4 workers, the cluster has 2 healthy slots"}
    assert "a" in [share.task for share in plan.shares]


def test_a_task_may_come_before_any_node():
    planner = PlannerCore()
    (plan,) = feed(planner, submitted("a"))
    assert reasons(plan) == {"a": "needs 1 worker, the cluster has 0 healthy slots"}
    (plan,) = feed(planner, admitted("n1"))
    assert sizes(plan) == {"a": 2}


def test_the_same_task_again_changes_nothing_and_nodes_without_tasks_need_no_plan():
    planner = cluster()
    assert planner.state.plan is None
    feed(planner, submitted("a"))
    before = state(planner)
    assert planner.handle(submitted("a")) == []
    assert state(planner) == before


# --- the table -------------------------------------------------------------------------------------------------------


def test_the_table_holds_every_next_event():
    planner = cluster(*TWO, submitted("big", least=6, most=6, throughput=CONCAVE, weight=0.5))
    rows = table(planner)
    assert {name for name in rows if not name.startswith("two_nodes")} == {
        "node_lost:n1",
        "node_lost:n2",
        "node_lost:n3",
        "node_joined",
        "worker_failed:a",
        "worker_failed:b",
        "task_finished:a",
        "task_finished:b",
        "task_launched:big",
    }
    assert rows["worker_failed:a"].sizes == {"a": 2, "b": 4, "big": 0}
    assert {row.workers for name, row in rows.items() if name.startswith("two_nodes")} == {2}
    assert rows["node_lost:n1"].sizes == {"a": 1, "b": 3, "big": 0}
    assert (rows["node_joined"].workers, rows["node_joined"].sizes) == (8, {"a": 4, "b": 4, "big": 0})
    assert rows["task_finished:a"].sizes["b"] == 4
    assert rows["task_launched:big"].sizes == {"a": 0, "b": 0, "big": 6}


def test_the_table_is_made_after_the_plan_has_gone_out(planner):
    out = planner.handle(lost("n1"))
    assert [type(message) for message in out] == [events.PlanDecided, SetTimer]
    assert out[1] == REFRESH
    assert planner._table == {}
    (plan, *_) = plans(planner.handle(lost("n2")))
    assert (plan.prepared, plan.workers) == (False, 2)


def test_the_table_is_there_for_whoever_asks_before_it_was_made(planner):
    planner.handle(lost("n1"))
    assert set(table(planner)) >= {"node_lost:n2", "node_lost:n3", "node_joined"}
    assert planner.answer(GetPlan())[0].plan.plan.trigger == "node_lost:n1"


def storm(rng):
    """Return random events of a cluster's life."""
    messages, tasks = [], 0
    for _ in range(rng.randint(5, 25)):
        node = f"n{rng.randint(1, 4)}"
        task = f"t{rng.randint(0, max(tasks, 1))}"
        match rng.randint(0, 6):
            case 0 | 1:
                messages.append(admitted(node, slots=rng.choice([1, 2, 2, 2])))
            case 2:
                messages.append(lost(node))
            case 3:
                drained = events.NodeDrained(node=node, drain=rng.random() < 0.5)
                messages.append(rng.choice([events.NodeGone(node=node), drained]))
            case 4:
                messages.append(ended(task))
            case _:
                curve = {size: size ** rng.uniform(0.6, 1.0) for size in range(1, 9)}
                least, weight = rng.randint(1, 3), rng.uniform(0.5, 2)
                messages.append(submitted(f"t{tasks}", weight=weight, least=least, most=8, throughput=curve))
                tasks += 1
    return messages


def test_in_a_storm_prepared_answers_equal_computed_ones_and_every_rule_holds():
    rng, prepared = random.Random(11), 0
    for _ in range(60):
        quick, slow = PlannerCore(), PlannerCore()
        for message in storm(rng):
            plans = feed(quick, message)
            answers = feed(slow, message, prepared=False)
            assert [slots(plan) for plan in plans] == [slots(plan) for plan in answers]
            assert [plan.reward for plan in plans] == pytest.approx([plan.reward for plan in answers])
            assert not any(plan.prepared for plan in answers)
            for plan in plans:
                prepared += plan.prepared
                check_rules(quick, plan)
                assert sizes(plan) == sizes(decided_anew(quick)), "the same situation gives the same plan"
    assert prepared > 100


def decided_anew(planner):
    """Return what the planner would do if nothing happened."""
    return planner.answer(WhatIf())[0].plan.plan


def check_rules(planner, plan):
    used = [slot for share in plan.shares for slot in share.slots]
    usable = planner._usable()
    assert len(used) == len(set(used)) <= plan.workers == sum(map(len, usable.values()))
    assert all(slot.slot in usable.get(slot.node, ()) for slot in used)
    assert [share.task for share in plan.shares] == list(planner.state.tasks)
    for share in plan.shares:
        assert len(share.slots) in {0, *planner.state.tasks[share.task].sizes}
        assert bool(share.reason) == (not share.slots)


def test_the_state_survives_a_restart(planner):
    measure(planner, "a", 2, 0.5)
    feed(planner, lost("n1"))
    restored = PlannerCore(msgspec.msgpack.decode(state(planner), type=PlannerState))
    assert state(restored) == state(planner)
    assert feed(restored, Started(token=2)) == []  # the table is made again
    for message in (admitted("n1"), ended("b")):
        assert feed(restored, message) == feed(planner, message)


# --- the service -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [("transition_s", "-1"), ("prior_failures", "0"), ("prior_worker_hours", "nan"), ("spare_nodes", "-1")]
    + [("estimate_error", value) for value in ("-0.1", "1", "nan")],
)
def test_a_setting_that_makes_no_sense_is_named(field, value):
    with pytest.raises(InvalidInputError, match=f"UNICRON_{field.upper()}"):
        PlannerSettings.parse({field: value})


def test_settings_reach_the_core():
    texts = {"transition_s": "9", "prior_failures": "2", "prior_worker_hours": "1", "use_measured": "false"}
    made = wiring(PlannerSettings.parse(texts))
    assert made.telemetry == [], "where nothing measured counts, nobody wakes it up for that"
    core = made.core(None)
    feed(core, admitted("n1"), events.TaskSubmitted(task="a", spec=spec("a")))
    assert core._situate().resize_s == core._situate().failure_s == 9.0
    assert core._situate().failure_rate == pytest.approx(2 / 3600)
    measure(core, "a", 2, 1.0)
    assert core.state.measured == {}


# --- layouts ---------------------------------------------------------------------------------------------------------


def test_the_layout_of_a_share_counts_its_replicas(planner):
    layouts = {share.task: share.layout for share in planner.state.plan.shares}
    assert layouts == {"a": ParallelLayout(replicas=2), "b": ParallelLayout(replicas=4)}


def test_a_task_of_a_declared_shape_gets_whole_replicas_of_it():
    planner = cluster()
    pairs = structs.replace(spec("b", most=6, throughput={}), layout=ParallelLayout(tensor=2))
    (plan,) = feed(planner, events.TaskSubmitted(task="b", spec=pairs), prepared=False)
    (share,) = plan.shares
    assert share.layout == ParallelLayout(tensor=2, replicas=3)
    assert [slot.node for slot in share.slots] == ["n1", "n1", "n2", "n2", "n3", "n3"]


def test_a_paused_task_leaves_its_slots_to_others_and_gets_its_share_again(planner):
    whole = sizes(planner.state.plan)
    (plan,) = feed(planner, events.TaskPaused(task="b"))
    assert (plan.trigger, sizes(plan)) == ("task_paused:b", {"a": 4})
    assert feed(planner, events.TaskPaused(task="b")) == []
    (plan,) = feed(planner, lost("n1"))
    assert "b" not in sizes(plan)
    feed(planner, admitted("n1", incarnation="2"))
    (plan,) = feed(planner, events.TaskPaused(task="b", paused=False))
    assert (plan.trigger, sizes(plan)) == ("task_resumed:b", whole)


def test_a_task_paused_alone_gets_the_same_slots_again_though_nothing_else_changed():
    planner = cluster(submitted("a"))
    before = slots(planner.state.plan)
    (plan,) = feed(planner, events.TaskPaused(task="a"))
    assert sizes(plan) == {}
    (plan,) = feed(planner, events.TaskPaused(task="a", paused=False))
    assert slots(plan) == before, "it is told anew: the task has given them up"


def test_a_task_removed_while_it_is_paused_is_planned_for_no_more(planner):
    feed(planner, events.TaskPaused(task="b"), events.TaskRemoved(task="b"))
    assert feed(planner, events.TaskPaused(task="b", paused=False)) == []
    assert sizes(planner.state.plan) == {"a": 4}


def test_a_plan_that_it_never_made_is_overruled_with_all_of_its_own():
    planner = cluster(submitted("a"))
    mine = planner.state.plan
    assert planner.handle(events.PlanDecided(plan=mine)) == []
    forged = msgspec.structs.replace(mine, number=mine.number + 500, shares=[])
    decided, *_ = planner.handle(events.PlanDecided(plan=forged))
    assert decided.plan.number == mine.number + 501
    assert {share.task: share.given for share in decided.plan.shares} == {s.task: s.given for s in mine.shares}


def test_a_plan_that_can_t_be_is_doubted():
    planner = cluster(submitted("a"))
    mine = planner.state.plan
    assert planner.find_contradiction(events.PlanDecided(plan=mine)) is None
    assert planner.find_contradiction(events.PlanDecided(plan=msgspec.structs.replace(mine, number=10**8))) == (
        f"plan 100000000 can't come after plan {mine.number}"
    )


# --- what it learns --------------------------------------------------------------------------------------------------


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
    assert reasons(planner.state.plan) == {
        "b": "needs 1 worker; other tasks use all 6 slots, and nothing is known of its FLOP/s: a higher weight, "
        "throughput or model in its task file would count against them"
    }


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
    planner = PlannerCore(options=PlannerOptions(prior_failures=1.0, prior_worker_s=1000.0))
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
        planner = PlannerCore(options=PlannerOptions(transition_s=transition_s, prior_failures=1.0, prior_worker_s=1e4))
        feed(planner, admitted("n1"), submitted("a", most=4, throughput=CONCAVE), admitted("n2"))
        return sizes(planner.state.plan)["a"]

    assert (grown(5.0), grown(1e6)) == (4, 2)


FLATTENS = {1: 3e9, 2: 5e9, 6: 7e9}


@pytest.mark.parametrize(
    ("first", "second", "weight", "given"),
    [
        (FLATTENS, {}, 1.0, {"a": 6, "b": 0}),
        (FLATTENS, {}, 2.0, {"a": 2, "b": 4}),
        ({}, FLATTENS, 1.0, {"a": 6, "b": 0}),
        ({}, FLATTENS, 2.0, {"a": 4, "b": 2}),
    ],
)
def test_a_guess_alone_takes_no_worker_from_a_running_task_but_a_weight_does(first, second, weight, given):
    guesses = {"a": 0.5e9} if second else {"b": 0.5e9}
    planner = cluster(submitted("a", most=6, throughput=first))
    planner.handle(submitted("b", most=6, throughput=second, weight=weight))
    assert sizes(planner.state.plan) == given
    assert planner.answer(GetPlan())[0].plan.guessed == pytest.approx(guesses)


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
    planner = PlannerCore(commit.decode_state("planner", PlannerState, learnt=LEARNT))
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


# --- nodes that join shortly after one another are planned for together -----------------------------------------------


WIDE = submitted("a", most=40, throughput={})
FIRED = TimerFired(name=ADMISSIONS.name)


def joining(planner, *names):
    """Let nodes join without a moment passing; return what the planner says."""
    return [message for name in names for message in planner.handle(admitted(name))]


def plans(messages):
    return [message.plan for message in messages if isinstance(message, events.PlanDecided)]


def test_a_burst_of_nodes_makes_one_plan():
    planner = cluster(WIDE)
    assert joining(planner, "n4", "n5", "n6", "n7", "n8") == [ADMISSIONS]
    assert planner.state.plan.workers == 6
    (plan,) = plans(planner.handle(FIRED))
    assert (plan.trigger, plan.workers) == ("node_joined:n4,n5,n6,n7 and 1 more", 16)
    assert sizes(plan) == {"a": 16}
    assert plans(planner.handle(FIRED)) == []
    assert joining(planner, "n9") == [ADMISSIONS], "the next burst waits anew"


def test_one_node_that_joins_is_still_answered_from_the_table():
    planner = cluster(WIDE)
    joining(planner, "n4")
    planner.handle(TimerFired(name="refresh"))  # a table that knew of the node would lack what it brings
    (plan,) = plans(planner.handle(FIRED))
    assert (plan.prepared, sizes(plan)) == (True, {"a": 8})


def test_a_lost_node_is_answered_at_once_with_all_that_joined_meanwhile():
    planner = cluster(WIDE)
    joining(planner, "n4", "n5")
    (plan,) = plans(planner.handle(lost("n1")))
    assert (plan.trigger, plan.workers, sizes(plan)) == ("node_lost:n1", 8, {"a": 8})
    assert plans(planner.handle(FIRED)) == []


def test_a_node_that_goes_again_before_it_was_planned_for_gets_no_worker():
    planner = cluster(WIDE)
    for gone in (lost, lambda node: events.NodeGone(node=node), lambda node: NodeDrained(node=node)):
        joining(planner, "n4", "n5")
        out = [*planner.handle(gone("n4")), *planner.handle(FIRED)]
        assert "n4" not in nodes(planner.state.plan, "a")
        assert "n5" in nodes(planner.state.plan, "a")
        assert plans(out)
        feed(planner, lost("n5"), NodeDrained(node="n4", drain=False), lost("n4"))


def test_a_node_in_use_that_has_other_slots_now_is_planned_for_at_once():
    planner = cluster(WIDE)
    (plan,) = plans(planner.handle(admitted("n2", slots=1)))
    assert (plan.trigger, plan.workers) == ("node_joined:n2", 5)


def test_nodes_that_wait_are_not_forgotten_over_a_restart():
    planner = cluster(WIDE)
    joining(planner, "n4", "n5")
    again = PlannerCore(msgspec.msgpack.decode(state(planner), type=PlannerState))
    assert joining(again, "n6") == [], "the shell has kept the timer"
    (plan,) = plans(again.handle(FIRED))
    assert (plan.trigger, sizes(plan)) == ("node_joined:n4,n5,n6", {"a": 12})
