"""The dynamic program and its table against brute force, an integer program and invariants; the lines of the table."""

import itertools
import os
import random
import shutil
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp
from unicron_planner import kernels, lookup, nodes
from unicron_planner.holdings import PlannedSlots
from unicron_planner.lookup import Event, Situation, TaskStanding, effect
from unicron_planner.state import AdmittedNode, PlannerState
from unicron_planner.weighing import Decision

from unicron.contracts.plans import Trigger, TriggerKind
from unicron.contracts.tasks import SlotRef, TaskSpec

NONE = Trigger(TriggerKind.WHAT_IF)


def standing(sizes, waf, held, relaid=None, doubt=0.0):
    """Return a task that earns `waf` at its sizes; at those in `relaid` it has another shape than where it is.

    All that it loses is in doubt by a part of `doubt`.
    """
    sizes = np.array([0, *sizes], np.int64)
    waf = np.array([0.0, *waf], np.float64)
    relaid = None if relaid is None else np.isin(sizes, relaid)
    doubts = doubt * np.maximum.accumulate(waf) if doubt else None
    return TaskStanding(sizes, waf, held, float(waf[sizes == held][0]), relaid=relaid, doubt=doubts)


def situation(tasks, failure_rate=1e-6, resize_s=5.0, failure_s=5.0, relayout_s=0.0):
    return Situation(tasks, failure_rate, resize_s, failure_s, relayout_s)


def random_situation(rng: random.Random, workers: int, *, ties=False, shapes=False, most=4, largest=8, count=4):
    """Return up to `most` tasks that hold at most `workers`.

    With `ties`, rewards are small whole numbers; with `shapes`, two tasks in three have several shapes.
    """
    tasks, free, unit = {}, workers, rng.choice([1, 1, 2])
    for index in range(rng.randint(1, most)):
        sizes = [size * unit for size in sorted(rng.sample(range(1, largest), rng.randint(1, count)))]
        if ties:
            waf = [float(rng.randint(1, 3) if rng.random() < 0.5 else size) for size in sizes]
        else:
            waf = [rng.uniform(0.5, 2.0) * size**0.8 for size in sizes]
        held = rng.choice([size for size in [0, *sizes] if size <= free])
        free -= held
        relaid = [] if shapes else None
        if shapes and held and rng.random() < 0.67:
            relaid = [size for size in sizes if size != held and rng.random() < 0.5]
        tasks[f"t{index}"] = standing(sizes, waf, held, relaid, 0.0 if ties else rng.choice([0.0, 0.07, 0.5]))
    if ties:  # so that D_running(n') is a whole number
        return situation(tasks, 1 / 840, rng.choice([0.0, 7.0]), rng.choice([0.0, 7.0]))
    rates = [1e-3, 0.01, 0.05] if shapes else [1e-8, 1e-3, 0.05]
    return situation(tasks, rng.choice(rates), rng.uniform(0, 20), rng.uniform(0, 20), shapes * rng.uniform(0, 60))


def next_events(rng: random.Random, given: Situation, workers: int) -> list[Event]:
    """Return every kind of event; nodes of two slots hold workers of any tasks."""
    events = [Event(Trigger(TriggerKind.NODE_JOINED), workers + 2)]
    for kind, gone in ((TriggerKind.NODE_LOST, 1), (TriggerKind.NODE_LOST, 1), (TriggerKind.TWO_NODES_LOST, 2)):
        lost, room = {}, min(2 * gone, workers)
        for task, one in given.tasks.items():
            taken = rng.randint(0, min(one.held, room))
            room -= taken
            lost |= {task: taken} if taken else {}
        events.append(Event(Trigger(kind), max(0, workers - 2 * gone), lost))
    for task, one in given.tasks.items():
        if one.held:
            events.append(Event(Trigger.of(TriggerKind.WORKER_FAILED, [task]), workers, {task: 1}))
            for kind, count in ((TriggerKind.NODE_LOST, 2), (TriggerKind.TWO_NODES_LOST, 4)):
                lost = {task: min(count, one.held)}
                events.append(Event(Trigger.of(kind, [task]), max(0, workers - count), lost))
            events.append(Event(Trigger.of(TriggerKind.TASK_FINISHED, [task]), workers, ended=task))
        else:
            events.append(Event(Trigger.of(TriggerKind.TASK_LAUNCHED, [task]), workers, launched=task))
    return events


