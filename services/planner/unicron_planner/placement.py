"""From worker counts to slots: which workers stay or go, and where new ones start.

Two kinds of tasks want different things. A task of data-parallel workers spreads over nodes, since a peer elsewhere is
what keeps its state alive when a node dies. A task whose workers form tensor-parallel groups wants each group inside
one node, where links are fast, and whole nodes before parts of them; its data-parallel peers are other groups.
Where NVLink domains are known, a group that finds no node stays inside of a domain; where it is known which nodes fail
together, no task of two replicas has all of them among these if that can be.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush

from unicron.contracts.tasks import ParallelLayout, SlotRef
from unicron_planner.free_slots import FreeSlots
from unicron_planner.holdings import PlannedSlots
from unicron_planner.neighbours import UNKNOWN, Neighbours


def place(
    usable: Mapping[str, Sequence[int]],
    held: PlannedSlots,
    sizes: Mapping[str, int],
    shapes: Mapping[str, ParallelLayout] | None = None,
    near: Neighbours = UNKNOWN,
    confined: Collection[str] = (),
) -> dict[str, list[SlotRef]]:
    """Return the slots of each task, in rank order.

    No worker moves that need not: a task keeps the slots it holds up to its new size, so a task whose size stays and
    whose nodes are usable is not touched.

    A task that shrinks gives up slots where most of its workers are. A new worker starts on the node with the fewest
    workers of its own task; among these on the node with most free slots, then the first by name.

    A task whose replicas have several workers keeps those that are whole, and after a change of their shape those that
    its slots make up as they are. A further replica starts on a node that holds a part of one, then on one that the
    task uses already, then on whole nodes while it needs one, and last on the node whose free slots fit best. Only when
    no node has room for a whole one does a replica span nodes, those of one domain if that can be, and only when no
    node has room for its tensor-parallel ranks do these, likewise. If the task shrinks, it leaves the nodes where it
    has the fewest workers.

    Args:
        usable: slot numbers that may be used, by node; lost and draining nodes are not in it.
        held: slots that each of these tasks has now, in rank order; nobody else has any.
        sizes: workers that each task gets, in order of submission; their sum is at most the number of usable slots.
        shapes: of one replica, where that is more than one worker.
        near: which nodes are near to one another, and which fail together, where that is known.
        confined: tasks whose tensor-parallel ranks are to be in one domain even if they have to move.
    """
    shapes = {task: shape for task, shape in (shapes or {}).items() if shape.replica_workers > 1}
    displaced = held.displaced(usable)
    displaced |= {
        task for task in confined if any(map(near.cross, tensor_groups(held.slots_of(task), shapes.get(task))))
    }
    changed = [task for task, size in sizes.items() if task in displaced or len(held.slots_of(task)) != size]
    placed = {task: _living(usable, held.slots_of(task)) if task in changed else held.slots_of(task) for task in sizes}
    spread = [task for task in changed if task not in shapes]
    grouped = [task for task in changed if task in shapes]
    growing = [task for task in changed if len(placed[task]) < sizes[task]]
    shrinking = [task for task in spread if len(placed[task]) > sizes[task]]

    wanted = Counter(slot.node for task in growing for slot in placed[task]) if shrinking else Counter[str]()
    pool = FreeSlots(held.free(usable) if growing or grouped else {})
    for task in shrinking:
        placed[task], dropped = _shrunk(placed[task], sizes[task], wanted, near)
        pool.give(dropped)

    # Those that shrink free slots first; then wide replicas choose before narrow ones, which fit anywhere.
    # Where domains are known, what must stay in one comes before what may be in several.
    width = {task: (-shapes[task].tensor if near.domains else 0, -shapes[task].replica_workers) for task in grouped}
    for task in sorted(grouped, key=lambda task: (task in growing, width[task])):
        shape = shapes[task]
        replicas = _Grouped(pool, placed[task], held.slots_of(task), shape.replica_workers, shape.tensor, near)
        placed[task] = replicas.resized(sizes[task])
    narrow = [task for task in growing if task in spread]
    for task in narrow:  # a task on a single node chooses before those that can be anywhere
        if sizes[task] > 1:
            _spread(pool, placed[task], sizes[task], near, nodes=2)
    for task in narrow:
        _spread(pool, placed[task], sizes[task], near)
    return placed


def tensor_groups(slots: Sequence[SlotRef], shape: ParallelLayout | None) -> list[Sequence[SlotRef]]:
    """Return the slots of each tensor-parallel group, given those of all ranks; none where groups are single ranks."""
    tensor = 1 if shape is None else shape.tensor
    return [slots[first : first + tensor] for first in range(0, len(slots), tensor)] if tensor > 1 else []


def _living(usable: Mapping[str, Sequence[int]], slots: Iterable[SlotRef]) -> list[SlotRef]:
    """Return those of `slots` that can still be used."""
    return [slot for slot in slots if slot.slot in usable.get(slot.node, ())]


class _Grouped:
    """A task while its new slots are found in groups: its replicas, or the tensor-parallel ranks of what is left over.

    Attributes:
        chosen: groups it has so far.
        loose: living slots that are in none of them, by node, in rank order.
    """

    def __init__(
        self,
        pool: FreeSlots,
        living: Sequence[SlotRef],
        held: Sequence[SlotRef],
        width: int,
        tensor: int,
        near: Neighbours,
    ) -> None:
        self._pool, self._held, self._width, self._tensor, self._near = pool, held, width, tensor, near
        self._own = Counter(slot.node for slot in living)
        self.chosen: list[list[SlotRef]] = []
        there, whole = set(living), set[SlotRef]()
        for first in range(0, len(held) - width + 1, width):
            group = list(held[first : first + width])
            if there.issuperset(group) and self._is_close(group):
                self.chosen.append(group)
                whole.update(group)
        self.loose: dict[str, list[SlotRef]] = defaultdict(list)
        self._loosen(slot for slot in living if slot not in whole)

    def resized(self, size: int) -> list[SlotRef]:
        """Return the slots for `size` workers, and give those back that are not needed."""
        count = size // self._width
        self._leave(len(self.chosen) - count)
        self._complete(count)
        self._start(count)
        self._start_in_domains(count)
        rest = self._rest(size - self._width * len(self.chosen))
        rank = {slot: rank for rank, slot in enumerate(self._held)}
        self.chosen.sort(key=lambda group: min(rank.get(slot, len(rank)) for slot in group))
        return [slot for group in self.chosen for slot in group] + rest

    def _is_close(self, group: list[SlotRef]) -> bool:
        """Return whether the tensor-parallel ranks of a group are on one node each, or in one domain."""
        ranks = (group[first : first + self._tensor] for first in range(0, len(group), self._tensor))
        return all(map(self._near.are_near, ranks))

    def _loosen(self, slots: Iterable[SlotRef]) -> None:
        for slot in slots:
            self.loose[slot.node].append(slot)

    def _rest(self, number: int) -> list[SlotRef]:
        """Return `number` slots for the ranks that are in no whole group, and give the loose ones back."""
        if self._tensor < self._width:
            living = [slot for slots in self.loose.values() for slot in slots]
            return _Grouped(self._pool, living, self._held, self._tensor, self._tensor, self._near).resized(number)
        rest = self._remaining(number)
        for slots in self.loose.values():
            self._pool.give(slots)
        return rest

    def _leave(self, number: int) -> None:
        """Break up `number` groups: where the task has the fewest workers, the highest ranks first."""
        if number <= 0:
            return
        by_use = sorted(range(len(self.chosen)), key=lambda index: (self._own[self.chosen[index][0].node], -index))
        left, stay = by_use[:number], sorted(by_use[number:])
        self._near.keep_apart(stay, left, [group[0].node for group in self.chosen])
        for index in set(left):
            self._loosen(self.chosen[index])
        self.chosen = [group for index, group in enumerate(self.chosen) if index not in left]

    def _complete(self, count: int) -> None:
        """Form groups on nodes with loose workers, those first that need the fewest new ones."""
        most = sorted(self.loose, key=lambda node: -len(self.loose[node]))
        for slots in (self.loose[node] for node in most):  # after a change of shape they may suffice as they are
            while len(slots) >= self._width and len(self.chosen) < count:
                self.chosen.append(slots[: self._width])
                del slots[: self._width]
        for node in sorted(most, key=lambda node: -len(self.loose[node])):
            slots = self.loose[node]
            if slots and len(self.chosen) < count and len(slots) + self._pool.count(node) >= self._width:
                self.chosen.append(slots + self._pool.allocate(node, self._width - len(slots)))
                self.loose[node] = []
            self._pool.push(node)

    def _start(self, count: int) -> None:
        """Start further groups, as long as any node has room for a whole one."""
        self._start_apart(count)
        for node in self._own:
            self._fill(node, count)
            self._pool.push(node)
        while (missing := count - len(self.chosen)) > 0:
            other = self._pool.pop_for(missing * self._width)
            if other is None:
                return
            room = self._pool.count(other) >= self._width
            self._fill(other, count)
            self._pool.push(other)
            if not room:
                return

    def _start_apart(self, count: int) -> None:
        """Start a group where it does not fail with the others, if these all fail together; on a node with room."""
        if not self._near.zones or count < 2:
            return
        for node in self._own:
            self._fill(node, 1)
            self._pool.push(node)
        if not self.chosen and (first := self._pool.pop_for(count * self._width)) is not None:
            self._fill(first, 1)
            self._pool.push(first)
        room = (node for node in self._pool.nodes() if self._pool.count(node) >= self._width)
        others = self._near.elsewhere([group[0].node for group in self.chosen], room)
        if (other := min(others, key=lambda node: (self._pool.count(node), node), default=None)) is not None:
            self._fill(other, min(count, len(self.chosen) + 1))
            self._pool.push(other)

    def _start_in_domains(self, count: int) -> None:
        """Start further groups, as long as any domain has room for a whole one: where most workers are, then best fit.

        That uses up what each domain has room for, so no other choice would make more groups in one domain each.
        """
        if len(self.chosen) == count or not self._near.domains:
            return
        domains = self._domains_with_room()
        used = self._near.zones_of(group[0].node for group in self.chosen)
        zones = {domain: self._near.zones_of(nodes) for domain, nodes in domains.items()}
        room = {domain: sum(map(self._room, nodes)) for domain, nodes in domains.items()}
        own = {domain: sum(len(self.loose.get(node, ())) for node in nodes) for domain, nodes in domains.items()}

        def rank(domain: str) -> tuple[bool, int, bool, int, str]:
            enough = room[domain] >= (count - len(self.chosen)) * self._width
            together = len(used) == 1 and zones[domain] <= used
            return together, -own[domain], not enough, room[domain] if enough else -room[domain], domain

        while domains and len(self.chosen) < count:
            best = min(domains, key=rank)
            number = min(count - len(self.chosen), room[best] // self._width if len(used) > 1 else 1)
            slots = self._carved(domains[best], number * self._width)
            self.chosen += [slots[first : first + self._width] for first in range(0, len(slots), self._width)]
            used |= self._near.zones_of(slot.node for slot in slots)
            room[best] -= len(slots)
            own[best] = sum(len(self.loose.get(node, ())) for node in domains[best])
            if room[best] < self._width:
                del domains[best]

    def _room(self, node: str) -> int:
        return len(self.loose.get(node, ())) + self._pool.count(node)

    def _domains_with_room(self) -> dict[str, list[str]]:
        """Return the nodes with free or loose slots of each domain that has room for a group."""
        found: dict[str, list[str]] = defaultdict(list)
        for node in dict.fromkeys([*self.loose, *self._pool.nodes()]):
            if domain := self._near.domains.get(node):
                found[domain].append(node)
        return {domain: nodes for domain, nodes in found.items() if sum(map(self._room, nodes)) >= self._width}

    def _carved(self, nodes: Sequence[str], number: int) -> list[SlotRef]:
        """Return `number` slots of nodes that have as many, in tensor-parallel groups on one node where that can be."""
        found: list[SlotRef] = []
        for step in (self._tensor, 1):
            for node in sorted(nodes, key=lambda node: (-len(self.loose.get(node, ())), -self._room(node), node)):
                while len(found) < number and self._room(node) >= step:
                    found += self._drawn(node, step)
        for node in nodes:
            self._pool.push(node)
        return found

    def _drawn(self, node: str, number: int) -> list[SlotRef]:
        """Return slots of a node: the task's own loose ones, then free ones."""
        own = self.loose.get(node, [])
        stay, self.loose[node] = own[:number], own[number:]
        return stay + self._pool.allocate(node, number - len(stay))

    def _fill(self, node: str, count: int) -> None:
        while len(self.chosen) < count and self._pool.count(node) >= self._width:
            self.chosen.append(self._pool.allocate(node, self._width))

    def _remaining(self, number: int) -> list[SlotRef]:
        """Return `number` slots: on one node, where that is possible."""
        nodes = sorted(self._own, key=lambda node: -len(self.loose.get(node, ())))
        fitting = [node for node in nodes if len(self.loose.get(node, ())) + self._pool.count(node) >= number]
        nodes = fitting[:1] or nodes
        found: list[SlotRef] = []
        for node in nodes:
            slots = self.loose.get(node, [])
            stay = min(number - len(found), len(slots))
            found, self.loose[node] = found + slots[:stay], slots[stay:]
        for node in nodes:
            found += self._pool.allocate(node, min(number - len(found), self._pool.count(node)))
            self._pool.push(node)
        while len(found) < number:
            other = self._pool.pop_for(number - len(found))
            if other is None:
                raise AssertionError("sizes add up to more than the usable slots")
            found += self._pool.allocate(other, min(number - len(found), self._pool.count(other)))
            self._pool.push(other)
        return found


