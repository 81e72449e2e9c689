"""Who holds which part of a task's state, as far as reports tell."""

from collections.abc import Collection, Iterable

import msgspec

from unicron.contracts.ranges import Count, Number, Seconds
from unicron.contracts.states import Keeper, Saver, StateRef
from unicron.contracts.storage import Saving, StoredPart


class Holding(msgspec.Struct, kw_only=True, array_like=True):
    """What one worker holds.

    Attributes:
        place: in the replica, whose part of the state it is.
        iteration: of the state, at least: it was this one when the worker last said so.
        node: on which the worker is.
    """

    place: Number
    iteration: Number
    node: str


class Copying(msgspec.Struct, kw_only=True, array_like=True):
    """A copy that is being made of a state on a node that is to go.

    Attributes:
        state: that is copied.
        incarnation: of its node, as it was told to; a later one has not heard of it.
        keeper: where the copy is to lie.
        failed: it could not be made.
    """

    state: StateRef
    incarnation: str
    keeper: Keeper
    failed: bool = False


class StateMap(msgspec.Struct, kw_only=True):
    """Who holds place p of a task's state.

    A worker whose node is given up may still live and come back with its state. So it is asked with the workers that
    count, and forgets a worker only when that is known to have ended.

    Attributes:
        by_worker: what each worker holds; who is not in it has no state.
    """

    by_worker: dict[str, Holding] = {}

    def hold(self, worker: str, place: int, iteration: int, node: str) -> None:
        """Note that `worker` has the state of `place`."""
        self.by_worker[worker] = Holding(place=place, iteration=iteration, node=node)

    def forget(self, worker: str) -> None:
        """Note that a worker has ended, or is told to."""
        self.by_worker.pop(worker, None)

    def only(self, node: str, workers: Collection[str]) -> None:
        """Note that no other workers than these live on `node`."""
        gone = [name for name, held in self.by_worker.items() if held.node == node and name not in workers]
        for name in gone:
            del self.by_worker[name]

    def place(self, worker: str) -> int | None:
        """Return the place whose state `worker` holds, None where it has none."""
        held = self.by_worker.get(worker)
        return None if held is None else held.place

    def places(self, workers: Iterable[str]) -> set[int]:
        """Return the places of which any of `workers` holds the state."""
        return {held.place for name in workers if (held := self.by_worker.get(name))}

    def holders(self, place: int, workers: Iterable[str], iteration: int = 0) -> list[str]:
        """Return those of `workers` that hold `place` of at least `iteration`, the furthest first."""
        held = [(name, found) for name in workers if (found := self.by_worker.get(name))]
        fit = [(name, found) for name, found in held if found.place == place and found.iteration >= iteration]
        return [name for name, _ in sorted(fit, key=lambda each: -each[1].iteration)]


class Search(msgspec.Struct, kw_only=True):
    """A look round for copies of a task's state.

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
    """

    number: Number
    iteration: Number
    node: str


class Retiring(msgspec.Struct, kw_only=True):
    """A state that is to go from memory to storage.

    Attributes:
        wait: what is waited for before it is written, as in `Wait`; empty: nothing.
        saving: the attempt that is on.
        nodes: that write it, by their incarnations as they were told to; a later one has not heard of it.
    """

    wait: str = ""
    saving: Saving | None = None
    nodes: dict[str, str] = {}


class Saves(msgspec.Struct, kw_only=True):
    """Where a task's states are saved.

    Maps stand in for sets, as they keep an order: equal states are stored as equal bytes.

    Attributes:
        ordered: what each node was told last.
        held: for each worker that saves or saved, the nodes where that may lie.
        wrote: on which node each of them was that was ordered to.
        secured: workers whose copies are whole since they were ordered last.
        whole: copies of some worker were, at any time.
        short: there are fewer nodes than copies wanted.
        searches: counts them.
        search: that is on, or was in vain; None while somebody living has all of the state.
        parts: of checkpoints that are being written to storage those that are there, by attempt.
        write_s: seconds that writing a part took last, at most.
        every_s: seconds from one such checkpoint to the next, as ordered.
        failures: of the task so far.
        asks: how often users have ordered to write one now.
        asked_after: the last time, after this iteration, and there is none yet; None where there is.
        rewind: the task is to go on from an earlier one.
        retiring: its state is to go from memory to storage.
        retired: counts attempts at that.
        tried: states that were taken and were no good: which, from where, and why.
        before: iteration from which on none is to be taken again; None where any may be.
    """

    ordered: dict[str, list[Saver]] = {}
    held: dict[str, dict[str, None]] = {}
    wrote: dict[str, str] = {}
    secured: dict[str, None] = {}
    whole: bool = False
    short: bool = False
    searches: Count = 0
    search: Search | None = None
    parts: dict[str, list[StoredPart]] = {}
    write_s: Seconds = 30.0
    every_s: Seconds = 0.0
    failures: Count = 0
    asks: Count = 0
    asked_after: Number | None = None
    rewind: Rewind | None = None
    retiring: Retiring | None = None
    retired: Count = 0
    tried: list[str] = []
    before: Number | None = None
