"""The nodes, as far as commands and copies of states are concerned."""

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import msgspec

from unicron.contracts.ranges import Size
from unicron.contracts.states import COPIES, Keeper
from unicron.contracts.tasks import SlotRef
from unicron.snapshots.placement import Placement, place
from unicron.snapshots.shapes import Kept
from unicron_transition.deadlines import TIMEOUT_S, WaitKind


class NodeRun(msgspec.Struct, kw_only=True):
    """A node; `incarnation` is the one it last joined under.

    Attributes:
        drained: it is to go, and nothing more is to lie there.
        slots: that it has; none where it named none.
    """

    incarnation: str = ""
    rendezvous: str = ""
    state_server: str = ""
    rack: str = ""
    alive: bool = True
    drained: bool = False
    slots: list[int] = []

    def has_slot(self, slot: int) -> bool:
        """Whether it has this slot."""
        return not self.slots or slot in self.slots

    @property
    def keeps_states(self) -> bool:
        """Whether states are safe there, as far as anybody knows."""
        return self.alive and not self.drained


class KnownNodes(msgspec.Struct, kw_only=True, dict=True):
    """The nodes that have been admitted, and the nodes that keep copies for each of them.

    Attributes:
        token: fencing token of the active instance.
        placement: of copies, as it was asked for last.
        idle_s: how long a task without slots keeps its state in memory, where it has a storage; as it is set.
    """

    token: Size = 0
    nodes: dict[str, NodeRun] = {}
    placement: Placement = Placement((), COPIES)
    idle_s: float = TIMEOUT_S[WaitKind.IDLE]

    def is_there(self, node: str) -> bool:
        """Return whether a node is admitted and its agent can be given commands."""
        return node in self.nodes and self.nodes[node].alive

    def is_staying(self, node: str) -> bool:
        """Return whether a node is admitted and is not being drained."""
        return node in self.nodes and self.nodes[node].keeps_states

    def command_fields(self, node: str) -> dict[str, Any]:
        """Return the fields that every command to a node has."""
        return {"node": node, "token": self.token, "incarnation": self.nodes[node].incarnation}

    def usable(self, slots: Iterable[SlotRef]) -> list[SlotRef]:
        """Return those of `slots` that are there: a node may have lost some, and a plan is to follow."""
        return [slot for slot in slots if self.is_there(slot.node) and self.nodes[slot.node].has_slot(slot.slot)]

    def partners(self, node: str) -> list[Keeper]:
        """Return the nodes that keep copies of the states saved on `node`, in order of preference."""
        names = self._keepers[node][1:] if node in self._keepers else self._staying_nodes(node)
        return [Keeper(node=name, address=self.nodes[name].state_server) for name in names]

    def invalidate_partners(self) -> None:
        """Forget which nodes keep copies for which; it is computed again from the staying nodes at the next call."""
        self.__dict__.pop("_keepers", None)

    def _staying_nodes(self, node: str) -> list[str]:
        """Return the nodes that stay, those of other racks first; each node that is to go begins with another one."""
        staying = [name for name, each in self.nodes.items() if each.keeps_states]
        first = list(self.nodes).index(node) % len(staying) if staying else 0
        rack = self.nodes[node].rack
        return sorted(staying[first:] + staying[:first], key=lambda name: bool(rack) and self.nodes[name].rack == rack)

    @cached_property
    def _keepers(self) -> Kept:
        there = {name: node.rack for name, node in self.nodes.items() if node.keeps_states}
        self.placement = place(list(there), COPIES, there, self.placement)
        return self.placement.keepers()
