"""The input of the program: how each task stands, and its estimates. Pure functions on `state`."""

from collections.abc import Mapping

import numpy as np

from unicron.contracts.answers import Curve, CurvePoint
from unicron_planner import estimates, nodes, plans, throughput
from unicron_planner.estimates import FAILURE, RELAYOUT, RESIZE, PlannerOptions
from unicron_planner.holdings import PlannedSlots
from unicron_planner.lookup import Situation, TaskStanding
from unicron_planner.program import Floats
from unicron_planner.state import PlannerState
from unicron_planner.throughput import Estimate, MeasuredSize


def situate(state: PlannerState, held: PlannedSlots, options: PlannerOptions) -> Situation:
    """Return the cluster as it is."""
    reach = _reach(state)
    nominal = _nominal(state, reach)
    return Situation(
        tasks={
            task: _standing(state, task, len(held.slots_of(task)), nominal, reach, options.estimate_error)
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
    known, measured = _estimate(state, task, _nominal(state, reach), reach), state.measured.get(task, {})
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


def _standing(state: PlannerState, task: str, held: int, nominal: float, reach: int, error: float) -> TaskStanding:
    spec, known = state.tasks[task], _estimate(state, task, nominal, max(held, reach))
    waf = np.concatenate([[0.0], spec.weight * known.flops])
    sizes = np.concatenate([[0], known.sizes])
    at = int(np.searchsorted(sizes, held))
    held_waf = float(waf[at]) if at < len(sizes) and sizes[at] == held else 0.0
    tensor, relaid, declared = None, None, spec.layout.replica_workers > 1 or bool(spec.layouts)
    if known.curve is not None and not declared:  # so the model's choice holds
        tensor = np.concatenate([[1], known.curve.choices[:, 0]])
    if spec.layouts:
        relaid = np.array([plans.changes_layout(spec, held, size) for size in sizes.tolist()])
    doubt = _doubt(waf, np.array([0.0, *_errors(known, state.measured.get(task, {}), error)]), error)
    return TaskStanding(sizes, waf, held, held_waf, tensor, relaid, doubt)


def _errors(known: Estimate, measured: Mapping[int, MeasuredSize], error: float) -> list[float]:
    """Return by how much T(t, x) may be off at each size, as a part of it: the spread where it was measured."""
    return [
        measured[size].spread if source == throughput.MEASURED else error
        for size, source in zip(known.sizes.tolist(), known.sources, strict=True)
    ]


def _doubt(waf: Floats, errors: Floats, error: float) -> Floats | None:
    """Return what a plan must gain beyond its cost before it takes a task's workers, for each of the task's sizes.

    The task's loss from one size to the next may be off by the larger of their `errors`, and the others' gain, which is
    about as much, by `error`; the two are independent. A curve is off as a whole, so a small loss is off by little.
    """
    if not error:
        return None
    lost = np.diff(np.maximum.accumulate(waf))
    doubt: Floats = np.concatenate([[0.0], np.cumsum(lost * np.hypot(np.maximum(errors[1:], errors[:-1]), error))])
    return doubt


def _reach(state: PlannerState) -> int:
    """Return the slots of all nodes that were ever here, and of one more."""
    return sum(len(node.slots) for node in state.nodes.values()) + nodes.usual_slots(state)


def _estimate(state: PlannerState, task: str, nominal: float, limit: int) -> Estimate:
    """Return T(t, x) for all feasible x up to `limit`."""
    return throughput.estimate(state.tasks[task], state.measured.get(task, {}), limit, nominal)


def _nominal(state: PlannerState, reach: int) -> float:
    """Return the FLOP/s per worker to assume where nothing is known: the median of what the known tasks achieve."""
    found = []
    for task, spec in state.tasks.items():
        if throughput.has_known_flops(spec, state.measured.get(task, {})):
            first = _estimate(state, task, 1.0, reach)
            found += [first.flops[0] / first.sizes[0]] if len(first.sizes) else []
    return float(np.median(found)) if found else 1.0