def every_assignment(given: Situation, event: Event) -> tuple[list[str], np.ndarray, np.ndarray, np.ndarray]:
    """Return the tasks, all their assignments, and the reward and the value of each.

    The reward is by equations 3 and 4, word for word; the value is less by what a plan must gain before it takes
    workers that a task has left.
    """
    names = [name for name in given.tasks if name != event.ended]
    ranges = [range(len(given.tasks[name].sizes)) for name in names]
    every = list(itertools.product(*ranges))
    picks = np.array(every, np.int64).reshape(len(every), len(names))
    sizes = np.zeros_like(picks)
    rewards, doubts = np.zeros(len(picks)), np.zeros(len(picks))
    running_s = 1 / (max(event.workers, 1) * given.failure_rate)
    allowed = np.ones(len(picks), bool)
    for column, name in enumerate(names):
        task = given.tasks[name]
        sizes[:, column] = task.sizes[picks[:, column]]
        rewards += task.waf[picks[:, column]] * running_s
        changed = (sizes[:, column] != task.held) * given.resize_s
        cost = given.failure_s if name in event.lost else changed
        if task.relaid is not None:
            cost = np.where(task.relaid[picks[:, column]], given.relayout_s, cost)
        rewards -= task.held_waf * cost
        if task.doubt is not None:
            left = task.doubt[task.sizes <= task.held - event.lost.get(name, 0)].max()
            doubts += np.maximum(0.0, left - task.doubt[picks[:, column]]) * running_s
        if name == event.launched:
            allowed &= sizes[:, column] > 0
    allowed &= sizes.sum(axis=1) <= event.workers
    return names, sizes[allowed], rewards[allowed], (rewards - doubts)[allowed]


def check(given: Situation, event: Event, row: lookup.LookupRow | None, *, exact: bool) -> None:
    names, sizes, rewards, values = every_assignment(given, event)
    if not len(values):
        assert row is None
        return
    scale = 1e-7 * max(1.0, float(np.abs(values).max()))
    assert row.workers == event.workers
    chosen = np.array([row.sizes[name] for name in names])
    assert list(row.sizes) == names
    (at,) = np.flatnonzero((sizes == chosen).all(axis=1))
    assert values[at] == pytest.approx(values.max(), rel=0, abs=scale)
    assert row.reward == pytest.approx(rewards[at], rel=0, abs=scale)
    if exact:
        left = np.array([given.tasks[name].held - event.lost.get(name, 0) for name in names])
        best = sizes[values > values.max() - 1e-6]
        moves = np.abs(best - left).sum(axis=1)
        assert np.abs(chosen - left).sum() == moves.min()
        assert (chosen**2).sum() == (best[moves == moves.min()] ** 2).sum(axis=1).min()


