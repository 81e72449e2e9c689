"""How long the planner's lookup table takes, beside a plain dynamic program and an integer program for one case of it.

    python -m benchmarks.planner --tasks 64 --workers 2048 --sizes 48

On one core. The instance: tasks of random weight, whose throughput grows less than their workers do, with dips;
the cluster holds the optimal plan, and the table answers for each next event: a worker or a node of a task fails, two
nodes are lost at once, a node joins, a task finishes, a waiting one is launched.
"""

import itertools
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp
from unicron_planner import lookup
from unicron_planner.lookup import Event, Situation, TaskStanding, effect

from benchmarks.harness.command import Figures, Options, Result, main, option
from benchmarks.harness.processes import timed
from unicron.contracts.plans import Trigger, TriggerKind

NODE = 8  # gPUs of a node
FAILURE_RATE = 3 / (128 * 7 * 86400)  # a second and GPU: three a week among 128
PATIENCE_S = 60.0

NONE = Trigger(TriggerKind.WHAT_IF)


def instance(tasks: int, workers: int, unit: int, sizes: int, seed: int) -> Situation:
    """Return a cluster that holds its optimal plan; `sizes` feasible sizes a task, 0 for every one."""
    random, count = np.random.default_rng(seed), workers // unit
    standings = {}
    for number in range(tasks):
        some = random.choice(np.arange(1, count + 1), sizes, replace=False) if sizes else np.arange(1, count + 1)
        feasible = np.concatenate([[0], np.sort(some)]) * unit
        dips = random.uniform(0.93, 1.0, len(feasible))
        waf = random.uniform(0.5, 2.0) * 1e14 * feasible ** random.uniform(0.7, 0.98) * dips
        standings[f"task-{number}"] = TaskStanding(feasible.astype(np.int64), waf, 0, 0.0)
    empty = Situation(standings, FAILURE_RATE, 15.0, 30.0)
    best = lookup.answer(empty, Event(NONE, workers)).sizes
    held = {
        name: TaskStanding(task.sizes, task.waf, best[name], float(task.waf[task.sizes == best[name]][0]))
        for name, task in standings.items()
    }
    return Situation(held, FAILURE_RATE, 15.0, 30.0)


