"""Where a script was when its last snapshots were taken, and what collectives have given it since each of them.

A rank that is lost may have left one that is older than those of the others. As long as no gradient was reduced in
between, and no parameter changed, a new rank begins there, and is given what collectives have given since.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any

from unicron.train.scripts.heard import Heard, Results
from unicron.train.scripts.under_way import KEPT, Chain

Point = dict[str, Any]
"""`loops` that were under way, what was given `outside` of them, and `since`."""


class Points:
    """Those of a rank, the last one at the end; at first there is one, before its loops.

    Attributes:
        choices: where it can begin, of one that replaces another: the best first.
    """

    def __init__(self) -> None:
        self._points: deque[tuple[Point, Heard]] = deque([({"loops": [], "outside": []}, Heard())], maxlen=KEPT)
        self.choices: list[Point] = []

    @property
    def since(self) -> Heard:
        """What collectives have given since the last one."""
        return self._points[-1][1]

    def add(self, where: Point, *, alone: bool) -> None:
        """Note another one.

        Args:
            where: it is.
            alone: nobody can go to those before it any more.
        """
        left = Heard(self.since.left)
        if alone:
            self._points.clear()
        self._points.append((where, left))

    def hear(self, results: Results | None) -> None:
        """Note what a collective has given."""
        for _, since in self._points:
            since.add(results)

    def begin_at(self, where: Point, since: Heard) -> None:
        """Be at one of another rank."""
        self._points = deque([(where, since)], maxlen=KEPT)

    def saved(self) -> list[Point]:
        """Return those to which a new rank can go, the last one first, whether or not it can go there."""
        last, *before = [{**where, "since": since.saved()} for where, since in reversed(self._points)]
        return [last, *filter(known, before)]

    def chains(self) -> Iterable[Chain]:
        """Yield the loops of the choices."""
        return map(chain_of, self.choices)

    def choice(self, chain: Chain) -> Point:
        """Return the choice with these loops."""
        return next(each for each in self.choices if chain_of(each) == chain)


def chain_of(point: Point) -> Chain:
    """Return the loops of a point as a record tells them."""
    return [each[:4] for each in point["loops"]]


def known(point: Point) -> bool:
    """Return whether all is known that collectives have given on the way to a point, and since."""
    places = [point["outside"], point["since"], *(heard for loop in point["loops"] for heard in loop[5:])]
    return all(each is not None and all(results is not None for results in each) for each in places)
