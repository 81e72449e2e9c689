"""Does any placement of copies survive more losses? All of them are looked through.

A placement is n copy sets of m nodes each, one for each node's state, so that each node is in m of them: what it can
keep. Which node owns which set does not matter here; there is always a way to give each node one that it is in (Hall's
theorem). A set of k lost nodes is survived if no copy set is a part of it.

The search adds one copy set after the other, and how many nodes have it, to the first node that is in too few. It drops
what is the same but for the names of nodes, and what already loses as many sets of k nodes as the best known does, for
each k. Beside it stands GEMINI's mixed placement, in which what is left over forms a ring (SOSP 2023).
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from unicron.snapshots.shapes import kept

Counts = tuple[int, ...]
"""For each k, how many sets of k lost nodes contain a copy set."""


class Partial(NamedTuple):
    """Some copy sets of a placement.

    Attributes:
        sets: as bits, a node each; with how many nodes have it.
        fatal: a bit for each set of lost nodes that contains one of them.
        room: for each node, in how many more sets it is to be.
    """

    sets: tuple[tuple[int, int], ...]
    fatal: int
    room: tuple[int, ...]


class Space:
    """All sets of lost nodes of one size of cluster.

    Of interest are those of at least m nodes, since fewer are always survived, and of at most n - n / m: who is left
    keeps m copies each, and so must be n / m nodes at least.
    """

    def __init__(self, nodes: int, copies: int) -> None:
        self.nodes, self.copies = nodes, copies
        everything = (1 << (1 << nodes)) - 1
        holding = [
            everything // ((1 << (2 << node)) - 1) * (((1 << (1 << node)) - 1) << (1 << node)) for node in range(nodes)
        ]
        self.fatal = {
            sum(1 << node for node in chosen): _all(holding[node] for node in chosen)
            for chosen in itertools.combinations(range(nodes), copies)
        }
        self.layers = dict.fromkeys(range(copies, nodes - -(-nodes // copies) + 1), 0)
        for lost in range(1 << nodes):
            if lost.bit_count() in self.layers:
                self.layers[lost.bit_count()] |= 1 << lost

    def counts(self, fatal: int) -> Counts:
        """Return how many of the sets of each size in question are among these."""
        return tuple((fatal & layer).bit_count() for layer in self.layers.values())

    def of(self, sets: Iterable[int]) -> Counts:
        """Return how many sets of each size are fatal to a placement."""
        fatal = 0
        for each in sets:
            fatal |= self.fatal[each]
        return self.counts(fatal)


def _all(masks: Iterable[int]) -> int:
    found = -1
    for mask in masks:
        found &= mask
    return found


def ours(nodes: int, copies: int) -> set[int]:
    """Return the copy sets of the placement that is used."""
    names = {str(node): node for node in range(nodes)}
    return {sum(1 << names[keeper] for keeper in keepers) for keepers in kept(list(names), copies).values()}


def mixed(nodes: int, copies: int) -> set[int]:
    """Return the copy sets of GEMINI's mixed placement."""
    whole = nodes // copies * copies - (copies if nodes % copies else 0)
    sets = {sum(1 << node for node in range(at, at + copies)) for at in range(0, whole, copies)}
    ring = range(whole, nodes)
    return sets | {sum(1 << ring[(place + step) % len(ring)] for step in range(copies)) for place in range(len(ring))}


def best(space: Space, known: Counts) -> tuple[Counts, int]:
    """Return for each k the fewest fatal sets that any placement has, and how many partial ones were looked at.

    Args:
        space: all sets.
        known: of a placement, which cuts the search.
    """
    least, looked = list(known), 0
    level = [Partial((), 0, (space.copies,) * space.nodes)]
    while level:
        following: dict[Any, Partial] = {}
        for partial in level:
            for more in _extended(space, partial, least):
                if any(more.room):
                    following.setdefault(_form(more, space.nodes), more)
                else:
                    least = [min(pair) for pair in zip(least, space.counts(more.fatal), strict=True)]
        level = list(following.values())
        looked += len(level)
    return tuple(least), looked


