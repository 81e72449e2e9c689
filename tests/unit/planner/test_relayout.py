"""What a change of layout costs, in the dynamic program: against brute force, and in cases that show what it is for."""

import random

import numpy as np
from unicron_planner import lookup
from unicron_planner.lookup import Event, Standing, effect

from tests.unit.planner import test_program as program
from tests.unit.planner.test_program import NONE, check, next_events, random_situation, situation, standing


def test_table_answer_and_runner_up_are_optimal_where_layouts_change():
    rng, kept, relaid = random.Random(11), {}, 0
    for _ in range(250):
        workers = rng.choice([3, 4, 6, 8])
        given = random_situation(rng, workers, shapes=True, most=3, largest=7, count=5)
        events = next_events(rng, given, workers)
        table = lookup.table(given, events, kept)
        assert table == lookup.table(given, events), "passes that were kept are still right"
        for event in events:
            row = table.get(effect(event))
            check(given, event, row, exact=False)
            if not event.launched:
                program.check_answer(given, event, exact=False)
                tasks = given.tasks
                relaid += any(tasks[name].relaid[tasks[name].sizes == size] for name, size in row.sizes.items())
    assert relaid > 50, "many of the best plans change a layout"


def sizes(task, workers, lost=0, failure_s=5.0, relayout_s=50.0):
    given = situation({"a": task}, 0.01, failure_s=failure_s, relayout_s=relayout_s)
    (row,) = lookup.table(given, [Event(NONE, workers, {"a": lost} if lost else {})]).values()
    return row.sizes["a"]


def test_a_dear_change_of_layout_is_only_made_where_it_pays():
    task = standing([2, 3], [2.0, 2.5], held=2, relaid=[3])
    assert sizes(task, 3, relayout_s=5.0) == 3
    assert sizes(task, 3, relayout_s=50.0) == 2
    assert sizes(standing([2, 3], [2.0, 2.5], held=2, relaid=[]), 3, relayout_s=50.0) == 3, "of the same shape"


def test_a_task_that_was_hit_pays_for_a_new_layout_instead():
    task = standing([2, 3, 4], [2.0, 2.1, 3.0], held=4, relaid=[3])
    assert sizes(task, 3, lost=1, failure_s=5.0, relayout_s=5.0) == 3
    assert sizes(task, 3, lost=1, failure_s=5.0, relayout_s=50.0) == 2


def test_a_size_that_needs_no_new_layout_stays_in_the_running_though_a_smaller_one_earns_more():
    task = standing([2, 3, 4], [2.0, 3.0, 2.9], held=2, relaid=[3])
    assert sizes(task, 4, relayout_s=50.0) == 4
    assert sizes(task, 4, relayout_s=5.0) == 3


def test_what_a_change_of_layout_costs_is_nothing_to_tasks_without_one():
    tasks = {name: Standing(np.arange(4), np.array([0.0, 1.0, 1.7, 2.2]), 2, 1.7) for name in "ab"}
    events = [Event(NONE, 5), Event(NONE, 3, {"a": 1})]
    cheap, dear = (lookup.table(situation(tasks, 0.01, relayout_s=cost), events) for cost in (0.0, 1e9))
    assert cheap == dear
