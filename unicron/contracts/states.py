"""Copies of a worker's state (parameters, optimizer and whatever else is protected) as values: where which one lies."""

from unicron.contracts.base import Record


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
