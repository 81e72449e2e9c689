"""Checkpoints on storage (a directory or an object store): the messages between the writers of one."""

from unicron.contracts.base import Record
from unicron.contracts.ranges import Count, Label, Number, Seconds, Size
from unicron.contracts.tasks import ParallelLayout


class Saving(Record, kw_only=True, frozen=True):
    """One attempt to write a checkpoint, as its writers and the one that completes it get it.

    Attributes:
        root: directory or URL under which each task has a folder.
        task: whose state it is.
        iteration: from before whose update it is; its taker goes on with that iteration.
        layout: the shape of the replica whose places write the parts.
        attempt: distinguishes it from other attempts at the same iteration; 8 hex digits.
    """

    root: Label
    task: Label
    iteration: Number
    layout: ParallelLayout
    attempt: Label


class StoreOrder(Record, kw_only=True, frozen=True):
    """Storage of a task's state: where, and how often it is written.

    Attributes:
        root: directory or URL, the same for every node.
        every_s: seconds from one checkpoint to the next.
        run: distinguishes the task from others that had its name.
        asked: if not 0, counts the orders of users to write one now, the last of which none was written for yet.
    """

    root: Label
    every_s: Seconds
    run: Label
    asked: Count = 0


class StoredState(Record, kw_only=True, frozen=True):
    """A complete checkpoint, for workers to take.

    Attributes:
        root: directory or URL.
        folder: of the checkpoint, in the task's.
        iteration: from before whose update it is.
        layout: the shape of the replica whose places wrote it.
    """

    root: Label
    folder: Label
    iteration: Number
    layout: ParallelLayout


class StoredFile(Record, kw_only=True, frozen=True):
    """A file of a checkpoint.

    Attributes:
        name: in the folder of the checkpoint.
        size: in bytes.
        checksum: XXH3, 16 bytes in hex, of the content; of a file of pieces, of the checksums of its pieces in
            their order.
    """

    name: Label
    size: Size
    checksum: Label


class StoredPart(Record, kw_only=True, frozen=True):
    """The part of a checkpoint that one place has written.

    Attributes:
        place: in the replica.
        index: the file that lists the pieces.
        data: the file that the pieces lie in.
    """

    place: Number
    index: StoredFile
    data: StoredFile