def check_answer(given: Situation, event: Event, *, exact: bool) -> None:
    """Compare what is computed for an event, and the second best, with all assignments."""
    row = lookup.answer(given, event)
    check(given, event, row, exact=exact)
    names, sizes, rewards, values = every_assignment(given, event)
    other = lookup.runner_up(given, event, row)
    if len(values) == 1:
        assert other is None
    else:
        assert other.sizes != row.sizes
        (at,) = np.flatnonzero((sizes == [other.sizes[name] for name in names]).all(axis=1))
        assert values[at] == pytest.approx(np.sort(values)[-2], rel=1e-7, abs=1e-5)
        assert other.reward == pytest.approx(rewards[at], rel=1e-7, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("ties", [False, True])
def test_every_row_of_the_table_is_optimal_and_ties_move_the_fewest_workers(ties):
    rng = random.Random(5 + ties)
    rows = set()
    for _ in range(1000):
        workers = rng.choice([0, 1, 3, 4, 5, 6, 8])
        given = random_situation(rng, workers, ties=ties)
        events = next_events(rng, given, workers)
        table = lookup.table(given, events)
        for event in events:
            check(given, event, table.get(effect(event)), exact=ties)
            rows |= {event.trigger.kind} if effect(event) in table else set()
    assert len(rows) == 6, "every kind of event was answered"


@pytest.mark.slow
@pytest.mark.parametrize("ties", [False, True])
def test_a_computed_answer_is_as_good_as_one_from_the_table_and_its_runner_up_is_the_second_best(ties):
    rng = random.Random(7 + ties)
    for _ in range(200):
        workers = rng.randint(2, 8)
        given = random_situation(rng, workers, ties=ties)
        for event in next_events(rng, given, workers):
            if not event.launched:
                check_answer(given, event, exact=ties)


def by_integer_program(given: Situation, event: Event) -> float:
    """Return the optimal value according to HiGHS: one binary variable for each size of each task."""
    gains, columns, owners = [], [], []
    running_s = 1 / (max(event.workers, 1) * given.failure_rate)
    names = [name for name in given.tasks if name != event.ended]
    for row, name in enumerate(names):
        task = given.tasks[name]
        for size, waf in zip(task.sizes.tolist(), task.waf.tolist(), strict=True):
            if name == event.launched and not size:
                continue
            disturbed = given.failure_s if name in event.lost else given.resize_s * (size != task.held)
            left = task.sizes <= task.held - event.lost.get(name, 0)
            doubt = 0.0 if task.doubt is None else max(0.0, task.doubt[left].max() - task.doubt[task.sizes == size][0])
            gains.append((waf - doubt) * running_s - task.held_waf * disturbed)
            columns.append(size)
            owners.append(row)
    owner = np.equal.outer(np.arange(len(names)), owners).astype(float)
    scale = max(map(abs, gains), default=0.0) or 1.0
    found = milp(
        -np.array(gains) / scale,
        integrality=np.ones(len(gains)),
        bounds=Bounds(0, 1),
        constraints=[LinearConstraint(owner, 1, 1), LinearConstraint(np.array([columns], float), 0, event.workers)],
        options={"mip_rel_gap": 0.0},
    )
    assert found.success
    return -found.fun * scale


def value(given: Situation, event: Event, row: lookup.LookupRow) -> float:
    """Return what a row is worth: its reward, less what a plan must gain that takes what it takes."""
    return row.reward - Decision(given, event, row).doubt(row) * given.running_s(event.workers)


def test_larger_instances_agree_with_an_integer_program():
    rng = random.Random(3)
    kinds = {}
    while sum(kinds.values()) < 50:
        given = random_situation(rng, 64, most=10, largest=24, count=10)
        if len(given.tasks) < 2:
            continue
        events = next_events(rng, given, 64)
        table = lookup.table(given, events)
        event = min(events, key=lambda event: kinds.get(event.trigger.kind, 0))
        kinds[event.trigger.kind] = kinds.get(event.trigger.kind, 0) + 1
        assert value(given, event, table[effect(event)]) == pytest.approx(by_integer_program(given, event), rel=1e-6)
    assert min(kinds.values()) >= 7


def test_what_cannot_be_launched_is_not_in_the_table():
    given = situation({"big": standing([8], [1.0], 0)})
    assert lookup.table(given, [Event(Trigger.of(TriggerKind.TASK_LAUNCHED, ["big"]), 6, launched="big")]) == {}
    with pytest.raises(ValueError, match="big can't run on 6 workers"):
        lookup.answer(given, Event(Trigger.of(TriggerKind.TASK_LAUNCHED, ["big"]), 6, launched="big"))


def test_a_task_that_earns_next_to_nothing_still_gets_what_nobody_needs():
    rich = standing([1, 2], [1e15, 2e15], 2)
    poor = standing([1, 2, 3, 4], [1.0, 2.0, 3.0, 4.0], 0)
    assert lookup.answer(situation({"rich": rich, "poor": poor}, 1e-8), Event(NONE, 3)).sizes == {"rich": 2, "poor": 1}


def test_where_failures_are_frequent_fewer_tasks_are_disturbed_but_for_those_that_are_hit():
    tasks = {"a": standing([2, 3], [2.0, 2.2], 2)}
    assert lookup.answer(situation(tasks, 1e-6), Event(NONE, 3)).sizes == {"a": 3}
    frequent = situation(tasks, 0.01)
    assert lookup.answer(frequent, Event(NONE, 3)).sizes == {"a": 2}
    (row,) = lookup.table(frequent, [Event(NONE, 3, {"a": 1})]).values()
    assert row.sizes == {"a": 3}


def test_equal_tasks_share_alike():
    given = situation({name: standing([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], 0) for name in "ab"})
    assert lookup.answer(given, Event(NONE, 6)).sizes == {"a": 3, "b": 3}
    assert sorted(lookup.answer(given, Event(NONE, 5)).sizes.values()) == [2, 3]


def test_tasks_that_come_in_whole_nodes_are_planned_in_whole_nodes():
    given = situation({name: standing([8, 16, 24], [1.0, 1.9, 2.7], 8) for name in "ab"})
    assert lookup.answer(given, Event(NONE, 39)).sizes == {"a": 16, "b": 16}
    assert lookup._Problem(given).unit == 8


@st.composite
def tasks(draw):
    sizes = sorted(draw(st.sets(st.integers(1, 20), min_size=1, max_size=8)))
    waf = [draw(st.floats(min_value=1e-3, max_value=1e3)) for _ in sizes]
    return standing(sizes, waf, draw(st.sampled_from([0, *sizes])))


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.lists(tasks(), min_size=1, max_size=6), st.integers(0, 30), st.sets(st.integers(0, 5)))
def test_no_plan_breaks_a_rule_and_no_single_move_gains(standings, workers, hit):
    given = situation({f"t{index}": task for index, task in enumerate(standings)}, 1e-3)
    lost = {name: 1 for index, (name, task) in enumerate(given.tasks.items()) if index in hit and task.held}
    event = Event(NONE, workers, lost)
    (row,) = lookup.table(given, [event]).values()
    assert sum(row.sizes.values()) <= workers
    assert all(size in given.tasks[name].sizes for name, size in row.sizes.items())
    running_s = given.running_s(workers)
    for name, task in given.tasks.items():
        room = workers - sum(row.sizes.values()) + row.sizes[name]
        disturbed = np.where((task.sizes != task.held) | (name in lost), 5.0, 0.0)
        earned = task.waf * running_s - task.held_waf * disturbed
        here = earned[task.sizes == row.sizes[name]][0]
        assert earned[task.sizes <= room].max() <= here + 1e-7 * max(1.0, np.abs(earned).max())


