"""A search for copies of a state that no worker has, and a rewind to an earlier checkpoint."""

from collections.abc import Iterable

import msgspec

from unicron.contracts.ranges import Number
from unicron.contracts.states import ParkedSnapshot, StateRef
from unicron.contracts.storage import StoredState


class Search(msgspec.Struct, kw_only=True):
    """A search for copies of a task's state in the memories of nodes, then on storage.

    Attributes:
        number: that answers repeat.
        asked: nodes that have yet to answer.
        found: what the others have.
        looking: node that looks at the storage; empty where none does.
        over: it was in vain, and the task begins anew.
    """

    number: Number
    asked: dict[str, None] = {}
    found: list[StateRef] = []
    looking: str = ""
    over: bool = False


class Rewind(msgspec.Struct, kw_only=True):
    """An order of a user to go on from an earlier checkpoint.

    Attributes:
        number: that the answer repeats.
        iteration: of the checkpoint.
        node: that looks whether it is there, and sound.
        stored: it is, and the task is to give its state up for it.
    """

    number: Number
    iteration: Number
    node: str
    stored: StoredState | None = None


def newest_whole(states: Iterable[StateRef]) -> ParkedSnapshot | None:
    """Return the newest iteration of which every place is there, in one layout."""
    by_version: dict[tuple[int, str], list[StateRef]] = {}
    for ref in states:
        by_version.setdefault((ref.iteration, ref.layout.degrees), []).append(ref)
    for _, refs in sorted(by_version.items(), key=lambda each: each[0], reverse=True):
        if len({ref.place for ref in refs}) == refs[0].layout.replica_workers:
            return ParkedSnapshot(layout=refs[0].layout, iteration=refs[0].iteration, states=refs)
    return None
