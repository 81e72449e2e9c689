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
    WorkerExited,
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
from unicron_agent.stimuli import ProcessExited
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


def report(node: str, worker: LocalWorker, message: ToAgent) -> list[Message]:
    """Return the fact for a worker's message, if there is one for its kind."""
    kind = REPORTS.get(type(message))
    if kind is None:
        return []
    fields: dict[str, Any] = {**msgspec.structs.asdict(worker.status()), **msgspec.structs.asdict(message)}
    fields["node"] = node
    if isinstance(message, (Ready, Joined)):  # the result of a command; other facts begin a chain
        fields["correlation"] = worker.correlation
    return [kind(**{field: value for field, value in fields.items() if field in kind.__struct_fields__})]


def exit_fact(node: str, worker: LocalWorker, exited: ProcessExited) -> WorkerExited:
    """Return the fact that a worker's process has ended."""
    return WorkerExited(
        node=node,
        slot=worker.slot,
        task=worker.task,
        worker=worker.worker,
        exit_code=exited.exit_code,
        signal=exited.signal,
        expected=worker.stopping,
        finished=worker.finished,
        iteration=worker.iteration,
        microbatches_done=worker.done,
        stderr=list(exited.stderr),
        collectives=list(exited.collectives),
    )