def test_a_table_that_is_made_again_is_that_of_a_new_planner_whatever_changed():
    rng = random.Random(1)
    given, kept = random_situation(rng, 8), {}
    for _ in range(300):
        workers = rng.choice([6, 8])
        events = next_events(rng, given, workers)
        assert lookup.table(given, events, kept) == lookup.table(given, events)
        if rng.random() < 0.2:
            given = random_situation(rng, 8)
        else:
            name = rng.choice(list(given.tasks))
            task = given.tasks[name]
            waf = task.waf * rng.choice([1.0, 1.1])
            held_waf = float(waf[task.sizes == task.held][0])
            changed = replace(task, waf=waf, held_waf=held_waf)
            given = situation({**given.tasks, name: changed}, given.failure_rate, given.resize_s, given.failure_s)


# --- what a change of layout costs ------------------------------------------------------------------------------------


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
                check_answer(given, event, exact=False)
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
    tasks = {name: TaskStanding(np.arange(4), np.array([0.0, 1.0, 1.7, 2.2]), 2, 1.7) for name in "ab"}
    events = [Event(NONE, 5), Event(NONE, 3, {"a": 1})]
    cheap, dear = (lookup.table(situation(tasks, 0.01, relayout_s=cost), events) for cost in (0.0, 1e9))
    assert cheap == dear


# --- what may come next, and for how much of it there is a line -------------------------------------------------------


def cluster(holders):
    """Return nodes of two slots, each with workers of the two tasks named."""
    state = PlannerState(nodes={name: AdmittedNode(slots=[0, 1]) for name in holders})
    held = {}
    for name, tasks in holders.items():
        for slot, task in enumerate(tasks):
            held.setdefault(task, []).append(SlotRef(node=name, slot=slot))
    state.tasks = {task: TaskSpec(name=task, command=["x"]) for task in sorted(held)}
    return state, {name: [0, 1] for name in holders}, PlannedSlots(held)


def named(events, kind):
    return [event.trigger.names for event in events if event.trigger.kind is kind]


def test_every_kind_of_node_and_every_pair_has_a_line_where_they_are_few():
    events = nodes.next_events(*cluster({"n1": "aa", "n2": "aa", "n3": "ab"}), 0, 256)
    assert named(events, TriggerKind.NODE_LOST) == ["n1,n2", "n3"]
    assert named(events, TriggerKind.TWO_NODES_LOST) == ["n1,n2", "n1,n2+n3"]
    lost = [dict(event.lost) for event in events if event.trigger.kind is TriggerKind.TWO_NODES_LOST]
    assert lost == [{"a": 4}, {"a": 3, "b": 1}]


def test_of_many_mixed_kinds_the_most_frequent_have_a_line_and_of_pure_ones_all():
    holders = {"n1": "ab", "n2": "bc", "n3": "bc", "n4": "cd", "n5": "ee", "n6": "ff"}
    events = nodes.next_events(*cluster(holders), 0, 1)
    assert named(events, TriggerKind.NODE_LOST) == ["n2,n3", "n5", "n6"]


def test_spare_nodes_take_the_places_of_lost_ones():
    state, there, held = cluster({"n1": "aa", "n2": "aa"})
    state.nodes["spare"] = AdmittedNode(slots=[0, 1])
    by_name = {str(event.trigger): event.workers for event in nodes.next_events(state, there, held, 1, 256)}
    assert (by_name["node_lost:n1,n2"], by_name["two_nodes_lost:n1,n2"]) == (4, 2)


STARTS = """
from unicron_planner import kernels, main
main.warm_up = lambda: print(kernels.price._cache.cache_path)
main.warm_wiring(main.PlannerSettings())
"""


def test_machine_code_is_kept_where_neither_the_package_nor_the_home_can_be_written(tmp_path):
    """Else each start would compile for many seconds."""
    shutil.copytree(Path(kernels.__file__).parent, tmp_path / "unicron_planner", ignore=lambda *_: ["__pycache__"])
    (tmp_path / "unicron_planner" / "__pycache__").write_text("no folder can be made here, not even by root")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": path, "HOME": "/dev/null", "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", STARTS], env=env, capture_output=True, text=True, check=True)
    [folder] = tmp_path.glob("unicron-*")
    assert folder in Path(done.stdout.strip()).parents
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
