"""The commands that take something away."""

from collections.abc import Iterable, Sequence

from unicron.contracts.base import Message
from unicron.contracts.commands import DropStates, StopWorker
from unicron.contracts.states import KEPT, StateRef
from unicron_transition.membership import WorkerRun
from unicron_transition.state import TaskRun, TransitionState


def stop_order(state: TransitionState, task: str, worker: WorkerRun, reason: str) -> StopWorker:
    """Return the command that ends a worker."""
    slot = worker.slot
    return StopWorker(**state.to(slot.node), slot=slot.slot, worker=worker.worker, task=task, reason=reason)


def drop_order(
    state: TransitionState, task: str, node: str, names: Sequence[str], workers: Sequence[str] = ()
) -> DropStates:
    """Return the command that removes states which lie on a node, and all that `workers` saved, who are no more."""
    return DropStates(**state.to(node), task=task, names=list(names), workers=list(workers))


def remove(state: TransitionState, run: TaskRun, states: Iterable[StateRef]) -> list[Message]:
    """Have states removed that were left behind, on nodes that are there; what was saved is another matter."""
    names: dict[str, list[str]] = {}
    for ref in states:
        if ref.location.name.endswith(KEPT):
            names.setdefault(ref.location.node, []).append(ref.location.name)
    return [
        drop_order(state, run.spec.name, node, sorted(names[node])) for node in sorted(names) if state.is_there(node)
    ]
