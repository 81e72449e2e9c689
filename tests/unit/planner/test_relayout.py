"""What a change of layout costs, in the dynamic program: against brute force, and in cases that show what it is for."""

import itertools
import random

import numpy as np
import pytest
from unicron_planner import lookup
from unicron_planner.lookup import Event, Situation, Standing, effect

from unicron.contracts.plans import Trigger, TriggerKind

NONE = Trigger(TriggerKind.WHAT_IF)


def standing(waf, held, relaid=()):
    """Return a task that earns `waf[size]`, with another shape at the sizes in `relaid`."""
    sizes = np.array([0, *waf], np.int64)
    return Standing(
        sizes=sizes,
        waf=np.array([0.0, *waf.values()]),
        held=held,
        held_waf=waf.get(held, 0.0),
        relaid=np.isin(sizes, list(relaid)),
    )


def situation(tasks, failure_rate=0.01, resize_s=5.0, failure_s=5.0, relayout_s=50.0):
    return Situation(tasks, failure_rate, resize_s, failure_s, relayout_s)


def worth(given, event, sizes):
    """Return the sum of G (equation 3) of an assignment, word for word."""
    total = 0.0
    for name, size in sizes.items():
        task = given.tasks[name]
        (at,) = np.flatnonzero(task.sizes == size)
        if task.relaid is not None and task.relaid[at]:
            cost = given.relayout_s
        elif event.lost.get(name):
            cost = given.failure_s
        else:
            cost = given.resize_s if size != task.held else 0.0
        total += task.waf[at] / (max(event.workers, 1) * given.failure_rate) - task.held_waf * cost
    return total


def values(given, event):
    """Return what every assignment is worth, the best first."""
    names = [name for name in given.tasks if name != event.ended]
    choices = [[size for size in given.tasks[name].sizes.tolist() if size or name != event.launched] for name in names]
    every = (dict(zip(names, picks, strict=True)) for picks in itertools.product(*choices))
    found = [worth(given, event, sizes) for sizes in every if sum(sizes.values()) <= event.workers]
    return sorted(found, reverse=True)


def random_situation(rng, workers):
    """Return tasks of which two in three have several shapes."""
    tasks, free, unit = {}, workers, rng.choice([1, 1, 2])
    for name in "abc"[: rng.randint(1, 3)]:
        sizes = [unit * size for size in sorted(rng.sample(range(1, 7), rng.randint(1, 5)))]
        held = rng.choice([size for size in [0, *sizes] if size <= free])
        free -= held
        waf = {size: rng.uniform(0.5, 2.0) * size**0.8 for size in sizes}
        others = [size for size in sizes if size != held and held and rng.random() < 0.5]
        tasks[name] = standing(waf, held, others if rng.random() < 0.67 else ())
    costs = (rng.uniform(0, 20), rng.uniform(0, 20), rng.uniform(0, 60))
    return situation(tasks, rng.choice([1e-3, 0.01, 0.05]), *costs)


def next_events(given, workers):
    held = {name: task.held for name, task in given.tasks.items() if task.held}
    events = [Event(Trigger(TriggerKind.NODE_JOINED), workers + 2)]
    events += [Event(Trigger.of(TriggerKind.NODE_LOST, ["n"]), max(0, workers - 2), dict.fromkeys(held, 1))]
    for name in given.tasks:
        if name in held:
            for count in (1, 2, 4):
                lost = min(count, held[name])
                events.append(Event(Trigger(TriggerKind.NODE_LOST), max(0, workers - count), {name: lost}))
            events.append(Event(Trigger.of(TriggerKind.TASK_FINISHED, [name]), workers, ended=name))
        else:
            events.append(Event(Trigger.of(TriggerKind.TASK_LAUNCHED, [name]), workers, launched=name))
    return events


def test_table_answer_and_runner_up_are_optimal_where_layouts_change():
    rng, kept, relaid = random.Random(11), {}, 0
    for _ in range(250):
        workers = rng.choice([3, 4, 6, 8])
        given = random_situation(rng, workers)
        events = next_events(given, workers)
        table = lookup.table(given, events, kept)
        assert table == lookup.table(given, events), "passes that were kept are still right"
        for event in events:
            best, row = values(given, event), table.get(effect(event))
            if not best:
                assert row is None
                continue
            near = {"rel": 1e-6, "abs": 1e-4}
            assert row.reward == pytest.approx(best[0], **near)
            assert worth(given, event, row.sizes) == pytest.approx(best[0], **near)
            if event.launched:
                continue
            computed = lookup.answer(given, event)
            assert computed.reward == pytest.approx(best[0], **near)
            other = lookup.runner_up(given, event, computed)
            assert (other is None) == (len(best) == 1)
            assert other is None or other.reward == pytest.approx(best[1], **near)
            tasks = given.tasks
            relaid += any(tasks[name].relaid[tasks[name].sizes == size] for name, size in row.sizes.items())
    assert relaid > 50, "many of the best plans change a layout"


def sizes(task, workers, lost=0, **costs):
    (row,) = lookup.table(situation({"a": task}, **costs), [Event(NONE, workers, {"a": lost} if lost else {})]).values()
    return row.sizes["a"]


def test_a_dear_change_of_layout_is_only_made_where_it_pays():
    task = standing({2: 2.0, 3: 2.5}, held=2, relaid=[3])
    assert sizes(task, 3, relayout_s=5.0) == 3
    assert sizes(task, 3, relayout_s=50.0) == 2
    assert sizes(standing({2: 2.0, 3: 2.5}, held=2), 3, relayout_s=50.0) == 3, "of the same shape"


def test_a_task_that_was_hit_pays_for_a_new_layout_instead():
    task = standing({2: 2.0, 3: 2.1, 4: 3.0}, held=4, relaid=[3])
    assert sizes(task, 3, lost=1, failure_s=5.0, relayout_s=5.0) == 3
    assert sizes(task, 3, lost=1, failure_s=5.0, relayout_s=50.0) == 2


def test_a_size_that_needs_no_new_layout_stays_in_the_running_though_a_smaller_one_earns_more():
    task = standing({2: 2.0, 3: 3.0, 4: 2.9}, held=2, relaid=[3])
    assert sizes(task, 4, relayout_s=50.0) == 4
    assert sizes(task, 4, relayout_s=5.0) == 3


def test_what_a_change_of_layout_costs_is_nothing_to_tasks_without_one():
    tasks = {name: Standing(np.arange(4), np.array([0.0, 1.0, 1.7, 2.2]), 2, 1.7) for name in "ab"}
    events = [Event(NONE, 5), Event(NONE, 3, {"a": 1})]
    cheap, dear = (lookup.table(situation(tasks, relayout_s=cost), events) for cost in (0.0, 1e9))
    assert cheap == dear
