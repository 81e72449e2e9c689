"""Which nodes keep copies of each other's states in memory, so that few losses at once lose a state. Pure functions.

As in GEMINI (Wang et al., SOSP 2023): groups of as many nodes as there are copies, and one larger group with
what is left over. There is never a group of one. `shapes` says who keeps what inside of a group.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import NamedTuple

from unicron.errors import InvalidInputError
from unicron.snapshots.shapes import Kept, check_copies, kept, odd_group

Group = tuple[str, ...]


class Placement(NamedTuple):
    """Groups of nodes that keep copies for each other.

    Attributes:
        groups: the larger one, where there is one, is the last.
        copies: of each state, its own included; fewer than were asked for where there are not as many nodes.
    """

    groups: tuple[Group, ...]
    copies: int

    def keepers(self) -> Kept:
        """Return for each node the nodes that keep a copy of its state, its own first."""
        return {node: keepers for group in self.groups for node, keepers in kept(group, self.copies).items()}


def place(
    nodes: Sequence[str],
    copies: int,
    racks: Mapping[str, str] | None = None,
    before: Placement | None = None,
) -> Placement:
    """Return the groups of these nodes.

    Groups that lost nobody stay as they are. One that did is filled up with new nodes, or with nodes of the larger
    group, or is merged into that. So one lost node changes its own group and at most one other, and one that joins
    changes one group; only the ninth node of what four copies leave over makes one group of two.

    Where racks are given, new nodes go to groups with nobody of their rack as far as that can be. Where a group that
    changes would have two of one rack even so, one of them changes places with a node of one more group.

    Args:
        nodes: names of all that there are now.
        copies: of each state, its own included.
        racks: by node; nodes of one rack, or behind one switch, fail together. A node with none, or "", is alone.
        before: what there was; with another number of copies it counts for nothing.

    Raises:
        InvalidInputError: less than one copy, or a node comes twice.
    """
    check_copies(copies)
    present, copies = _each_once(nodes), max(min(copies, len(nodes)), 1)
    racks = {node: rack for node, rack in (racks or {}).items() if rack}
    old = before.groups if before and before.copies == copies else ()
    grouped = _each_once(chain.from_iterable(old))
    odd = odd_group(len(nodes), copies)
    new = _Pool([node for node in nodes if node not in grouped], racks)
    wholes, loose, parts = _cut(old, copies, present)
    wanted = (len(nodes) - odd) // copies - len(wholes)
    while loose and wanted > 0:
        wholes.append(loose.pop(0))
        wanted -= 1
    for _ in range(-wanted):
        loose.append(wholes.pop(_fitting(wholes, [*chain.from_iterable(parts), *new.nodes()], racks)))
    kept_on = len(wholes)
    for _ in range(wanted):
        parts.sort(key=len, reverse=True)
        wholes.append(_filled(parts.pop(0) if parts else (), copies, racks, new, parts))
    last = chain(*loose, *sorted(parts, key=len, reverse=True))
    groups = [*wholes, _filled(tuple(last), odd, racks, new, [])] if odd else wholes
    if old:  # else all were placed in the best way
        _set_apart(groups, kept_on, racks)
    return Placement(tuple(groups), copies)


def moves(before: Kept, after: Kept) -> list[tuple[str, str]]:
    """Return the nodes whose states have to be copied to whom, which had none: pairs of node and new keeper."""
    return [
        (node, keeper)
        for node, keepers in after.items()
        for keeper in keepers
        if keeper != node and keeper not in before.get(node, ())
    ]


def without_copy(keepers: Kept, lost: Collection[str]) -> list[str]:
    """Return the nodes whose states have no copy left in memory when these nodes are lost at once."""
    return [node for node in keepers if node in lost and all(keeper in lost for keeper in keepers[node])]


def _each_once(nodes: Iterable[str]) -> set[str]:
    count = Counter(nodes)
    twice = [node for node in count if count[node] > 1]
    if twice:
        raise InvalidInputError(f"node {twice[0]!r} is there {count[twice[0]]} times; give each node once")
    return set(count)


def _cut(old: Iterable[Group], copies: int, present: Collection[str]) -> tuple[list[Group], list[Group], list[Group]]:
    """Return groups that are whole, those of them that are a part of the larger group, and what is left of others.

    The larger group comes apart where `shapes` folds it, so that its parts keep most of their keepers.
    """
    wholes, loose, parts = list[Group](), list[Group](), list[Group]()
    for group in old:
        for at in range(0, len(group), copies):
            left = tuple(node for node in group[at : at + copies] if node in present)
            if len(left) == copies:
                (loose if len(group) > copies else wholes).append(left)
            elif left:
                parts.append(left)
    return wholes, loose, parts


def _filled(group: Group, size: int, racks: Mapping[str, str], new: "_Pool", parts: list[Group]) -> Group:
    """Return the group with as many nodes as it shall have: new ones, then some out of the smallest of `parts`."""
    while len(group) < size:
        there = Counter(racks[node] for node in group if node in racks)
        if new:
            group += (new.take(there),)
        else:
            smallest = [part for part in parts if len(part) == len(parts[-1])]
            group += (_Pool(chain(*smallest), racks).take(there),)
            left = (tuple(node for node in part if node != group[-1]) for part in parts)
            parts[:] = sorted(filter(None, left), key=len, reverse=True)
    return group


def _set_apart(groups: list[Group], begin: int, racks: Mapping[str, str]) -> None:
    """Let nodes that share a rack with others of their group change places, in the groups from `begin` on."""
    stuck = set[str]()  # racks that are nearly everywhere are not searched for again and again
    for number in range(begin, len(groups)):
        for place, node in enumerate(groups[number]):
            crowded = _shares(groups[number], place, node, racks) and racks[node] not in stuck
            if crowded and not _change_places(groups, number, place, racks):
                stuck.add(racks[node])


def _change_places(groups: list[Group], number: int, place: int, racks: Mapping[str, str]) -> bool:
    """Swap a node for the first of another group where none of both shares a rack then, and return if there is one."""
    mine = groups[number]
    for at, theirs in enumerate(groups):
        for spot, node in enumerate(theirs):
            if at != number and not _shares(mine, place, node, racks) and not _shares(theirs, spot, mine[place], racks):
                groups[at] = (*theirs[:spot], mine[place], *theirs[spot + 1 :])
                groups[number] = (*mine[:place], node, *mine[place + 1 :])
                return True
    return False


def _shares(group: Group, place: int, node: str, racks: Mapping[str, str]) -> bool:
    """Return whether a node at this place of a group would have others of its rack beside it."""
    rack = racks.get(node)
    return rack is not None and any(racks.get(other) == rack for spot, other in enumerate(group) if spot != place)


def _fitting(wholes: Sequence[Group], joining: Sequence[str], racks: Mapping[str, str]) -> int:
    """Return which group has the fewest nodes in the racks of those that are to join it; the last of these."""
    theirs = {racks[node] for node in joining if node in racks}
    shared = [sum(racks.get(node) in theirs for node in group) for group in wholes]
    return max(range(len(wholes)), key=lambda place: (-shared[place], place))


class _Pool:
    """Nodes without a group, by rack.

    Taking each time from the rack with most nodes left, of those that a group has not, spreads all groups if that can
    be done (Gale and Ryser's theorem on matrices of zeros and ones).
    """

    def __init__(self, nodes: Iterable[str], racks: Mapping[str, str]) -> None:
        self._waiting: dict[str, deque[str]] = {}
        for node in nodes:
            self._waiting.setdefault(racks.get(node, ""), deque()).append(node)
        self._heap = [self._entry(place, rack) for place, rack in enumerate(self._waiting)]
        heapify(self._heap)

    def __bool__(self) -> bool:
        return bool(self._heap)

    def nodes(self) -> list[str]:
        """Return all of them."""
        return [node for waiting in self._waiting.values() for node in waiting]

    def take(self, there: Mapping[str, int]) -> str:
        """Take a node out, if possible of a rack of which none is `there`, a count by rack.

        Raises:
            IndexError: there is none.
        """
        seen = [heappop(self._heap)]
        while self._heap and there.get(seen[-1][2], 0):
            seen.append(heappop(self._heap))
        best = min(seen, key=lambda entry: (there.get(entry[2], 0), entry))
        node = self._waiting[best[2]].popleft()
        for entry in seen:
            if self._waiting[entry[2]]:
                heappush(self._heap, self._entry(entry[1], entry[2]))
        return node

    def _entry(self, place: int, rack: str) -> tuple[int, int, str]:
        return -(len(self._waiting[rack]) if rack else 1), place, rack
