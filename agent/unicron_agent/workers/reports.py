"""What a worker says to its agent, as the facts that the agent makes of it."""

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
from unicron_agent.stimuli import Effect
from unicron_agent.workers.workers import Worker

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
"""What a worker says, and the fact that the agent makes of it: the same fields, and where it came from."""


def report(node: str, worker: Worker, message: ToAgent) -> list[Message | Effect]:
    """Return the fact that a worker's message makes, where it makes one."""
    kind = REPORTS.get(type(message))
    if kind is None:
        return []
    fields: dict[str, Any] = {**msgspec.structs.asdict(worker.status()), **msgspec.structs.asdict(message)}
    fields["node"] = node
    if isinstance(message, (Ready, Joined)):  # what it was told to do; the rest begins a chain
        fields["correlation"] = worker.correlation
    return [kind(**{field: value for field, value in fields.items() if field in kind.__struct_fields__})]
