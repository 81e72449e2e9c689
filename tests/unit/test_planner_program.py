"""The dynamic program and the lookup table against brute force, and their invariants."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unicron_planner import lookup, program
from unicron_planner.lookup import Event, Situation, Standing


def standing(sizes, waf, held):
    sizes = np.array([0, *sizes], np.int64)
    waf = np.array([0.0, *waf], np.float64)
    return Standing(sizes=sizes, waf=waf, held=held, held_waf=float(waf[sizes == held][0]))


def random_situation(rng: random.Random, workers: int, *, ties: bool) -> Situation:
    """Return up to four tasks that hold at most `workers`; with `ties`, rewards are small whole numbers."""
    tasks, free = {}, workers
    for index in range(rng.randint(1, 4)):
        sizes = sorted(rng.sample(range(1, 8), rng.randint(1, 4)))
        if ties:
            waf = [float(rng.randint(1, 3) if rng.random() < 0.5 else size) for size in sizes]
        else:
            waf = [rng.uniform(0.5, 2.0) * size**0.8 for size in sizes]
        held = rng.choice([size for size in [0, *sizes] if size <= free])
        free -= held
        tasks[f"t{index}"] = standing(sizes, waf, held)
    if ties:  # so that D_running(n') is a whole number
        return Situation(tasks=tasks, failure_rate=1 / 840, transition_s=rng.choice([0.0, 7.0]))
    return Situation(tasks=tasks, failure_rate=rng.choice([1e-8, 1e-3, 0.05]), transition_s=rng.uniform(0, 20))


def next_events(rng: random.Random, situation: Situation, workers: int) -> list[Event]:
    """Return every kind of event; nodes hold workers of any tasks."""
    events = [Event("node_joined", workers + 2)]
    for node in range(3):
        lost, room = {}, min(2, workers)
        for name, task in situation.tasks.items():
            count = rng.randint(0, min(task.held, room))
            room -= count
            lost |= {name: count} if count else {}
        events.append(Event(f"node_lost:{node}", max(0, workers - 2), lost))
    for name, task in situation.tasks.items():
        if task.held:
            events.append(Event(f"fault:{name}", workers, {name: 1}))
            events.append(Event(f"task_finished:{name}", workers, ended=name))
        else:
            events.append(Event(f"task_launched:{name}", workers, launched=name))
    return events


def reward(situation: Situation, event: Event, given: dict[str, int]) -> float:
    """Equations 3 and 4, word for word."""
    total = 0.0
    running_s = 1 / (max(event.workers, 1) * situation.failure_rate)
    for name, size in given.items():
        task = situation.tasks[name]
        total += float(task.waf[task.sizes == size][0]) * running_s
        if size != task.held or name in event.lost:
            total -= task.held_waf * situation.transition_s
    return total


def every_assignment(situation: Situation, event: Event) -> list[dict[str, int]]:
    names = [name for name in situation.tasks if name != event.ended]
    choices = [situation.tasks[name].sizes.tolist()[1 if name == event.launched else 0 :] for name in names]
    return [
        dict(zip(names, picked, strict=True)) for picked in itertools.product(*choices) if sum(picked) <= event.workers
    ]


def moved(situation: Situation, event: Event, given: dict[str, int]) -> int:
    return sum(abs(size - situation.tasks[name].held + event.lost.get(name, 0)) for name, size in given.items())


def check(situation: Situation, event: Event, row: lookup.Row | None, *, exact: bool) -> None:
    ranked = [(reward(situation, event, one), one) for one in every_assignment(situation, event)]
    if not ranked:
        assert row is None
        return
    values = sorted((value for value, _ in ranked), reverse=True)
    scale = 1e-7 * max(1.0, *map(abs, values))
    assert row.workers == event.workers
    assert row.sizes in [one for _, one in ranked]
    assert row.reward == pytest.approx(values[0], rel=0, abs=scale)
    assert row.reward == pytest.approx(reward(situation, event, row.sizes), rel=0, abs=scale)
    if len(values) == 1:
        assert row.runner_up_reward is None
    else:
        assert row.runner_up_reward == pytest.approx(values[1], rel=0, abs=scale)
    if exact:
        best = [one for value, one in ranked if value > values[0] - 1e-6]
        fewest = min(moved(situation, event, one) for one in best)
        assert moved(situation, event, row.sizes) == fewest
        fewest_moved = [one for one in best if moved(situation, event, one) == fewest]
        assert sum(x * x for x in row.sizes.values()) == min(sum(x * x for x in one.values()) for one in fewest_moved)


@pytest.mark.parametrize("ties", [False, True])
def test_every_row_of_the_table_is_optimal_and_ties_move_the_fewest_workers(ties):
    rng = random.Random(5 + ties)
    rows = 0
    for _ in range(400):
        workers = rng.choice([0, 1, 3, 4, 5, 6, 8])
        situation = random_situation(rng, workers, ties=ties)
        events = next_events(rng, situation, workers)
        table = lookup.table(situation, events)
        for event in events:
            check(situation, event, table.get(event.name), exact=ties)
        rows += len(table)
    assert rows > 2000


@pytest.mark.parametrize("ties", [False, True])
def test_a_computed_answer_is_as_good_as_one_from_the_table(ties):
    rng = random.Random(7 + ties)
    for _ in range(200):
        workers = rng.randint(2, 8)
        situation = random_situation(rng, workers, ties=ties)
        for event in next_events(rng, situation, workers):
            if not event.launched:
                check(situation, event, lookup.answer(situation, event), exact=ties)


def test_what_cannot_be_launched_is_not_in_the_table():
    situation = Situation({"big": standing([8], [1.0], 0)}, failure_rate=1e-6, transition_s=5.0)
    assert lookup.table(situation, [Event("task_launched:big", 6, launched="big")]) == {}


def test_a_task_that_earns_next_to_nothing_still_gets_what_nobody_needs():
    rich = standing([1, 2], [1e15, 2e15], 2)
    poor = standing([1, 2, 3, 4], [1.0, 2.0, 3.0, 4.0], 0)
    situation = Situation({"rich": rich, "poor": poor}, failure_rate=1e-8, transition_s=5.0)
    assert lookup.answer(situation, Event("", 3)).sizes == {"rich": 2, "poor": 1}


def test_where_failures_are_frequent_fewer_tasks_are_disturbed():
    calm = Situation({"a": standing([2, 3], [2.0, 2.2], 2)}, failure_rate=1e-6, transition_s=5.0)
    stormy = Situation({"a": standing([2, 3], [2.0, 2.2], 2)}, failure_rate=0.01, transition_s=5.0)
    assert lookup.answer(calm, Event("", 3)).sizes == {"a": 3}
    assert lookup.answer(stormy, Event("", 3)).sizes == {"a": 2}


def test_equal_tasks_share_alike_and_the_first_gets_the_odd_worker():
    tasks = {name: standing([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], 0) for name in "ab"}
    situation = Situation(tasks, failure_rate=1e-6, transition_s=5.0)
    assert lookup.answer(situation, Event("", 6)).sizes == {"a": 3, "b": 3}
    assert lookup.answer(situation, Event("", 5)).sizes == {"a": 3, "b": 2}


numbers = st.floats(min_value=1e-3, max_value=1e3)


@st.composite
def choices(draw):
    sizes = np.array([0, *sorted(draw(st.sets(st.integers(1, 20), min_size=1, max_size=8)))], np.int64)
    earned = np.array([0.0, *(draw(numbers) for _ in sizes[1:])])
    living = draw(st.sampled_from(sizes.tolist()))
    return program.Choices(sizes, earned, program.scores(sizes, earned, living, 1e3 / program.RESOLUTION, 30))


@settings(max_examples=300, deadline=None)
@given(st.lists(choices(), min_size=0, max_size=6), st.integers(0, 30))
def test_no_plan_breaks_a_rule_and_no_single_move_gains(tasks, workers):
    solution = program.solve(tasks, workers)
    assert sum(solution.sizes) <= workers
    assert all(size in one.sizes for size, one in zip(solution.sizes, tasks, strict=True))
    scores = [int(one.scores[one.sizes == size][0]) for size, one in zip(solution.sizes, tasks, strict=True)]
    assert solution.score == sum(scores)
    others = []
    for index, one in enumerate(tasks):
        room = workers - sum(solution.sizes) + solution.sizes[index]
        for size, score in zip(one.sizes.tolist(), one.scores.tolist(), strict=True):
            if size <= room and size != solution.sizes[index]:
                others.append(solution.score - scores[index] + score)
    assert max(others, default=solution.score) <= solution.score
    assert solution.runner_up is None or max(others, default=solution.runner_up) <= solution.runner_up


@settings(max_examples=200, deadline=None)
@given(st.lists(choices(), min_size=1, max_size=6), st.integers(0, 30), st.data())
def test_replacing_tasks_between_the_passes_equals_a_program_of_its_own(tasks, workers, data):
    places = data.draw(st.sets(st.integers(0, len(tasks) - 1), max_size=3))
    replaced = {place: data.draw(st.one_of(choices(), st.just(program.ENDED))) for place in places}
    afresh = program.solve([replaced.get(index, one) for index, one in enumerate(tasks)], workers)
    joined = program.solve_instead(program.sweep(tasks, workers), replaced)
    assert (joined.score, joined.runner_up) == (afresh.score, afresh.runner_up)
    assert joined.reward == pytest.approx(afresh.reward, rel=1e-6)
