"""Compares two runs of a job, or two jobs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from unicron_straggler.analysis.diagnosis import NONE, Diagnosis
from unicron_straggler.analysis.measures import Analysis

if TYPE_CHECKING:
    from rich.console import Group

MATTERS = 0.01
"""Slowdowns that differ by less are called unchanged."""
MOST_WORKERS = 5
"""Workers of each run that are compared: the slowest."""


@dataclass(frozen=True)
class Change:
    """One measure of both runs; None where a run has none."""

    before: float | None
    after: float | None

    @property
    def difference(self) -> float:
        """After less before; 0 where one of them is missing."""
        return 0.0 if self.before is None or self.after is None else self.after - self.before


@dataclass(frozen=True)
class Comparison:
    """Two runs against each other.

    Attributes:
        names: of the jobs.
        measures: by name; seconds where it ends in _s.
        by_op: S_t by kind of operation.
        workers: slowdown of the slowest workers of either run, by "dp_rank,stage".
        causes: share of the waste by cause.
        sentences: what changed, for people; the most important first.
    """

    names: tuple[str, str]
    measures: Mapping[str, Change]
    by_op: Mapping[str, Change]
    workers: Mapping[str, Change]
    causes: Mapping[str, Change]
    sentences: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)


Run = tuple[Analysis, Sequence[Diagnosis]]


def compare(before: Run, after: Run) -> Comparison:
    """Hold two runs against each other; they may differ in size, workers being matched by their coordinates."""
    (old, old_causes), (new, new_causes) = before, after
    shares = [{each.cause: each.share for each in causes if each.cause != NONE} for causes in (old_causes, new_causes)]
    causes = {cause: Change(shares[0].get(cause), shares[1].get(cause)) for cause in {**shares[0], **shares[1]}}
    workers = _workers(old, new)
    return Comparison(
        names=(old.meta.name, new.meta.name),
        measures=_measures(old, new),
        by_op={op: Change(old.by_op.get(op), new.by_op.get(op)) for op in {**old.by_op, **new.by_op}},
        workers=workers,
        causes=causes,
        sentences=tuple(_sentences(old, new, causes, workers)),
    )


def view(found: Comparison) -> "Group":
    """Return the comparison as tables for a terminal."""
    from rich.console import Group  # noqa: PLC0415 - an extra
    from rich.table import Table  # noqa: PLC0415

    tables = []
    for title, changes in (
        ("Measures", found.measures),
        ("Slowdown by operation (S_t)", found.by_op),
        ("Slowest workers (dp rank, stage)", found.workers),
        ("Share of the waste by cause", found.causes),
    ):
        table = Table("", *found.names, "change", title=title, title_justify="left")
        for name, change in changes.items():
            if changes is not found.by_op or abs(change.difference) >= MATTERS:
                table.add_row(name, _number(change.before), _number(change.after), _percent(change))
        if table.row_count:
            tables.append(table)
    return Group(*(f"- {sentence}" for sentence in found.sentences), *tables)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _percent(change: Change) -> str:
    if not change.before or not change.after or change.before < 0 or change.after < 0:
        return "-"
    return f"{100 * (change.after / change.before - 1):+.1f} %"


def _measures(old: Analysis, new: Analysis) -> dict[str, Change]:
    first, second = (
        {
            "slowdown": run.slowdown,
            "waste": run.waste,
            "traced_s": run.traced_mean_s,
            "simulated_s": run.simulated_mean_s,
            "ideal_s": run.ideal_mean_s,
            "slowest_step": float(run.step_slowdown.max()),
            "m_w": run.m_w,
            "m_s": run.m_s,
            "forward_backward_correlation": run.correlation_normalised,
            "forward_variation": run.forward_variation,
            "launch_slowdown": run.launch_slowdown,
        }
        for run in (old, new)
    )
    return {name: Change(_known(value), _known(second[name])) for name, value in first.items()}


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _slowdowns(run: Analysis) -> dict[str, float]:
    return {
        f"{rank},{stage}": float(value)
        for rank, row in zip(run.dp_ranks, run.worker_exact, strict=True)
        for stage, value in enumerate(row)
    }


def _workers(old: Analysis, new: Analysis) -> dict[str, Change]:
    both = _slowdowns(old), _slowdowns(new)
    chosen: dict[str, None] = {}
    for slowdowns in both:
        chosen |= dict.fromkeys(sorted(slowdowns, key=lambda name: -slowdowns[name])[:MOST_WORKERS])
    return {name: Change(both[0].get(name), both[1].get(name)) for name in chosen}


def _sentences(old: Analysis, new: Analysis, causes: Mapping[str, Change], workers: Mapping[str, Change]) -> list[str]:
    said = []
    if abs(new.slowdown - old.slowdown) < MATTERS:
        said.append(f"The slowdown is as before: {old.slowdown:.3f} and {new.slowdown:.3f}.")
    else:
        verb = "fell" if new.slowdown < old.slowdown else "rose"
        said.append(
            f"The slowdown {verb} from {old.slowdown:.3f} to {new.slowdown:.3f}; waste was {100 * old.waste:.1f} % and "
            f"is {100 * new.waste:.1f} %."
        )
    for cause, change in causes.items():
        if change.before is None:
            said.append(f"New: {cause} ({100 * (change.after or 0):.0f} % of the waste).")
        elif change.after is None:
            said.append(f"Gone: {cause} (it was {100 * change.before:.0f} % of the waste).")
    for name, change in workers.items():
        most = max(change.before or 1, change.after or 1) - 1
        if abs(change.difference) >= max(MATTERS, 0.1 * most):
            verb = "faster" if change.difference < 0 else "slower"
            said.append(f"Worker {name} is {verb}: {change.before:.3f} before, {change.after:.3f} after.")
    for run, which in ((old, "first"), (new, "second")):
        if not run.trustworthy:
            said.append(f"The {which} run is not to be trusted: simulation and trace differ, or the trace has holes.")
    return said
