"""Which nodes are drained, in Slurm and here, and what follows from the one for the other. Pure."""

from collections.abc import Mapping
from typing import NamedTuple

from unicron.slurm.shown import NodeShown

REASON = "unicron drain"
"""How the reason begins that we give Slurm for a node."""


class DrainHere(NamedTuple):
    """A node is to be drained here, or put back into use.

    Attributes:
        node: as it is called here.
        why: for a person.
    """

    node: str
    drain: bool
    why: str


class DrainThere(NamedTuple):
    """A node is to be drained in Slurm, or to be resumed.

    Attributes:
        node: as Slurm calls it.
    """

    node: str
    drain: bool

    @property
    def words(self) -> list[str]:
        """What scontrol is given."""
        update = ["update", f"NodeName={self.node}"]
        return [*update, "State=DRAIN", f"Reason={REASON}"] if self.drain else [*update, "State=RESUME"]


class Drains:
    """Keeps what a person drains in Slurm drained here, and the reverse.

    Each change is passed on once: who puts a node back into use here although it is drained in Slurm has the last word.

    Args:
        names: what each node of Slurm is called here.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names
        self._there: dict[str, NodeShown] = {}
        self._ordered: set[str] = set()
        self._leaving: set[str] = set()

    def look(self, nodes: Mapping[str, NodeShown], drained: set[str]) -> list[DrainHere]:
        """Return what to do here by what Slurm shows now.

        A node that was drained here in an earlier job is put back into use as the job begins: Slurm has given it.

        Args:
            nodes: of the job, as Slurm shows them.
            drained: the nodes that are drained here.
        """
        orders = []
        for name, node in nodes.items():
            own, before = self._names.get(name), self._there.get(name)
            self._there[name] = node
            if own is None:
                continue
            if before is None and not node.drained and own in drained:
                orders.append(DrainHere(own, False, "Slurm has given it to this job"))
            if node.drained == (before is not None and before.drained):
                continue
            if node.drained and own not in drained:
                self._ordered.add(own)
                orders.append(DrainHere(own, True, f"it was drained in Slurm: {node.reason or 'no reason given'}"))
            elif not node.drained and own in self._ordered:
                self._ordered.discard(own)
                orders.append(DrainHere(own, False, "it was resumed in Slurm"))
        return orders

    def leaves(self, node: str, *, leaves: bool) -> None:
        """Take note that a node is to go, and is drained here for that alone, or that it has joined."""
        if leaves:
            self._leaving.add(node)
        else:
            self._leaving.discard(node)

    def drained_here(self, node: str, *, drain: bool) -> list[DrainThere]:
        """Return what to do in Slurm, where a node was drained here or put back into use: its own reasons stay."""
        name = next((name for name, own in self._names.items() if own == node), None)
        shown = self._there.get(name or "")
        if name is None or shown is None or shown.drained == drain or node in self._leaving:
            return []
        return [DrainThere(name, drain)] if drain or shown.reason.startswith(REASON) else []
