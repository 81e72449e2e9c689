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

from unicron.contracts.states import KEPT, LENT, StateLocation, StateRef
from unicron.contracts.worker import FetchState, Membership
from unicron.errors import StateTransferError
from unicron.train.channel import Channel


def path_of(location: StateLocation) -> Path:
    """Return where a state of this node lies."""
    return Path(os.environ["UNICRON_STATE_DIR"]) / location.name


def export(membership: Membership, place: int, found: dict[str, Any], *, kept: bool = False) -> StateRef:
    """Write a state to the node's memory, for the other members; return what it is.

    Args:
        membership: that takes it; it names who hands it over.
        place: in the replica.
        found: the state; `gathering.laid_out` makes one, and `Gathering` puts one together.
        kept: it is to outlive this process.

    Raises:
        StateTransferError: it can't be written; nothing of it is left.
    """
    member = membership.member
    name = f"{member.worker}.{membership.epoch}.{KEPT if kept else LENT}"
    location = StateLocation(node=member.node, worker=member.worker, name=name, address=member.state_server)
    path = path_of(location)
    unfinished = path.with_suffix(".part")
    try:
        with unfinished.open("wb") as file:
            torch.save(found, file)
        with unfinished.open("rb") as file:
            checksum = hashlib.file_digest(file, lambda: blake2b(digest_size=16)).digest()
        unfinished.rename(path)
        size = path.stat().st_size
    except (OSError, RuntimeError) as error:  # torch makes a RuntimeError of some
        unfinished.unlink(missing_ok=True)
        raise StateTransferError(
            f"worker {member.worker} can't write its state to {path.parent} on {member.node}: {error}; "
            "make room there, the state of every worker of the node must fit once"
        ) from error
    return StateRef(
        task=os.environ["UNICRON_TASK"],
        iteration=found["iteration"],
        place=place,
        location=location,
        size=size,
        checksum=checksum,
    )


def fetch(channel: Channel, ref: StateRef, epoch: int) -> dict[str, Any]:
    """Have the agent fetch the state `ref`; what is read of it is read from its file when it is used.

    Raises:
        StateTransferError: it can't be had.
        GroupBrokenError: a membership newer than `epoch` came meanwhile.
    """
    channel.send(FetchState(ref=ref))
    fetched = channel.await_state(ref.location.name, epoch)
    if fetched.error:
        raise StateTransferError(fetched.error)
    path = Path(fetched.path)
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise StateTransferError(f"state {ref.location.name} can't be read: {error}") from error
    if fetched.own:
        path.unlink()
    if not (isinstance(found, dict) and {"iteration", "objects"} <= found.keys()):
        raise StateTransferError(f"state {ref.location.name} is none: it lacks its iteration or its objects")
    if found["iteration"] != ref.iteration:
        raise StateTransferError(f"state {ref.location.name} is of iteration {found['iteration']}, not {ref.iteration}")
    return found
