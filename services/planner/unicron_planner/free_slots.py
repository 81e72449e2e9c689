"""The free slots of nodes, from which placement takes."""

from bisect import insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from heapq import heapify, heappop, heappush
from operator import neg

from unicron.contracts.tasks import SlotRef


class FreeSlots:
    """The free slots. Nodes stand in one heap for each number of free slots; entries that are out of date are skipped.

    `pop_most` and `pop_for` take a node out; the caller puts it back with `push`.
    """

    def __init__(self, free: Mapping[str, Iterable[int]]) -> None:
        self._free = {node: sorted(slots, reverse=True) for node, slots in free.items()}
        self._listed: dict[str, int] = {}
        self._heaps: dict[int, list[str]] = defaultdict(list)
        for node, slots in self._free.items():
            self._heaps[len(slots)].append(node)
            self._listed[node] = len(slots)
        for heap in self._heaps.values():
            heapify(heap)

    def nodes(self) -> Iterator[str]:
        """Return the nodes with free slots."""
        return (node for node, slots in self._free.items() if slots)

    def count(self, node: str) -> int:
        """Return how many slots of `node` are free."""
        return len(self._free.get(node, ()))

    def allocate(self, node: str, number: int = 1) -> list[SlotRef]:
        """Return the first `number` free slots of `node`."""
        return [SlotRef(node=node, slot=self._free[node].pop()) for _ in range(number)]

    def give(self, slots: Iterable[SlotRef]) -> None:
        """Make slots free again."""
        for slot in slots:
            insort(self._free.setdefault(slot.node, []), slot.slot, key=neg)
            self.push(slot.node)

    def push(self, node: str) -> None:
        """List a node by the free slots that it has now."""
        count = self.count(node)
        if count and self._listed.get(node) != count:
            self._listed[node] = count
            heappush(self._heaps[count], node)

    def pop_most(self) -> str | None:
        """Take out the node with most free slots, the first by name."""
        return self._pop(sorted(self._heaps, reverse=True))

    def pop_for(self, number: int) -> str | None:
        """Take out the node that fits `number` slots best: the fewest free ones that are enough, else the most."""
        return self._pop(sorted(count for count in self._heaps if count >= number)) or self.pop_most()

    def _pop(self, counts: Iterable[int]) -> str | None:
        for count in counts:
            heap = self._heaps[count]
            while heap:
                node = heappop(heap)
                if self._listed.get(node) == count == self.count(node):
                    del self._listed[node]
                    return node
            del self._heaps[count]
        return None
