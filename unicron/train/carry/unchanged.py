"""Objects of a script as they were when they were numbered, and whether they have changed since.

Most never do. What those hold is compared in one go, with no line of Python for each, by the identity of all that shows
where each is looked at by itself. Where that differs each is looked at once more, plain values by type and value.
"""

import operator
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from unicron.train.carry.by_value import Opaque
from unicron.train.carry.kinds import Kind, NotCarriedError
from unicron.train.carry.objects import OPAQUE, is_moving
from unicron.train.carry.pickling import Key
from unicron.train.carry.values import is_same

_attributes = operator.attrgetter("__dict__")


class Numbered(NamedTuple):
    """An object as it was when it was numbered; of one that a stretch between loops made, what it was is not kept."""

    number: int
    thing: Any
    kind: Kind
    fingerprint: tuple[Any, ...] | None = None
    is_moving: bool = False

    @property
    def is_hidden(self) -> bool:
        """Whether nobody would see that it has changed."""
        return self.kind is OPAQUE or (self.fingerprint is None and isinstance(self.kind, Opaque))

    def is_same(self) -> bool:
        """Return whether it has not changed."""
        look, before = self.kind.fingerprint(self.thing), self.fingerprint
        if before is None:
            return False
        if not self.kind.exact:
            return bool(look[:1] == before[:1]) and _hold_same(look[1:], before[1:])
        return _hold_same(look, before)

    def views(self) -> tuple[Collection[Any], ...]:
        """Return what shows whether it changes from now on; nothing where it has, or is to be looked at by itself."""
        if self.fingerprint is None or self.is_moving or not self.kind.exact:
            return ()
        found = self.kind.views(self.thing)
        return found if _hold_same([*chain.from_iterable(found)], self.fingerprint) else ()


def _hold_same(ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
    """Return whether two objects hold the same: by identity, which is fast, or else by the values of what is plain."""
    return len(ours) == len(theirs) and (all(map(operator.is_, ours, theirs)) or all(map(is_same, ours, theirs)))


def number_object(number: int, thing: Any, kind: Kind) -> Numbered:
    """Return an object under a number, with its present fingerprint."""
    try:
        return Numbered(
            number, thing, kind, kind.fingerprint(thing), any(is_moving(each) for _, each in kind.parts(thing))
        )
    except NotCarriedError:  # data
        return Numbered(number, thing, OPAQUE, (), False)


class Unchanged:
    """Objects that have not changed, compared in one go.

    Args:
        numbered: which may be such.

    Attributes:
        objects: which are.
        others: which are to be looked at one by one.
    """

    def __init__(self, numbered: Mapping[Key, Numbered]) -> None:
        self.objects, self.others = dict[Key, Numbered](), dict[Key, Numbered]()
        self._views, self._held = list[Collection[Any]](), list[Any]()
        self._whole, self._sizes = list[Collection[Any]](), list[int]()
        self._owners, self._attributes = list[Any](), list[Any]()
        for key, each in numbered.items():
            if not (views := each.views()):
                self.others[key] = each
                continue
            self.objects[key] = each
            self._whole.append(views[0])
            self._sizes.append(len(views[0]))
            if each.fingerprint:  # of an empty one the size says all
                self._views += views
                self._held += chain.from_iterable(views)
            if views[0] is not each.thing:
                self._owners.append(each.thing)
                self._attributes.append(views[0])

    def are_same(self) -> bool:
        """Return whether none has changed."""
        return (
            all(map(operator.is_, map(_attributes, self._owners), self._attributes))
            and [*map(len, self._whole)] == self._sizes
            and all(map(operator.is_, chain.from_iterable(self._views), self._held))
        )
