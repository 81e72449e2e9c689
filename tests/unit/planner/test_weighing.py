"""Plans take workers from running tasks only for more than they cost and than the estimates may be off by."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.planner import admitted, ended, feed, lost, measure, sizes, submitted
from hypothesis import given as holds
from hypothesis import settings
from hypothesis import strategies as st
from unicron_planner import lookup
from unicron_planner.core import PlannerCore
from unicron_planner.estimates import PlannerOptions
from unicron_planner.lookup import Event, Situation, TaskStanding
from unicron_planner.weighing import Decision

from unicron.contracts.events import NodeDrained
from unicron.contracts.plans import Trigger, TriggerKind
from unicron.contracts.queries import GetPlan
from unicron.observe.words.explain import explain

NONE = Trigger(TriggerKind.WHAT_IF)
WAYS = {1: 1e12, 2: 2e12}
SURE = PlannerOptions(estimate_error=0.0)


@st.composite
def standings(draw):
    """Return a task that waits, of any curve and any doubt that never falls."""
    known = sorted(draw(st.sets(st.integers(1, 12), min_size=1, max_size=5)))
    amounts = st.floats(min_value=1e-2, max_value=1e2)
    waf = np.array([0.0, *(draw(amounts) for _ in known)])
    parts = np.array([draw(st.sampled_from([0.0, 0.01, 0.07, 0.4])) for _ in known])
    doubt = np.concatenate([[0.0], np.cumsum(parts * np.diff(np.maximum.accumulate(waf)))])
    return TaskStanding(np.array([0, *known]), waf, 0, 0.0, doubt=doubt)


@st.composite
def lives(draw):
    """Return tasks that wait, and what befalls them: how many workers there are, and how many of whom are lost."""
    tasks = {f"t{index}": task for index, task in enumerate(draw(st.lists(standings(), min_size=1, max_size=4)))}
    rate = draw(st.sampled_from([1e-8, 1e-4, 1e-2]))
    steps = st.tuples(st.integers(0, 16), st.dictionaries(st.sampled_from(list(tasks)), st.integers(1, 4), max_size=2))
    return Situation(tasks, rate, 5.0, 7.0), draw(st.lists(steps, min_size=1, max_size=6))


def after(given: Situation, row: lookup.LookupRow) -> Situation:
    """Return the situation when a plan has been carried out."""
    tasks = {
        name: replace(task, held=row.sizes[name], held_waf=task.waf_of(row.sizes[name]))
        for name, task in given.tasks.items()
    }
    return replace(given, tasks=tasks)


def lived(given: Situation, steps):
    """Return each decision of a life, with the situation after it."""
    for workers, hit in steps:
        gone = {name: min(count, given.tasks[name].held) for name, count in hit.items() if given.tasks[name].held}
        event = Event(NONE, workers, gone)
        row = lookup.answer(given, event)
        yield Decision(given, event, row), after(given, row)
        given = after(given, row)


@holds(lives())
@settings(max_examples=150)
def test_what_was_decided_is_decided_again(life):
    for decision, then in lived(*life):
        again = lookup.answer(then, Event(NONE, decision.event.workers))
        assert again.sizes == decision.row.sizes


@holds(lives())
@settings(max_examples=150)
def test_however_often_workers_were_left_where_they_are_no_plan_is_behind_the_best_by_more_than_one_margin(life):
    for decision, then in lived(*life):
        anew = {name: replace(task, held=0, held_waf=0.0, doubt=None) for name, task in then.tasks.items()}
        best = lookup.answer(replace(then, tasks=anew), Event(NONE, decision.event.workers))
        allowed, running_s = 0.0, then.running_s(decision.event.workers)
        for name, task in then.tasks.items():
            doubts = dict(zip(task.sizes.tolist(), task.doubt.tolist(), strict=True))
            allowed += max(0.0, doubts[task.held] - doubts[best.sizes[name]])
            allowed += (best.sizes[name] != task.held) * task.held_waf * then.resize_s / running_s
        behind = sum(task.waf_of(best.sizes[name]) - task.held_waf for name, task in then.tasks.items())
        assert behind <= allowed + 1e-6 * sum(task.waf.max() for task in then.tasks.values())


@holds(lives())
@settings(max_examples=150)
def test_what_takes_nothing_from_running_tasks_is_done_and_what_does_gains_more_than_cost_and_error(life):
    for decision, _ in lived(*life):
        given, event, row = decision.given, decision.event, decision.row
        exact = replace(given, tasks={name: replace(task, doubt=None) for name, task in given.tasks.items()})
        tempting = lookup.answer(exact, event)
        left = {name: task.held - event.lost.get(name, 0) for name, task in given.tasks.items()}
        if all(tempting.sizes[name] >= count for name, count in left.items()):
            assert row.sizes == tempting.sizes
        small = 1e-6 * event.workers * max(task.waf.max() for task in given.tasks.values()) * given.running_s(1)
        if decision.taken:
            assert decision.taken.gain >= decision.taken.cost + decision.taken.error - small
        if decision.held_back:
            against = decision.held_back.cost + decision.held_back.error
            assert decision.held_back.cost - small <= decision.held_back.gain <= against + small


# --- the planner -----------------------------------------------------------------------------------------------------


def two_slots(*messages, options=None):
    """Return a planner of one node with two slots, all of which `bert` has, and that has then heard more."""
    planner = PlannerCore(options=options)
    feed(planner, admitted("n1"), submitted("bert", least=2, most=2, throughput=WAYS), *messages)
    return planner


def rival(weight):
    return submitted("rival", weight=weight, least=2, most=2, throughput=WAYS)


def said(planner):
    return dict(explain(planner.answer(GetPlan())[0].plan))


def test_a_task_of_one_percent_more_weight_throws_nobody_out_and_the_plan_says_why():
    planner = two_slots(rival(1.01))
    assert sizes(planner.state.plan) == {"bert": 2, "rival": 0}
    view = planner.answer(GetPlan())[0].plan
    whole = 2e12 * planner.state.plan.running_s
    assert view.held_back.changes == {"bert": 0, "rival": 2}
    assert view.held_back.gain == pytest.approx(0.01 * whole)
    assert view.held_back.cost == pytest.approx(2e12 * 5.0)
    assert view.held_back.error == pytest.approx(np.hypot(0.05, 0.05) * whole)
    assert "bert 0 (not 2), rival 2 (not 0)" in said(planner)["held back"]
    assert "(1 %) more until the next failure: not more than its cost" in said(planner)["held back"]


def test_one_that_clearly_outweighs_runs_at_once_and_the_plan_says_what_it_gains():
    planner = two_slots(rival(1.2))
    assert sizes(planner.state.plan) == {"bert": 0, "rival": 2}
    assert said(planner)["taken"].startswith("against bert 2 (not 0), rival 0 (not 2), which leaves running tasks more")
    assert "more than its cost" in said(planner)["taken"]


def test_who_wants_the_last_per_mille_says_so():
    assert sizes(two_slots(rival(1.001), options=SURE).state.plan) == {"bert": 0, "rival": 2}


def test_a_curve_that_was_measured_is_as_sure_as_its_spread():
    planner = two_slots()
    measure(planner, "bert", 2, 1.0)
    feed(planner, rival(1.06))
    assert sizes(planner.state.plan) == {"bert": 0, "rival": 2}, "what bert earns is known; 5 % are left for the rival"
    assert sizes(two_slots(rival(1.06)).state.plan) == {"bert": 2, "rival": 0}


@pytest.mark.parametrize("event", [ended("bert"), admitted("n2")])
def test_free_slots_are_used_at_once_however_little_that_gains(event):
    (plan,) = feed(two_slots(rival(1e-3)), event)
    assert sizes(plan)["rival"] == 2


@pytest.mark.parametrize("gone", [lost, lambda node: NodeDrained(node=node)])
@pytest.mark.parametrize(
    ("node", "weight", "runs"), [("n1", 1.01, "rival"), ("n2", 1.01, "bert"), ("n2", 1.2, "rival")]
)
def test_who_lost_its_workers_gets_those_of_another_only_if_it_clearly_outweighs_it(gone, node, weight, runs):
    planner = two_slots(admitted("n2"), rival(weight))
    (plan,) = feed(planner, gone(node))
    assert sizes(plan) == {"bert": 0, "rival": 0, runs: 2}
