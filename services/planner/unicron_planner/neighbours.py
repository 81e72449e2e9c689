"""Distances of nodes: which are near to one another, and which fail together."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from unicron.contracts.tasks import SlotRef
from unicron.snapshots.zones import failure_zones
from unicron_planner.state import AdmittedNode


@dataclass(frozen=True)
class Neighbours:
    """The known topology of a cluster.

    Attributes:
        domains: of NVLink, by node, where that is known.
        zones: by node, where a rack or a domain is known; nodes of one zone fail together.
    """

    domains: Mapping[str, str] = field(default_factory=dict)
    zones: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def among(cls, nodes: Mapping[str, AdmittedNode]) -> "Neighbours":
        """Return what these nodes have said of themselves."""
        domains = {name: node.domain for name, node in nodes.items() if node.domain}
        racks = {name: node.rack for name, node in nodes.items() if node.rack}
        return cls(domains, failure_zones(racks, domains)) if domains or racks else UNKNOWN

    def are_near(self, slots: Iterable[SlotRef]) -> bool:
        """Return whether slots are on one node, or in one domain."""
        nodes = {slot.node for slot in slots}
        if len(nodes) < 2:
            return True
        domains = {self.domains.get(node) for node in nodes}
        return len(domains) == 1 and None not in domains

    def cross(self, slots: Iterable[SlotRef]) -> bool:
        """Return whether slots are known to be in different domains; of nodes of no known domain nobody knows it."""
        return len({self.domains.get(slot.node) for slot in slots}) > 1

    def zones_of(self, nodes: Iterable[str]) -> set[str]:
        """Return the zones of nodes; one of which none is known is a zone of its own."""
        return {self.zones.get(node, f"node {node}") for node in nodes}

    def elsewhere(self, nodes: Collection[str], others: Iterable[str]) -> Iterator[str]:
        """Return those of `others` that do not fail with `nodes`, where all of these fail together; else none."""
        zones = self.zones_of(nodes) if self.zones else set()
        if len(zones) == 1:
            yield from (node for node in others if self.zones.get(node, f"node {node}") not in zones)

    def keep_apart(self, kept: list[int], dropped: list[int], nodes: Sequence[str]) -> None:
        """Swap the last of `kept` for one of `dropped`, where all kept ones would fail together and need not.

        Args:
            kept: numbers of workers or groups that stay.
            dropped: numbers of those that do not.
            nodes: that each of them is on.
        """
        there = {nodes[number]: number for number in reversed(dropped)}
        other = next(self.elsewhere([nodes[number] for number in kept], there), None) if len(kept) > 1 else None
        if other is not None:
            dropped.remove(there[other])
            dropped.append(kept.pop())
            kept.append(there[other])


UNKNOWN = Neighbours()
"""Nobody has said anything: each node is for itself."""
