"""The state of a worker (parameters, optimizer, whatever else is protected) on its way to another worker.

The holder writes it to a file in the node's memory; the agents carry it, by gRPC where the nodes differ; the taker
loads it with `weights_only`, so that it can hold tensors and plain values but no code.
"""

import os
from pathlib import Path
from typing import Any

import torch

from unicron.contracts.tasks import Member
from unicron.contracts.worker import FetchState
from unicron.train.channel import Channel


class NoStateError(RuntimeError):
    """No holder could hand over its state."""


def path_of(key: str, worker: str) -> Path:
    """Return where `worker` puts the state it exports under `key`."""
    return Path(os.environ["UNICRON_STATE_DIR"]) / f"{worker}.{key}.state"


def export(path: Path, iteration: int, protected: dict[str, Any], pending: dict[str, Any] | None) -> None:
    """Write the state from before the update of `iteration`; it is complete as soon as it is there.

    Args:
        path: where to.
        iteration: the iteration that a taker goes on with.
        protected: the objects whose `state_dict` makes up the state.
        pending: a state that was taken but not applied yet; it is handed on as it is.
    """
    found = pending or {
        "iteration": iteration,
        "objects": {name: thing.state_dict() for name, thing in protected.items()},
    }
    unfinished = path.with_suffix(".part")
    torch.save(found, unfinished)
    unfinished.rename(path)


def fetch(channel: Channel, key: str, source: Member, epoch: int) -> dict[str, Any] | None:
    """Have the agent fetch what `source` exported under `key`; return None where that failed.

    Raises:
        NoStateError: a membership newer than `epoch` came meanwhile.
    """
    channel.send(FetchState(key=key, source=source))
    fetched = channel.await_state(key, epoch)
    if channel.newest.epoch > epoch:
        raise NoStateError("interrupted by a newer membership")
    if fetched.error:
        return None
    path = Path(fetched.path)
    found = torch.load(path, map_location="cpu", weights_only=True)
    if path != path_of(key, source.worker):  # a copy of our own
        path.unlink()
    return found if isinstance(found, dict) and {"iteration", "objects"} <= found.keys() else None


def apply(found: dict[str, Any], protected: dict[str, Any]) -> None:
    """Load a fetched state into the protected objects.

    Raises:
        KeyError: the state lacks one of them: the workers do not run the same script.
    """
    for name, thing in protected.items():
        thing.load_state_dict(found["objects"][name])