def _extended(space: Space, partial: Partial, least: Sequence[int]) -> Iterator[Partial]:
    """Yield the ways to add one more copy set, and how many nodes have it, that may still be better for some k."""
    member = _members(partial, space.nodes)
    short = {kind: node for node, kind in enumerate(member) if partial.room[node]}
    for chosen in min((list(_choices(space, partial, member, node)) for node in short.values()), key=len):
        fatal = partial.fatal | space.fatal[chosen]
        if not any(count < bound for count, bound in zip(space.counts(fatal), least, strict=True)):
            continue
        inside = [node for node in range(space.nodes) if chosen >> node & 1]
        for times in range(1, min(partial.room[node] for node in inside) + 1):
            room = tuple(left - times * (chosen >> node & 1) for node, left in enumerate(partial.room))
            yield Partial((*partial.sets, (chosen, times)), fatal, room)


def _members(partial: Partial, nodes: int) -> list[tuple[int, ...]]:
    """Return for each node in which of the sets it is; nodes of which that is the same are alike."""
    return [tuple(place for place, (each, _) in enumerate(partial.sets) if each >> node & 1) for node in range(nodes)]


def _choices(space: Space, partial: Partial, member: Sequence[tuple[int, ...]], node: int) -> Iterator[int]:
    """Yield new copy sets that `node` is in, only one of those that are the same but for names."""
    there = {each for each, _ in partial.sets}
    alike: dict[tuple[int, ...], list[int]] = {}
    for other in range(space.nodes):
        if partial.room[other] and other != node:
            alike.setdefault(member[other], []).append(other)
    kinds = list(alike.values())
    for numbers in itertools.product(*(range(len(kind) + 1) for kind in kinds)):
        if sum(numbers) == space.copies - 1:
            taken = itertools.chain([node], *(kind[:number] for kind, number in zip(kinds, numbers, strict=True)))
            chosen = sum(1 << other for other in taken)
            if chosen not in there:
                yield chosen


def _form(partial: Partial, nodes: int) -> Any:
    """Return what is the same for two partial placements if and only if they differ in names of nodes alone."""
    times = [each for _, each in partial.sets]
    member = _members(partial, nodes)
    return min(
        (
            tuple(sorted(zip(order, times, strict=True))),
            tuple(sorted(tuple(sorted(order[place] for place in places)) for places in member)),
        )
        for order in _orders(member, times)
    )


def _orders(member: Sequence[tuple[int, ...]], colours: Sequence[Any]) -> Iterator[list[int]]:
    """Yield the number of each set, in each order that their colours and shared nodes leave open."""
    colours = _refined(member, colours)
    count = Counter(colours)
    several = [colour for colour in sorted(count) if count[colour] > 1]
    if not several:
        yield colours
        return
    for place, colour in enumerate(colours):
        if colour == several[0]:
            yield from _orders(member, [(one, other != place) for other, one in enumerate(colours)])


def _refined(member: Sequence[tuple[int, ...]], colours: Sequence[Any]) -> list[int]:
    """Return colours that distinguish sets as far as the colours of the sets that share nodes with them do."""
    while True:
        of_node = [tuple(sorted(colours[place] for place in places)) for places in member]
        around = [
            (colour, sorted(of_node[node] for node, places in enumerate(member) if place in places))
            for place, colour in enumerate(colours)
        ]
        kinds = [kind for kind, _ in itertools.groupby(sorted(around))]
        finer = [kinds.index(each) for each in around]
        if len(kinds) == len(set(colours)):
            return finer
        colours = finer


def compared(nodes: int, copies: int) -> dict[str, Any]:
    """Return the fatal sets by k of our placement, of GEMINI's and of the best there is."""
    space = Space(nodes, copies)
    found = {"ours": space.of(ours(nodes, copies)), "mixed": space.of(mixed(nodes, copies))}
    least, looked = best(space, found["ours"])
    return {"nodes": nodes, "copies": copies, "lost": list(space.layers), **found, "best": least, "looked": looked}


def beaten(row: dict[str, Any], by: str = "best", loser: str = "ours") -> list[int]:
    """Return the numbers of lost nodes for which `by` survives more sets of them."""
    pairs = zip(row["lost"], row[by], row[loser], strict=True)
    return [lost for lost, fewer, more in pairs if fewer < more]