def next_events(given: Situation, workers: int) -> list[Event]:
    """Return all next events; neighbours in the order of the tasks share a node."""
    events = [Event(Trigger(TriggerKind.NODE_JOINED), workers + NODE)]
    running = [name for name, task in given.tasks.items() if task.held]
    for name in running:
        held = given.tasks[name].held
        events += [
            Event(Trigger.of(TriggerKind.WORKER_FAILED, [name]), workers, {name: 1}),
            Event(Trigger.of(TriggerKind.NODE_LOST, [name]), workers - NODE, {name: min(held, NODE)}),
            Event(Trigger.of(TriggerKind.TWO_NODES_LOST, [name]), workers - 2 * NODE, {name: min(held, 2 * NODE)}),
            Event(Trigger.of(TriggerKind.TASK_FINISHED, [name]), workers, ended=name),
        ]
    for pair in itertools.pairwise(running):
        shared = Trigger.of(TriggerKind.NODE_LOST, list(pair))
        events.append(Event(shared, workers - NODE, dict.fromkeys(pair, NODE // 2)))
    waiting = [name for name in given.tasks if name not in running]
    return events + [Event(Trigger.of(TriggerKind.TASK_LAUNCHED, [name]), workers, launched=name) for name in waiting]


def naive(given: Situation, event: Event) -> float:
    """Equation 5 in plain Python; return the value of the optimum."""
    running_s = given.running_s(event.workers)
    best = [0.0] * (event.workers + 1)
    for name, task in given.tasks.items():
        gains = []
        for size, waf in zip(task.sizes.tolist(), task.waf.tolist(), strict=True):
            disturbed = given.failure_s if name in event.lost else given.resize_s * (size != task.held)
            gains.append((size, waf * running_s - task.held_waf * disturbed))
        best = [
            max(best[free - size] + gain for size, gain in gains if size <= free) for free in range(event.workers + 1)
        ]
    return best[event.workers]


def ilp(given: Situation, event: Event) -> float:
    """Return the optimum that HiGHS finds: a binary variable for each size of each task."""
    running_s, gains, sizes = given.running_s(event.workers), [], []
    for name, task in given.tasks.items():
        moved = np.where(task.sizes == task.held, 0.0, given.resize_s)
        gains.append(task.waf * running_s - task.held_waf * (given.failure_s if name in event.lost else moved))
        sizes.append(task.sizes)
    gain, size = np.concatenate(gains), np.concatenate(sizes)
    owner = np.repeat(np.arange(len(sizes)), [len(each) for each in sizes])
    one_each = sparse.csr_array((np.ones(len(owner)), (owner, np.arange(len(owner)))))
    scale = float(np.abs(gain).max())
    within_all = LinearConstraint(sparse.csr_array(size[None, :].astype(float)), 0, event.workers)
    limits = {"bounds": Bounds(0, 1), "constraints": [LinearConstraint(one_each, 1, 1), within_all]}
    found = milp(-gain / scale, integrality=np.ones(len(gain)), options={"mip_rel_gap": 0.0}, **limits)
    return float(-found.fun * scale)


def within(solver: Callable[[Situation, Event], float], given: Situation, event: Event) -> tuple[float, float] | None:
    """Return a solver's optimum and its seconds, None where it takes longer than `PATIENCE_S`."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def solve() -> None:
        began = time.perf_counter()
        value = solver(given, event)
        theirs.send((value, time.perf_counter() - began))

    process = context.Process(target=solve)
    process.start()
    found = ours.recv() if ours.poll(PATIENCE_S) else None
    process.kill()
    process.join()
    return found


def one_more(given: Situation) -> Situation:
    """Return the same cluster with one task, in the middle, measured to be 1 % faster."""
    name = list(given.tasks)[len(given.tasks) // 2]
    task = given.tasks[name]
    faster = TaskStanding(task.sizes, task.waf * 1.01, task.held, task.held_waf * 1.01)
    return Situation({**given.tasks, name: faster}, given.failure_rate, given.resize_s, given.failure_s)


def measure(options: Options, _: Path) -> Result:
    """Time the table, on one core, and the other solvers for one case of it."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    lookup.warm_up()
    given = instance(options.tasks, options.workers, options.unit, options.sizes, options.seed)
    events = next_events(given, options.workers)
    table, kept = lookup.table(given, events), lookup.Sweeps()
    turns = itertools.cycle([given, one_more(given)])
    keys = [effect(event) for event in events]
    case = next(event for event in events if event.trigger.kind is TriggerKind.NODE_LOST)

    def ms(call: Callable[[], object], runs: int = options.repeats) -> float:
        return round(1e3 * statistics.median(timed(call, runs)), 3)

    figures: Figures = {
        "refresh_ms": ms(lambda: lookup.table(given, events)),
        "refresh_one_task_ms": ms(lambda: lookup.table(next(turns), events, kept)),
        "lookup_us": round(1e3 * ms(lambda: [table[key] for key in keys], 100) / len(keys), 3),
        "answer_ms": ms(lambda: lookup.answer(given, case)),
        "rows": len(table),
        "events": len(events),
    }
    solvers = {} if options.no_others else {"naive": naive, "ilp": ilp}
    for name, solver in solvers.items():
        found = within(solver, given, case)
        figures[f"{name}_ms"] = found and round(found[1] * 1e3, 1)
        figures[f"{name}_agrees"] = found and math.isclose(found[0], table[effect(case)].reward, rel_tol=1e-6)
    asked = {name: getattr(options, name) for name in ("tasks", "workers", "unit", "sizes", "seed")}
    return Result(figures, {name: {"one_case_ms": figures[f"{name}_ms"]} for name in solvers}, asked)


if __name__ == "__main__":
    main(
        measure,
        option("--tasks", default=6),
        option("--workers", default=128),
        option("--unit", default=1, help="workers come in multiples of it"),
        option("--sizes", default=0, help="feasible sizes of each task; 0: every multiple"),
        option("--seed", default=0),
        option("--repeats", default=9),
        option("--no-others", action="store_true", help="leave the other solvers out"),
    )
