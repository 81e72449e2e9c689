"""The state of a worker (parameters, optimizer, whatever else is protected) on its way to another worker.

The holder writes it to a file in the node's memory; the agents carry it, by gRPC where the nodes differ; the taker
loads it so that it can hold tensors and plain values but no code.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from xxhash import xxh3_128

from unicron.contracts.states import StateLocation, StateRef
from unicron.contracts.worker import FetchState, Membership
from unicron.errors import StateTransferError, explain_lack
from unicron.files import remove_if_possible
from unicron.snapshots.memory import SnapshotMemory, finished_or_removed
from unicron.snapshots.names import exported_name
from unicron.train.snapshots.packed import Packing, map_file, unpack
from unicron.train.worker.channel import AgentChannel


def describe(membership: Membership, place: int, iteration: int, name: str = "") -> StateRef:
    """Return the reference of a state of this worker, without size and checksum.

    Args:
        membership: that the worker is in.
        place: in the replica.
        iteration: from before whose update it is.
        name: of its file.
    """
    member = membership.member
    return StateRef(
        task=os.environ["UNICRON_TASK"],
        iteration=iteration,
        place=place,
        location=StateLocation(node=member.node, worker=member.worker, name=name, address=member.state_server),
        size=0,
        checksum=b"",
        layout=membership.shape.with_workers(0),
    )


def export(membership: Membership, place: int, found: dict[str, Any], *, kept: bool = False) -> StateRef:
    """Write a state to the node's memory, for the other members; return its reference.

    Args:
        membership: that takes it; it names who hands it over.
        place: in the replica.
        found: the state; `gathering.collect_state` makes one, and `Gathering` puts one together.
        kept: it is to outlive this process.

    Raises:
        StateTransferError: it can't be written; nothing of it is left.
    """
    member = membership.member
    name = exported_name(member.worker, membership.epoch, kept=kept)
    ref = describe(membership, place, found["iteration"], name)
    folder = SnapshotMemory.of_worker().folder
    try:
        packing = Packing(found)
        with finished_or_removed(folder / name) as path:
            file = map_file(path, packing.size)
            packing.write(file)
            checksum = xxh3_128(file).digest()
    except OSError as error:
        raise StateTransferError(
            f"worker {member.worker} can't write its state to {folder} on {member.node}: {explain_lack(error)}; "
            "the state of every worker of the node must fit there once"
        ) from error
    return replace(ref, size=packing.size, checksum=checksum)


class Fetcher:
    """Fetches states for this worker, by its agent.

    Args:
        channel: to the agent; None outside a cluster.
    """

    def __init__(self, channel: AgentChannel | None) -> None:
        self._channel = channel
        self._files: list[Path] = []

    def fetch(self, copies: Sequence[StateRef], epoch: int) -> dict[str, Any]:
        """Return a state, from the first of these that can be had; its tensors are read from the file when used.

        Raises:
            StateTransferError: none can be had.
            GroupBrokenError: a membership newer than `epoch` came meanwhile.
        """
        if self._channel is None:
            raise StateTransferError("there is no agent that could fetch a state")
        problems = []
        for ref in copies:
            try:
                return self._fetch(self._channel, ref, epoch)
            except StateTransferError as error:
                problems.append(str(error))
        raise StateTransferError("; ".join(problems))

    def remove_files(self) -> None:
        """Remove the fetched files; until then nobody writes over them."""
        while self._files:
            remove_if_possible(self._files.pop())

    def _fetch(self, channel: AgentChannel, ref: StateRef, epoch: int) -> dict[str, Any]:
        channel.send(FetchState(ref=ref))
        fetched = channel.await_state(ref.location.name, epoch)
        if fetched.error:
            raise StateTransferError(fetched.error)
        self._files.append(Path(fetched.path))
        try:
            found = unpack(self._files[-1], ref.size)
        except OSError as error:
            raise StateTransferError(f"state {ref.location.name} can't be read: {error}") from error
        if not (isinstance(found, dict) and {"iteration", "objects"} <= found.keys()):
            raise StateTransferError(f"state {ref.location.name} is none: it lacks its iteration or its objects")
        if found["iteration"] != ref.iteration:
            raise StateTransferError(
                f"state {ref.location.name} is of iteration {found['iteration']}, not {ref.iteration}"
            )
        return found
