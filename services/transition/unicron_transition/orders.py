"""The commands that take something away."""

from collections.abc import Iterable, Sequence

from unicron.contracts.base import Message
from unicron.contracts.commands import DropStates, StopWorker
from unicron.contracts.states import KEPT, StateRef
from unicron_transition.cluster import KnownNodes
from unicron_transition.membership import WorkerRun


def stop_order(cluster: KnownNodes, task: str, worker: WorkerRun, reason: str) -> StopWorker:
    """Return the command that ends a worker."""
    slot = worker.slot
    return StopWorker(
        **cluster.command_fields(slot.node), slot=slot.slot, worker=worker.worker, task=task, reason=reason
    )


def drop_order(
    cluster: KnownNodes, task: str, node: str, names: Sequence[str], workers: Sequence[str] = ()
) -> DropStates:
    """Return the command that removes states which lie on a node, and all that `workers` saved, who are no more."""
    return DropStates(**cluster.command_fields(node), task=task, names=list(names), workers=list(workers))


def remove_orders(cluster: KnownNodes, task: str, states: Iterable[StateRef]) -> list[Message]:
    """Return the commands that remove exported states from the nodes that are there; saved states are not touched."""
    names: dict[str, list[str]] = {}
    for ref in states:
        if ref.location.name.endswith(KEPT):
            names.setdefault(ref.location.node, []).append(ref.location.name)
    return [drop_order(cluster, task, node, sorted(names[node])) for node in sorted(names) if cluster.is_there(node)]
