"""Which workers save their states in the memories of which nodes.

Each place's state is to lie in the memories of `COPIES` nodes (GEMINI, SOSP 2023). Where replicas are on different
nodes each of them saves its own, and nothing travels; else other nodes keep copies.
"""

import msgspec

from unicron.contracts.base import Message
from unicron.contracts.commands import SaveStates
from unicron.contracts.states import COPIES, SAVED, Keeper, Saver
from unicron.healing import way_of
from unicron.snapshots.names import saved_names
from unicron_transition.cluster import KnownNodes
from unicron_transition.group import WorkerGroup
from unicron_transition.orders import drop_order
from unicron_transition.snapshots.storage import CheckpointWrites


class Saves(msgspec.Struct, kw_only=True):
    """Where a task's states are saved in memory.

    Maps stand in for sets, as they keep an order: equal states are stored as equal bytes.

    Attributes:
        ordered: what each node was ordered to save last.
        held: for each worker that saves or saved, the nodes where that may lie.
        wrote: on which node each of them was that was ordered to.
        secured: workers whose copies are whole since they were ordered last.
        whole: copies of some worker were, at any time.
        short: there are fewer nodes than copies wanted.
    """

    ordered: dict[str, list[Saver]] = {}
    held: dict[str, dict[str, None]] = {}
    wrote: dict[str, str] = {}
    secured: dict[str, None] = {}
    whole: bool = False
    short: bool = False

    def save_orders(self, cluster: KnownNodes, group: WorkerGroup, storage: CheckpointWrites) -> list[Message]:
        """Return the `SaveStates` commands for the nodes whose savers change."""
        wanted = self._wanted(cluster, group, storage)
        out: list[Message] = []
        for node in sorted({*wanted, *self.ordered}):
            savers = wanted.get(node, [])
            if savers == self.ordered.get(node, []) or not cluster.is_there(node):
                continue
            self.ordered[node] = savers
            out.append(SaveStates(**cluster.command_fields(node), task=group.spec.name, savers=savers))
            for saver in savers:
                self.secured.pop(saver.worker, None)
                self.wrote[saver.worker] = node
                self.record_location(saver.worker, node, *(keeper.node for keeper in saver.keepers))
        self.ordered = {node: savers for node, savers in self.ordered.items() if savers}
        return out

    def record_location(self, worker: str, *nodes: str) -> None:
        """Record where states that a worker saved may lie; they are removed there when newer ones are complete."""
        self.held.setdefault(worker, {}).update(dict.fromkeys(nodes))

    def mark_order_unknown(self, node: str) -> None:
        """Treat a joining agent's saves as unknown, so that they are ordered again; it may have missed an order."""
        self.ordered[node] = [Saver(worker="")]

    def is_expected(self, node: str, name: str) -> bool:
        """Return whether a node is recorded as a location of the saved state of this name."""
        return node in self.held.get(saver_of(name), ())

    def record_secured(self, worker: str, node: str, nodes: list[str]) -> None:
        """Record that a worker's copies are complete, if they are on the nodes that the newest order names."""
        for saver in self.ordered.get(node, ()):
            if saver.worker == worker and [keeper.node for keeper in saver.keepers] == nodes:
                self.secured[worker], self.whole = None, True

    def forget_absent(self, cluster: KnownNodes) -> None:
        """Drop the locations on nodes that are gone."""
        for nodes in self.held.values():
            for node in [node for node in nodes if not cluster.is_there(node)]:
                del nodes[node]

    def nodes(self) -> set[str]:
        """Return all nodes where something saved may lie."""
        return {node for nodes in self.held.values() for node in nodes}

    def superseded(self, group: WorkerGroup) -> bool:
        """Return whether the copies of all present savers are complete, so that older ones can be removed."""
        savers = self._savers()
        return bool(savers) and self.secured.keys() >= savers.keys() and group.membership.has_met

    def drop_older(self, cluster: KnownNodes, group: WorkerGroup) -> list[Message]:
        """Return the commands that remove saved states from nodes on which they are no longer saved."""
        current = {
            name: {node, *(keeper.node for keeper in saver.keepers)} for name, (node, saver) in self._savers().items()
        }
        return self._drop_all_but(cluster, group, current)

    def drop_all(self, cluster: KnownNodes, group: WorkerGroup) -> list[Message]:
        """Return the commands that remove all saved states, and forget all orders to save."""
        self.ordered = {}
        return self._drop_all_but(cluster, group, {})

    def drop_copies(self, cluster: KnownNodes, group: WorkerGroup, worker: str, node: str) -> list[Message]:
        """Return the commands that remove a worker's copies from other nodes; on its own node it saves them anew."""
        names = saved_names(worker)
        others = [each for each in self.held.get(worker, ()) if each != node and cluster.is_there(each)]
        return [drop_order(cluster, group.spec.name, each, names) for each in others]

    def _savers(self) -> dict[str, tuple[str, Saver]]:
        orders = [(node, saver) for node, each in self.ordered.items() for saver in each]
        return {saver.worker: (node, saver) for node, saver in orders if saver.worker}  # none: ordered when it is back

    def _drop_all_but(self, cluster: KnownNodes, group: WorkerGroup, current: dict[str, set[str]]) -> list[Message]:
        names: dict[str, list[str]] = {}
        ended: dict[str, list[str]] = {}
        for worker, nodes in self.held.items():
            for node in [node for node in nodes if node not in current.get(worker, ())]:
                del nodes[node]
                if worker in group.workers:
                    names.setdefault(node, []).extend(saved_names(worker))
                else:
                    ended.setdefault(node, []).append(worker)
        self.held = {worker: nodes for worker, nodes in self.held.items() if nodes}
        self.wrote = {worker: node for worker, node in self.wrote.items() if worker in self.held}
        there = [node for node in sorted({*names, *ended}) if cluster.is_there(node)]
        task = group.spec.name
        return [drop_order(cluster, task, node, names.get(node, ()), ended.get(node, ())) for node in there]

    def _wanted(self, cluster: KnownNodes, group: WorkerGroup, storage: CheckpointWrites) -> dict[str, list[Saver]]:
        """Return the savers of each node, with their keepers; set `short` if there are fewer keepers than wanted."""
        self.short, way = False, way_of(group.spec)
        if not group.target or group.membership.leaving or not (way.saves_states and group.is_replaceable):
            return {}
        chosen = _choose_replicas(group)
        found: dict[str, list[Saver]] = {}
        for index, replica in enumerate(chosen):
            for place, name in enumerate(replica):
                node = group.workers[name].slot.node
                taken = {group.workers[each[place]].slot.node for each in chosen}
                lacking = COPIES - len(chosen) if index == 0 else 0
                keepers = _keepers(cluster, node, taken, lacking) if lacking else []
                self.short = self.short or (len(keepers) < lacking and way.tracks_states)
                store = storage.store_order(group) if index == 0 and way.tracks_states else None
                found.setdefault(node, []).append(Saver(worker=name, keepers=keepers, store=store))
        return found


def _choose_replicas(group: WorkerGroup) -> list[tuple[str, ...]]:
    """Return the replicas that save: the first, and others that have each place on yet another node."""
    chosen: list[tuple[str, ...]] = []
    nodes: list[set[str]] = []
    for replica in group.membership.replicas():
        there = [group.workers[name].slot.node for name in replica if name in group.workers]
        if len(there) < len(replica):
            continue
        if not chosen:
            chosen, nodes = [replica], [{node} for node in there]
        elif all(node not in others for node, others in zip(there, nodes, strict=True)):
            chosen.append(replica)
            for node, others in zip(there, nodes, strict=True):
                others.add(node)
        if len(chosen) == COPIES:
            break
    return chosen


def _keepers(cluster: KnownNodes, node: str, taken: set[str], count: int) -> list[Keeper]:
    return [each for each in cluster.partners(node) if each.node not in taken][:count]


def saver_of(name: str) -> str:
    """Return the worker that saved the state of this name, empty if it was not saved; a node may say any name."""
    return name.partition(".")[0] if name.rpartition(".")[2] == SAVED else ""
