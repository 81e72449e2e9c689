"""The snapshot that new workers restore from, and where it lies.

What lies in the memories of nodes that are to go only is copied to nodes that stay.
"""

from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from unicron.contracts.base import Message
from unicron.contracts.commands import CopyState
from unicron.contracts.events import StateCopied
from unicron.contracts.states import SAVED, Keeper, ParkedSnapshot, StateRef
from unicron_transition.cluster import KnownNodes
from unicron_transition.group import WorkerGroup
from unicron_transition.orders import remove_orders
from unicron_transition.snapshots.saves import Saves

WITHDRAWN = 64
"""Copies of each task that may still arrive though nobody wants them any more; older ones are forgotten."""


class PendingCopy(msgspec.Struct, kw_only=True, array_like=True):
    """A copy that is being made of a state on a node that is to go.

    Attributes:
        state: that is copied.
        incarnation: of its node when it was ordered; a later one does not know the order.
        keeper: where the copy is to lie.
        failed: it could not be made.
    """

    state: StateRef
    incarnation: str
    keeper: Keeper
    failed: bool = False

    @property
    def copy(self) -> StateRef:
        """The copy, once it is there."""
        return self.state.at(self.keeper.node, self.keeper.address)

    def under_way(self, cluster: KnownNodes) -> bool:
        """Return whether both nodes are as they were when it was ordered."""
        source, keeper = cluster.nodes[self.state.location.node], self.keeper
        known = cluster.is_staying(keeper.node) and cluster.nodes[keeper.node].state_server == keeper.address
        return known and source.alive and source.incarnation == self.incarnation


class Parking(msgspec.Struct, kw_only=True):
    """A task's parked snapshot.

    Attributes:
        snapshot: that is parked; None where living workers have the state.
        copying: copies on their way to nodes that stay, or that could not be made.
        withdrawn: orders to copy what is no longer to be taken; the copy may still arrive.
    """

    snapshot: ParkedSnapshot | None = None
    copying: list[PendingCopy] = []
    withdrawn: list[PendingCopy] = []

    @property
    def states(self) -> list[StateRef]:
        """Its parts that lie in the memories of nodes."""
        return self.snapshot.states if self.snapshot else []

    def usable_states(self, node: str) -> list[StateRef]:
        """Return its parts on a node, and the copies that are on their way there."""
        coming = [each.state.at(node, "") for each in self.copying if each.keeper.node == node]
        return [ref for ref in self.states if ref.location.node == node] + coming

    def nodes(self) -> set[str]:
        """Return the nodes where something of it lies, or is to."""
        return {ref.location.node for ref in self.states} | {each.keeper.node for each in self.copying}

    def depends_on(self, cluster: KnownNodes, node: str) -> bool:
        """Return whether some place of it lies on `node`, and on no node that stays."""
        safe = {ref.place for ref in self.states if cluster.is_staying(ref.location.node)}
        return any(ref.location.node == node and ref.place not in safe for ref in self.states)

    def stranded(self, cluster: KnownNodes) -> bool:
        """Return whether some place lies on draining nodes only, and no copy of it is on its way to another node."""
        safe = {ref.place for ref in self.states if cluster.is_staying(ref.location.node)}
        safe |= {each.state.place for each in self.copying if not each.failed}
        return any(ref.place not in safe for ref in self.states)

    def readdress(self, group: WorkerGroup, node: str, address: str) -> None:
        """Record the new address from which a node's parts are fetched."""
        states = [ref.at(node, address) if ref.location.node == node else ref for ref in self.states]
        if self.snapshot is not None and states != self.snapshot.states:
            self.snapshot = replace(self.snapshot, states=states)
            group.membership.broken = True  # its members know other addresses

    def restrict(self, group: WorkerGroup, states: Iterable[StateRef]) -> None:
        """Keep only these parts; the snapshot is dropped where they are not complete."""
        left = list(states)
        if self.snapshot is None or len(left) == len(self.snapshot.states):
            return
        group.membership.broken = True  # its members know of more
        whole = len({ref.place for ref in left}) == self.snapshot.layout.replica_workers
        self.snapshot = replace(self.snapshot, states=left) if whole else None

    def order_copies(self, cluster: KnownNodes, group: WorkerGroup, saves: Saves) -> list[Message]:
        """Return the commands that copy, to nodes that stay, the parts that lie on none; the copies count as saved."""
        states = [] if group.state.ended else self.states
        vain = [each for each in self.copying if each.state not in states]
        goes_on = [each for each in self.copying if each.state in states and each.under_way(cluster)]
        over = [each for each in self.copying if each not in goes_on and not each.failed]
        self.copying, self.withdrawn = goes_on, [*self.withdrawn, *over][-WITHDRAWN:]
        places: dict[int, list[StateRef]] = {}
        for ref in states:
            places.setdefault(ref.place, []).append(ref)
        out: list[Message] = []
        for refs in places.values():
            if copying := self._start_copy(cluster, refs):
                ref, keeper = copying.state, copying.keeper
                if ref.location.name.endswith(SAVED):
                    saves.record_location(ref.location.worker, keeper.node)
                out.append(
                    CopyState(
                        **cluster.command_fields(ref.location.node), task=group.spec.name, state=ref, keeper=keeper
                    )
                )
        coming = {(each.state.location.name, each.keeper.node) for each in self.copying}
        arrived = [each.copy for each in vain]  # without a report so far, maybe
        strays = [ref for ref in arrived if (ref.location.name, ref.location.node) not in coming]
        return out + remove_orders(cluster, group.spec.name, strays)

    def _start_copy(self, cluster: KnownNodes, refs: list[StateRef]) -> PendingCopy | None:
        """Begin to copy one of a place's states, if a copy is needed and possible."""
        orders = [each for each in self.copying if each.state in refs]
        if any(cluster.is_staying(ref.location.node) for ref in refs) or not all(each.failed for each in orders):
            return None
        tried = {(each.state.location.node, each.keeper.node) for each in orders}
        for ref in refs:
            node = ref.location.node
            keepers = cluster.partners(node) if cluster.is_there(node) else []
            keeper = next((each for each in keepers if (node, each.node) not in tried), None)
            if keeper is not None:
                copying = PendingCopy(state=ref, incarnation=cluster.nodes[node].incarnation, keeper=keeper)
                self.copying.append(copying)
                return copying
        return None  # until another node comes

    def record_copy(self, fact: StateCopied) -> bool:
        """Record a copy that has arrived; return whether it is no longer wanted."""
        copy, orders = fact.state, (*self.copying, *self.withdrawn)
        where = (copy.location.name, copy.location.node)
        sent = [each for each in orders if each.state.location.node == fact.node]
        order = next((each for each in sent if (each.state.location.name, each.keeper.node) == where), None)
        if order is None:
            return False  # that node was not ordered to copy it, or has said so before
        if self.snapshot is None or order not in self.copying:
            self.withdrawn = [each for each in self.withdrawn if each is not order]
            return not fact.problem
        known = order.keeper.address == copy.location.address
        order.failed = known and bool(fact.problem)
        if known and not fact.problem:
            self.copying.remove(order)
            self.snapshot = replace(self.snapshot, states=[*self.snapshot.states, copy])
        return False
