"""Translates workers' messages into facts."""

from typing import Any

import msgspec

from unicron.contracts.base import Message
from unicron.contracts.events import (
    CollectiveFailed,
    GradientNotFinite,
    IterationFinished,
    Regrouped,
    ScriptDrilled,
    StateDiverged,
    StateKept,
    StateUnprotected,
    StateUnusable,
    StepTimed,
    WorkerFinished,
    WorkerRaised,
    WorkerReady,
)
from unicron.contracts.worker import (
    Broken,
    Diverged,
    Drilled,
    Finished,
    Iterated,
    Joined,
    Kept,
    NotFinite,
    Raised,
    Ready,
    Timed,
    ToAgent,
    Unprotected,
    Unusable,
)
from unicron_agent.effects import Effect
from unicron_agent.workers.workers import LocalWorker

REPORTS: dict[type[ToAgent], type[Message]] = {
    Ready: WorkerReady,
    Iterated: IterationFinished,
    Timed: StepTimed,
    Joined: Regrouped,
    Broken: CollectiveFailed,
    Raised: WorkerRaised,
    Kept: StateKept,
    Unprotected: StateUnprotected,
    Diverged: StateDiverged,
    Unusable: StateUnusable,
    NotFinite: GradientNotFinite,
    Drilled: ScriptDrilled,
    Finished: WorkerFinished,
}
"""The fact for each kind of message: the same fields, and the worker that sent it."""


def report(node: str, worker: LocalWorker, message: ToAgent) -> list[Message | Effect]:
    """Return the fact for a worker's message, if there is one for its kind."""
    kind = REPORTS.get(type(message))
    if kind is None:
        return []
    fields: dict[str, Any] = {**msgspec.structs.asdict(worker.status()), **msgspec.structs.asdict(message)}
    fields["node"] = node
    if isinstance(message, (Ready, Joined)):  # the result of a command; other facts begin a chain
        fields["correlation"] = worker.correlation
    return [kind(**{field: value for field, value in fields.items() if field in kind.__struct_fields__})]
