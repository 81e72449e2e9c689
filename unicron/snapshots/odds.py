"""How likely every state survives in memory when nodes are lost at once (after GEMINI, SOSP 2023). Pure.

Exact: groups are independent of each other, so the numbers of ways to lose nodes of a group without a state multiply
like polynomials, in which the power is how many nodes are lost.
"""

from fractions import Fraction
from math import comb

from unicron.errors import InvalidInputError
from unicron.snapshots.shapes import NINE, NINE_COPIES, check_copies, odd_group

Ways = list[int]
"""In how many ways 0, 1, 2 ... nodes can be lost so that no state is."""


def odds(nodes: int, copies: int, lost: int) -> Fraction:
    """Return the probability that all states survive the loss of so many nodes at once.

    Args:
        nodes: of the cluster, placed by `placement`.
        copies: of each state, its own included; fewer nodes than that keep one each.
        lost: nodes, drawn uniformly of all.

    Raises:
        InvalidInputError: less than one copy, or more lost than there are.
    """
    check_copies(copies)
    if not 0 <= lost <= nodes:
        raise InvalidInputError(f"{lost} of {nodes} nodes lost; give 0 to {nodes}")
    ways = _ways(nodes, min(copies, nodes) or 1, lost)
    return Fraction(ways[lost] if lost < len(ways) else 0, comb(nodes, lost))


def _ways(nodes: int, copies: int, most: int) -> Ways:
    """Return the ways in nodes that are split into groups, up to `most` lost ones."""
    odd = odd_group(nodes, copies)
    found, power, left = [1], [comb(copies, lost) for lost in range(copies)], (nodes - odd) // copies
    while left:  # the power of all whole groups, by squares
        if left % 2:
            found = _times(found, power, most)
        power, left = _times(power, power, most), left // 2
    return _times(found, _odd_ways(odd, copies, most), most) if odd else found


def _odd_ways(size: int, copies: int, most: int) -> Ways:
    """Return the ways in the larger group."""
    if (size, copies) == (len(NINE), NINE_COPIES):
        return _nine_ways()
    others = size - copies
    not_all_first = [comb(copies, lost) for lost in range(copies)]
    not_all_others = [comb(others, lost) for lost in range(others)]
    found = _times(not_all_first, not_all_others, most)
    # with all others lost the first nodes stand for them alone, each state by fewer copies
    first = _ways(copies, copies - others, most)
    folded = [0] * others + first
    return [sum(pair) for pair in zip(_wide(found, len(folded)), _wide(folded, len(found)), strict=True)]


def _nine_ways() -> Ways:
    sets = {sum(1 << keeper for keeper in keepers) for keepers in NINE}
    safe = [lost for lost in range(1 << len(NINE)) if all(lost & keepers != keepers for keepers in sets)]
    return [sum(lost.bit_count() == count for lost in safe) for count in range(len(NINE))]


def _times(one: Ways, other: Ways, most: int) -> Ways:
    product = [0] * min(len(one) + len(other) - 1, most + 1)
    for power, value in enumerate(one[: most + 1]):
        for more, factor in enumerate(other[: most + 1 - power]):
            product[power + more] += value * factor
    return product


def _wide(ways: Ways, length: int) -> Ways:
    return ways + [0] * (length - len(ways))
