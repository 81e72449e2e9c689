"""The state of a worker (parameters, optimizer, whatever else is protected) on its way to another worker.

The holder writes it to a file in the node's memory; the agents carry it, by gRPC where the nodes differ; the taker
loads it with `weights_only`, so that it can hold tensors and plain values but no code.
"""

import hashlib
import os
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from unicron.contracts.states import StateLocation, StateRef
from unicron.contracts.tasks import Member
from unicron.contracts.worker import FetchState
from unicron.errors import StateTransferError
from unicron.train.channel import Channel


def path_of(location: StateLocation) -> Path:
    """Return where a state of this node lies."""
    return Path(os.environ["UNICRON_STATE_DIR"]) / location.name


def export(
    member: Member, epoch: int, place: int, iteration: int, protected: dict[str, Any], pending: dict[str, Any] | None
) -> StateRef:
    """Write the state from before the update of `iteration` to the node's memory; return what it is.

    Args:
        member: who hands it over.
        epoch: of the membership that takes it.
        place: in the replica.
        iteration: the iteration that a taker goes on with.
        protected: the objects whose `state_dict` makes up the state.
        pending: a state that was taken but not applied yet; it is handed on as it is.
    """
    name = f"{member.worker}.{epoch}.state"
    location = StateLocation(node=member.node, worker=member.worker, name=name, address=member.state_server)
    path = path_of(location)
    found = pending or {
        "iteration": iteration,
        "objects": {name: thing.state_dict() for name, thing in protected.items()},
    }
    unfinished = path.with_suffix(".part")
    torch.save(found, unfinished)
    with unfinished.open("rb") as file:
        checksum = hashlib.file_digest(file, lambda: blake2b(digest_size=16)).digest()
    unfinished.rename(path)
    return StateRef(
        task=os.environ["UNICRON_TASK"],
        iteration=found["iteration"],
        place=place,
        location=location,
        size=path.stat().st_size,
        checksum=checksum,
    )


def fetch(channel: Channel, ref: StateRef, epoch: int) -> dict[str, Any] | None:
    """Have the agent fetch the state `ref`; return None where that failed.

    Raises:
        StateTransferError: a membership newer than `epoch` came meanwhile.
    """
    channel.send(FetchState(ref=ref))
    fetched = channel.await_state(ref.location.name, epoch)
    if channel.newest.epoch > epoch:
        raise StateTransferError("interrupted by a newer membership")
    if fetched.error:
        return None
    path = Path(fetched.path)
    found = torch.load(path, map_location="cpu", weights_only=True)
    if fetched.own:
        path.unlink()
    return found if isinstance(found, dict) and {"iteration", "objects"} <= found.keys() else None


def apply(found: dict[str, Any], protected: dict[str, Any]) -> None:
    """Load a fetched state into the protected objects.

    Raises:
        KeyError: the state lacks one of them: the workers do not run the same script.
    """
    for name, thing in protected.items():
        thing.load_state_dict(found["objects"][name])
