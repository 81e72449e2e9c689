"""Copies of a worker's state (parameters, optimizer and whatever else is protected) as values: where which one lies."""

from unicron.contracts.base import Record
from unicron.contracts.tasks import ParallelLayout

LENT, KEPT = "state", "kept"
"""How the name of a state's file ends: its worker removes it, or it outlives its worker until it is ordered away."""

COPIES = 2
"""Replicas that leave their states behind: each place has so many copies where there are as many replicas."""


class StateLocation(Record, kw_only=True, frozen=True):
    """Where a copy lies and who hands it out.

    Attributes:
        node: on which it lies.
        worker: that wrote it.
        name: of the file in the node's state directory.
        address: host:port of the node's state server.
    """

    node: str
    worker: str
    name: str
    address: str = ""


class StateRef(Record, kw_only=True, frozen=True):
    """One complete copy of the state of one place; it is used only if its content has the checksum.

    Attributes:
        task: whose state it is.
        location: where it lies.
        iteration: from before whose update it is; its taker goes on with that iteration.
        place: in the replica.
        size: in bytes.
        checksum: BLAKE2b of the content, 16 bytes.
    """

    task: str
    iteration: int
    place: int
    location: StateLocation
    size: int
    checksum: bytes


class Shelf(Record, kw_only=True, frozen=True):
    """The state of a task that workers have left behind, for others in another layout to take.

    Attributes:
        layout: the shape of a replica of those who left it.
        iteration: from before whose update it is.
        states: for each place at least one copy, unless that is lost.
    """

    layout: ParallelLayout
    iteration: int
    states: list[StateRef]
