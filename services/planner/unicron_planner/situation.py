"""The input of the program: how each task stands, and its estimates. Pure functions on `state`."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from unicron.contracts.answers import Curve, CurvePoint
from unicron_planner import estimates, nodes, plans, throughput
from unicron_planner.estimates import FAILURE, RELAYOUT, RESIZE, PlannerOptions
from unicron_planner.holdings import PlannedSlots
from unicron_planner.lookup import Situation, TaskStanding
from unicron_planner.program import Floats
from unicron_planner.state import PlannerState
from unicron_planner.throughput import Estimate, MeasuredSize

FLAT = 0.01
"""The least that a worker is guessed to bring, as a part of the most: what is free is used, however flat curves are."""


class Guess(NamedTuple):
    """The FLOP/s that a worker may bring to a task about which nothing is known.

    Running work is neither taken for such a task, which is planned with the least, nor from it, which may lose the
    most, unless its weight says so.
    """

    least: float
    most: float


def situate(state: PlannerState, held: PlannedSlots, options: PlannerOptions) -> Situation:
    """Return the cluster as it is."""
    reach = _reach(state)
    guess = _guess(state, reach)
    return Situation(
        tasks={
            task: _standing(state, task, len(held.slots_of(task)), guess, reach, options.estimate_error)
            for task in state.tasks
        },
        failure_rate=estimates.failure_rate(state, options),
        resize_s=estimates.transition_s(state, options, RESIZE),
        failure_s=estimates.transition_s(state, options, FAILURE),
        relayout_s=estimates.transition_s(state, options, RELAYOUT),
    )


def curve(state: PlannerState, task: str, held: int) -> Curve:
    """Return what is believed of a task that has `held` workers."""
    reach = _reach(state)
    known, measured = _estimate(state, task, _guess(state, reach).least, reach), state.measured.get(task, {})
    points = [
        CurvePoint(
            workers=size,
            flops=flops,
            waf=state.tasks[task].weight * flops,
            source=source,
            spread=measured[size].spread if source == throughput.MEASURED else 0.0,
            text="" if known.curve is None else str(known.curve.configuration(at)),
        )
        for at, (size, flops, source) in enumerate(
            zip(known.sizes.tolist(), known.flops.tolist(), known.sources, strict=True)
        )
    ]
    return Curve(task=task, held=held, points=points)


def guessed(state: PlannerState) -> dict[str, float]:
    """Return what a worker is taken to bring to each task about which nothing is known."""
    least = _guess(state, _reach(state)).least
    return {task: least for task in state.tasks if not _is_known(state, task)}


def _standing(state: PlannerState, task: str, held: int, guess: Guess, reach: int, error: float) -> TaskStanding:
    spec, measured = state.tasks[task], state.measured.get(task, {})
    known = _estimate(state, task, guess.least, max(held, reach))
    waf = np.concatenate([[0.0], spec.weight * known.flops])
    sizes = np.concatenate([[0], known.sizes])
    at = int(np.searchsorted(sizes, held))
    held_waf = float(waf[at]) if at < len(sizes) and sizes[at] == held else 0.0
    tensor, relaid, declared = None, None, spec.layout.replica_workers > 1 or bool(spec.layouts)
    if known.curve is not None and not declared:  # so the model's choice holds
        tensor = np.concatenate([[1], known.curve.choices[:, 0]])
    if spec.layouts:
        relaid = np.array([plans.changes_layout(spec, held, size) for size in sizes.tolist()])
    level = 0.0 if _is_known(state, task) else guess.most / guess.least - 1
    doubt = _doubt(waf, np.array([0.0, *_errors(known, measured, error)]), error, level)
    return TaskStanding(sizes, waf, held, held_waf, tensor, relaid, doubt)


def _errors(known: Estimate, measured: Mapping[int, MeasuredSize], error: float) -> list[float]:
    """Return by how much T(t, x) may be off at each size, as a part of it: the spread where it was measured."""
    return [
        measured[size].spread if source == throughput.MEASURED else error
        for size, source in zip(known.sizes.tolist(), known.sources, strict=True)
    ]


def _doubt(waf: Floats, errors: Floats, error: float, level: float) -> Floats | None:
    """Return what a plan must gain beyond its cost before it takes a task's workers, for each of the task's sizes.

    The task's loss from one size to the next may be off by the larger of their `errors`, and the others' gain, which is
    about as much, by `error`; the two are independent. A curve is off as a whole, so a small loss is off by little.
    Where the height of the curve is a guess, the loss may be larger by `level`, as a part of it.
    """
    if not error:
        return None
    lost = np.diff(np.maximum.accumulate(waf))
    parts = np.maximum(np.hypot(np.maximum(errors[1:], errors[:-1]), error), level)
    doubt: Floats = np.concatenate([[0.0], np.cumsum(lost * parts)])
    return doubt


def _reach(state: PlannerState) -> int:
    """Return the slots of all nodes that were ever here, and of one more."""
    return sum(len(node.slots) for node in state.nodes.values()) + nodes.usual_slots(state)


def _estimate(state: PlannerState, task: str, nominal: float, limit: int) -> Estimate:
    """Return T(t, x) for all feasible x up to `limit`."""
    return throughput.estimate(state.tasks[task], state.measured.get(task, {}), limit, nominal)


def _is_known(state: PlannerState, task: str) -> bool:
    return throughput.has_known_flops(state.tasks[task], state.measured.get(task, {}))


def _guess(state: PlannerState, reach: int) -> Guess:
    """Return what to assume of a worker where nothing is known: what a further one brings to the known tasks."""
    steps: list[float] = []
    for task in state.tasks:
        if _is_known(state, task):
            known = _estimate(state, task, 1.0, reach)
            gains = np.diff(np.maximum.accumulate(known.flops), prepend=0.0) / np.diff(known.sizes, prepend=0)
            steps += gains.tolist()
    most = max(steps, default=1.0)
    return Guess(max(min(steps, default=1.0), most * FLAT), most)
