"""Which node keeps a copy of which state inside one group of nodes (after Wang et al., GEMINI, SOSP 2023). Pure.

Every state has m copies and every node keeps m, its own included, so that memory is bounded; a state is lost if all
nodes of its copy set are. The fewer different copy sets there are, the fewer ways to lose one. In a group of m nodes
there is one: each keeps a copy for each. A larger group has to choose.

GEMINI makes it a ring, in which each node has its copies on the m - 1 next: one copy set a node. Here the nodes beyond
the first m are folded in instead: they stay together, and share what the first m have left, among which the same rule
holds again. Of seven nodes with four copies that makes five copy sets, where the ring has seven. With two copies, and
in a group of m + 1, both are the same. `python -m benchmarks.copies` shows by enumeration that for up to 12 nodes and 4
copies no placement survives more sets of k lost nodes, for any k.
"""

from collections.abc import Iterator, Sequence

from unicron.errors import InvalidInputError

Kept = dict[str, tuple[str, ...]]
"""For each node, the nodes that keep a copy of its state, its own first."""

NINE_COPIES = 4
NINE = (
    (0, 1, 2, 3),
    (1, 0, 2, 3),
    (2, 0, 1, 3),
    (3, 2, 7, 8),
    (4, 5, 6, 7),
    (5, 4, 6, 8),
    (6, 4, 5, 8),
    (7, 4, 5, 6),
    (8, 0, 1, 7),
)
"""Nine nodes with four copies, by place: five copy sets, where a group of four and one of five have six.

The enumeration found it; no other number of nodes up to 12 has such an exception.
"""


def check_copies(copies: int) -> None:
    """Refuse numbers of copies that can't be.

    Raises:
        InvalidInputError: less than one, the node's own.
    """
    if copies < 1:
        raise InvalidInputError(f"{copies} copies of a state; give 1, which is the node's own, or more")


def odd_group(nodes: int, copies: int) -> int:
    """Return the size of the one group that does not have as many nodes as there are copies; 0 where all have.

    Never a group of fewer nodes than copies, unless there are no more.
    """
    if nodes <= copies:
        return nodes % copies
    rest = nodes % copies
    if copies == NINE_COPIES and rest == len(NINE) % copies and nodes >= len(NINE):
        return len(NINE)
    return copies + rest if rest else 0


def split(nodes: Sequence[str], copies: int) -> Iterator[tuple[str, ...]]:
    """Yield groups of nodes in the order given, the odd one last."""
    whole = len(nodes) - odd_group(len(nodes), copies)
    for at in range(0, whole, copies):
        yield tuple(nodes[at : at + copies])
    if whole < len(nodes):
        yield tuple(nodes[whole:])


def kept(nodes: Sequence[str], copies: int) -> Kept:
    """Return who keeps a copy of whose state: of one group, or of nodes to be split in the order given.

    Args:
        nodes: names.
        copies: of each state, its own included; fewer nodes than that keep one each.
    """
    found: Kept = {}
    for group in split(nodes, copies):
        if len(group) <= copies:
            found |= {node: _own_first(node, group) for node in group}
        elif (len(group), copies) == (len(NINE), NINE_COPIES):
            found |= {group[keepers[0]]: tuple(group[keeper] for keeper in keepers) for keepers in NINE}
        else:
            found |= _folded(group, copies)
    return found


def _folded(group: Sequence[str], copies: int) -> Kept:
    """Return who keeps what in a group of more nodes than copies, but less than twice as many.

    As many of the first `copies` nodes as there are others go on as a group of their own. The states of all the rest
    are on all others and on some of the first, in turns.
    """
    first, others = tuple(group[:copies]), tuple(group[copies:])
    turns = kept(first, copies - len(others))
    found = {node: _own_first(node, first) for node in first[: len(others)]}
    found |= {node: turns[node] + others for node in first[len(others) :]}
    return found | {
        node: _own_first(node, others) + turns[turn] for node, turn in zip(others, first[: len(others)], strict=True)
    }


def _own_first(node: str, group: Sequence[str]) -> tuple[str, ...]:
    return (node, *(other for other in group if other != node))
