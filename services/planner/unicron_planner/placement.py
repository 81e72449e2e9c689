"""From worker counts to slots: who stays, who goes, and where new workers start."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from unicron.contracts.tasks import SlotRef


def place(
    usable: Mapping[str, Collection[int]], held: Mapping[str, Sequence[SlotRef]], sizes: Mapping[str, int]
) -> dict[str, list[SlotRef]]:
    """Return the slots of each task, in rank order.

    No worker moves that need not: a task keeps the slots it holds up to its new size, so a task whose size stays and
    whose nodes are usable is not touched. A task that shrinks gives up slots where most of its workers are. A new
    worker starts on the node with the fewest workers of its own task, since a data-parallel peer elsewhere is what
    keeps the task's state alive when a node dies; among these on the node with most free slots, then the first by name.

    Args:
        usable: slot numbers that may be used, by node; lost and draining nodes are not in it.
        held: slots that each task has now, in rank order.
        sizes: workers that each task gets, in order of submission; their sum is at most the number of usable slots.
    """
    placed = {task: [slot for slot in held.get(task, ()) if slot.slot in usable.get(slot.node, ())] for task in sizes}
    growing = [task for task, size in sizes.items() if len(placed[task]) < size]
    wanted = Counter(slot.node for task in growing for slot in placed[task])
    for task, size in sizes.items():
        while len(placed[task]) > size:
            placed[task].remove(_dispensable(placed[task], wanted))

    taken = {slot for slots in placed.values() for slot in slots}
    free = {
        node: [slot for slot in sorted(slots) if SlotRef(node=node, slot=slot) not in taken]
        for node, slots in sorted(usable.items())
    }
    while growing:
        task = min(growing, key=lambda name: _spans(placed[name], sizes[name]))
        own = Counter(slot.node for slot in placed[task])
        node = min((node for node in free if free[node]), key=lambda node: (own[node], -len(free[node])))
        placed[task].append(SlotRef(node=node, slot=free[node].pop(0)))
        if len(placed[task]) == sizes[task]:
            growing.remove(task)
    return placed


def _dispensable(slots: Sequence[SlotRef], wanted: Mapping[str, int]) -> SlotRef:
    """Return the slot to give up: from a crowded node, of use to growing tasks that aren't there yet, of high rank."""
    own = Counter(slot.node for slot in slots)
    return min(reversed(slots), key=lambda slot: (-own[slot.node], wanted.get(slot.node, 0)))


def _spans(slots: Sequence[SlotRef], size: int) -> bool:
    """Return whether a task of `size` is spread over nodes as it should; those that aren't choose slots first."""
    return size < 2 or len({slot.node for slot in slots}) > 1
