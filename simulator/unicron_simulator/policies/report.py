"""The reports of `unicron simulate`: policies beside one another on a trace, or a user's own cluster beside ours."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from unicron.contracts.tasks import TaskSpec
from unicron_simulator.policies import comparison, files, parameters, plots
from unicron_simulator.policies.economy import Result
from unicron_simulator.policies.parameters import Costs
from unicron_simulator.policies.traces import DAY, FailureTrace

OURS = "as-it-was"
"""The policy of a user's own cluster."""


def compared(
    given: str,
    policies: Sequence[str],
    tasks: str,
    *,
    seed: int,
    nodes: int,
    gpus: int,
    days: float,
    costs: Path | None,
) -> dict[str, Any]:
    """Return the report on a trace by name or file.

    Raises:
        InvalidInputError: something given can't be used.
    """
    trace = files.load_trace(given, seed, nodes, days)
    return _report(trace, files.load_tasks(tasks), policies, gpus, parameters.load(costs)[0]) | {"seed": seed}


def my_cluster(path: Path, costs: Path | None) -> dict[str, Any]:
    """Return the report on a user's cluster: what it earned with restarts by hand, and what it would have earned.

    Raises:
        InvalidInputError: something given can't be used.
    """
    mine, known = files.load_cluster(path), parameters.load(costs)[0]
    own = known["megatron"]
    if mine.detect_s is not None:
        own = replace(own, detect=dict.fromkeys(own.detect, mine.detect_s))
    if mine.restart_s is not None:
        own = replace(own, recover=dict.fromkeys(own.recover, mine.restart_s))
    found = _report(
        mine.trace, mine.tasks, (OURS, comparison.UNICRON, comparison.ORACLE), mine.gpus, known | {OURS: own}
    )
    rows = found["policies"]
    gpu_hours = len(mine.trace.nodes) * mine.gpus * mine.trace.duration_s / 3600
    saved = (rows[comparison.UNICRON]["earned"] - rows[OURS]["earned"]) / rows[OURS]["ideal"]
    return found | {"gpu_hours": gpu_hours, "saved_gpu_hours": saved * gpu_hours}


def _report(
    trace: FailureTrace, tasks: Sequence[TaskSpec], policies: Sequence[str], gpus: int, costs: dict[str, Costs]
) -> dict[str, Any]:
    """Return what came out, as plain data; `results` holds it as it is, for pictures."""
    found = comparison.compare(trace, tasks, policies, gpus=gpus, costs=costs)
    head = {"name": trace.name, "days": trace.duration_s / DAY, "nodes": len(trace.nodes), "gpus_per_node": gpus}
    return {
        "trace": head | {kind: trace.count(kind) for kind in ("sev1", "sev2", "sev3")},
        "tasks": [task.name for task in tasks],
        "policies": {policy: _row(result, costs.get(policy)) for policy, result in found.items()},
        "results": found,
    }


def _row(result: Result, costs: Costs | None) -> dict[str, Any]:
    sums = plots.accumulated(result)
    return {
        "basis": costs.basis if costs else "upper bound",
        "earned": result.earned,
        "ideal": result.ideal,
        "detection": result.detection,
        "transition": result.transition,
        "sub_healthy": result.sub_healthy,
        "columns": ["at_s", "waf", "gpus", "accumulated"],
        "samples": [[*sample, total] for sample, total in zip(result.samples, sums, strict=True)],
    }
