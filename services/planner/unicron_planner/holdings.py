"""Which task has which slots by the plan in force: by task in rank order, and by node."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from unicron.contracts.tasks import SlotRef

Slots = dict[str, list[int]]
"""Numbers of slots by node."""


class PlannedSlots:
    """The slots that tasks have; kept from one plan to the next, so that only what moves costs anything.

    Attributes:
        slots: of each task, in rank order.
        on: on each node with workers, the task in each slot.
    """

    def __init__(self, slots: Mapping[str, list[SlotRef]] | None = None) -> None:
        self.slots: dict[str, list[SlotRef]] = {}
        self.on: dict[str, dict[int, str]] = {}
        self.replace(slots or {})

    def slots_of(self, task: str) -> list[SlotRef]:
        """Return the slots of a task, in rank order."""
        return self.slots.get(task, [])

    def replace(self, slots: Mapping[str, list[SlotRef]]) -> None:
        """Let the tasks have `slots`, and all other tasks none."""
        moved = {task: given for task, given in slots.items() if given is not self.slots.get(task)}
        for task in [*moved, *(self.slots.keys() - slots.keys())]:
            self.drop(task)
        for task, given in moved.items():
            self.slots[task] = given
            for slot in given:
                self.on.setdefault(slot.node, {})[slot.slot] = task

    def drop(self, task: str) -> None:
        """Take all slots from a task."""
        for slot in self.slots.pop(task, ()):
            there = self.on[slot.node]
            del there[slot.slot]
            if not there:
                del self.on[slot.node]

    def lost_with(self, nodes: Iterable[str]) -> dict[str, int]:
        """Return how many workers each task loses with `nodes`."""
        return dict(Counter(task for node in nodes for task in self.on.get(node, {}).values()))

    def displaced(self, usable: Mapping[str, Sequence[int]]) -> set[str]:
        """Return the tasks with workers in slots that are not `usable`."""
        found: set[str] = set()
        for node, there in self.on.items():
            if not there.keys() <= set(usable.get(node, ())):
                can = usable.get(node, ())
                found.update(task for slot, task in there.items() if slot not in can)
        return found

    def free(self, usable: Mapping[str, Sequence[int]]) -> dict[str, set[int]]:
        """Return those of the `usable` slots that no task has, on the nodes with any."""
        free = {node: set(slots).difference(self.on.get(node, ())) for node, slots in usable.items()}
        return {node: slots for node, slots in free.items() if slots}
