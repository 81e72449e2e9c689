"""A stand-in of an agent, without workers: it carries out each command at once."""

from typing import Any

from unicron import fabric_proofs
from unicron.contracts.base import Message
from unicron.contracts.commands import Regroup, StartWorker, StopWorker
from unicron.contracts.events import NodeJoined, Regrouped, WorkerExited, WorkerReady
from unicron.contracts.tasks import Slot

COMMANDS = (StartWorker, StopWorker, Regroup)
BEAT_S = 0.5  # as agents do unless they are ordered otherwise


def joined(node: str, start: int, host: str, slots: list[Slot]) -> NodeJoined:
    """Return what a node says that joins for the `start`-th time."""
    return NodeJoined(
        node=node,
        incarnation=f"{fabric_proofs.boot_id(node)}.{start}",
        host=host,
        slots=slots,
        rendezvous=f"{host}:29400",
        state_server=f"{host}:29500",
    )


def answers(command: Any) -> list[Any]:
    """Return the facts with which a command is answered that was carried out."""
    place: dict[str, Any] = {"node": command.node, "task": command.task}
    facts: list[Message] = []
    match command:
        case StartWorker(slot=slot, worker=worker):
            facts = [WorkerReady(**place, slot=slot, worker=worker, pid=1)]
        case StopWorker(slot=slot, worker=worker):
            facts = [WorkerExited(**place, slot=slot, worker=worker, signal=9, expected=True)]
        case Regroup(members=members, ranks=ranks, epoch=epoch, world_size=size):
            group = {**place, "epoch": epoch, "world_size": size, "iteration": epoch + 1}
            facts = [
                Regrouped(**group, slot=member.slot, worker=member.worker, rank=rank)
                for member, rank in zip(members, ranks, strict=True)
            ]
    return facts