def _shrunk(
    slots: Sequence[SlotRef], size: int, wanted: Mapping[str, int], near: Neighbours
) -> tuple[list[SlotRef], list[SlotRef]]:
    """Return which slots to keep and which to give up: from crowded nodes, of use to growing tasks, of high rank."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, slot in enumerate(slots):
        ranks[slot.node].append(rank)
    heap = [(-len(own), wanted.get(node, 0), -own[-1], node) for node, own in ranks.items()]
    heapify(heap)
    dropped: set[int] = set()
    while len(slots) - len(dropped) > size:
        _, use, _, node = heappop(heap)
        own = ranks[node]
        dropped.add(own.pop())
        if own:
            heappush(heap, (-len(own), use, -own[-1], node))
    kept, left = [rank for rank in range(len(slots)) if rank not in dropped], sorted(dropped)
    near.keep_apart(kept, left, [slot.node for slot in slots])
    return [slots[rank] for rank in sorted(kept)], [slots[rank] for rank in sorted(left)]


def _spread(pool: FreeSlots, slots: list[SlotRef], size: int, near: Neighbours, nodes: float = math.inf) -> None:
    """Add slots up to `size`, or until they are on so many `nodes`: first where the task has the fewest workers.

    Before that, one where it does not fail with all others of the task, if there is such a slot.
    """
    own, together = Counter(slot.node for slot in slots), bool(near.zones)
    aside: list[tuple[int, int, str]] = []  # nodes with workers of the task: how many, free slots, name
    while len(slots) < size and len(own) < nodes:
        others = near.elsewhere(own, pool.nodes()) if own and together else ()
        together = together and not own
        other = min(others, key=lambda node: (-pool.count(node), node), default=None)
        node = pool.pop_most() if other is None else other
        while node is not None and own[node]:
            heappush(aside, (own[node], -pool.count(node), node))
            node = pool.pop_most()
        if node is None:
            node = heappop(aside)[-1]
        slots += pool.allocate(node)
        own[node] += 1
        if pool.count(node):
            heappush(aside, (own[node], -pool.count(node), node))
    for _, _, node in aside:
        pool.push(node)
