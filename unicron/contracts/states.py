"""Copies of a worker's state (parameters, optimizer and whatever else is protected) as values: where which one lies."""

import struct
from typing import Annotated

import msgspec
from msgspec.structs import replace

from unicron.contracts.base import Record
from unicron.contracts.ranges import Few, Label, Many, Number, Size
from unicron.contracts.storage import StoredState, StoreOrder
from unicron.contracts.tasks import ParallelLayout
from unicron.errors import InvalidInputError

LENT, KEPT, SAVED = "state", "kept", "saved"
"""How the name of a state's file ends: its worker removes it, or it outlives its worker until it is ordered away.

What is saved is so while its worker computes on, in turns in one of two files.
"""

TURNS = 2
"""Files that a worker saves to, in turn."""

COPIES = 2
"""Copies of each place's state that are to be in the memories of nodes, no two on one."""


class StateLocation(Record, kw_only=True, frozen=True):
    """The place of a copy, and the agent that serves it.

    Attributes:
        node: on which it lies.
        worker: that wrote it.
        name: of the file in the node's state directory.
        address: host:port of the node's state server.
    """

    node: Label
    worker: Label
    name: Label
    address: Label = ""


class StateRef(Record, kw_only=True, frozen=True):
    """One complete copy of the state of one place; it is used only if its content has the checksum.

    Attributes:
        task: whose state it is.
        location: where it lies.
        iteration: from before whose update it is; its taker goes on with that iteration.
        place: in the replica.
        size: in bytes.
        checksum: XXH3 of the content, 16 bytes.
        layout: the shape of the replica that has this place.
    """

    task: Label
    iteration: Number
    place: Number
    location: StateLocation
    size: Size
    checksum: bytes
    layout: ParallelLayout = ParallelLayout()

    def at(self, node: str, address: str) -> "StateRef":
        """Return the copy of it that lies on another node."""
        return replace(self, location=replace(self.location, node=node, address=address))


LABEL_FOOT = struct.Struct(">I8s")
"""How a file ends that holds a saved state: the length of its label before this, and a mark."""

_MARK = b"UNICRON\2"
_label: msgspec.msgpack.Decoder[StateRef] = msgspec.msgpack.Decoder(StateRef)


def label(ref: StateRef) -> bytes:
    """Return the trailer that makes a file a saved state and describes it."""
    data = msgspec.msgpack.encode(ref)
    return data + LABEL_FOOT.pack(len(data), _MARK)


def read_label(end: bytes) -> StateRef:
    """Return what a file holds that ends so.

    Raises:
        InvalidInputError: no saved state, or one that is not whole.
    """
    if len(end) >= LABEL_FOOT.size:
        length, mark = LABEL_FOOT.unpack(end[-LABEL_FOOT.size :])
        data = end[: -LABEL_FOOT.size][-length:]
        if mark == _MARK and len(data) == length:
            try:
                return _label.decode(data)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise InvalidInputError(f"the label of a saved state: {error}") from error
    raise InvalidInputError("this is no saved state, or one that was never finished")


class Keeper(Record, kw_only=True, frozen=True):
    """A node that keeps a copy of a state that is saved elsewhere.

    Attributes:
        address: host:port of its state server.
    """

    node: Label
    address: Label


class Saver(Record, kw_only=True, frozen=True):
    """A worker that saves its state in its node's memory now and then.

    Attributes:
        keepers: other nodes that keep a copy.
        store: how often its state is to be written to storage as well; None where it is not.
    """

    worker: Label
    keepers: Annotated[list[Keeper], Few] = []
    store: StoreOrder | None = None


class ParkedSnapshot(Record, kw_only=True, frozen=True):
    """A complete state in the memories of nodes or on storage, from which new workers restore.

    Attributes:
        layout: the shape of a replica of its writers.
        iteration: from before whose update it is.
        states: for each place at least one copy, unless that is lost; none where it lies on storage.
        stored: the checkpoint, where it lies on storage.
    """

    layout: ParallelLayout
    iteration: Number
    states: Annotated[list[StateRef], Many]
    stored: StoredState | None = None
