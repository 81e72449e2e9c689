"""Objects of a script as they were when they were numbered, and whether they have changed since.

Most never do. What those hold is compared in one go, with no line of Python for each, by the identity of all that shows
where each is looked at by itself. Where that differs each is looked at once more, plain values by type and value.
"""

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

from unicron.train.carry.batch import SameTensors, can_be_batched
from unicron.train.carry.by_value import Opaque
from unicron.train.carry.kinds import Kind, NotCarriedError
from unicron.train.carry.large import Large
from unicron.train.carry.objects import (
    ARRAY,
    ARRAY_BYTES,
    ARRAYS_BYTES,
    DATA,
    OPAQUE,
    SMALL_BYTES,
    is_large_tensor,
    is_moving,
)
from unicron.train.carry.pickling import Key
from unicron.train.carry.values import is_same
from unicron.train.carry.variables import space_name

_attributes = operator.attrgetter("__dict__")

TOGETHER = 256
"""Objects that are compared in one go: if one of them has changed, each of these is looked at once more."""


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
        return self.kind in {OPAQUE, DATA} or (self.fingerprint is None and isinstance(self.kind, Opaque))

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


class Changes:
    """Finds those of the numbered objects that have changed since.

    Attributes:
        written: tensors of which that was seen in their memory alone: it need not show again.
    """

    def __init__(self) -> None:
        self._watched, self._unchanged = dict[Key, Numbered](), list[Unchanged]()
        self._tensors, self._batched = SameTensors({}), dict[Key, Numbered]()
        self._large = dict[str, Large]()
        self._objects, self._array_bytes = dict[Key, Numbered](), 0
        self.written = set[Key]()

    def add(self, level: str, objects: dict[Key, Numbered]) -> None:
        """Watch objects from now on.

        Args:
            level: at which they were made; what was made before all loops rarely changes.
            objects: by their keys.
        """
        watched = {key: each for key, each in objects.items() if not each.is_hidden}
        for key in [key for key, each in watched.items() if self._is_too_much(each)]:
            objects[key] = watched.pop(key)._replace(kind=DATA)
        data = {
            key: each.thing
            for key, each in objects.items()
            if each.kind is DATA or is_large_tensor(each.thing, each.kind)
        }
        if data:
            self._large[level] = Large(data)
            self._objects |= {key: objects[key] for key in data}
        if level:
            self._watched |= watched
            return
        self._batched = {
            key: each
            for key, each in watched.items()
            if each.fingerprint is not None and can_be_batched(each.thing, each.kind)
        }
        self._tensors = SameTensors({key: each.thing for key, each in self._batched.items()})
        those = iter([(key, each) for key, each in watched.items() if key not in self._batched])
        while some := dict(islice(those, TOGETHER)):
            self._unchanged.append(group := Unchanged(some))
            self._watched |= group.others

    def _is_too_much(self, one: Numbered) -> bool:
        """Return whether an array is one too many to be looked at whole in each iteration."""
        size = one.thing.nbytes if one.kind is ARRAY else 0
        if size <= SMALL_BYTES or self._array_bytes + size <= ARRAYS_BYTES:
            self._array_bytes += size * (size > SMALL_BYTES)
            return False
        return True

    def forget(self, keys: Iterable[Key]) -> None:
        """Watch objects no more: all that were made at their levels."""
        for key in keys:
            self._large.pop(key[0], None)
            self._watched.pop(key, None)
            self._objects.pop(key, None)

    def accept(self, keys: Collection[Key]) -> None:
        """Take what objects are now for what they were when they were numbered."""
        for key in self._watched.keys() & keys:
            number, thing, kind, *_ = self._watched[key]
            self._watched[key] = number_object(number, thing, kind)
        if levels := {key[0] for key in self.written & {*keys}}:
            self.find_written()  # of all others, too: what was written to before is known from now on
            self.written -= {*keys}
            for level in levels:
                things = {key: one.thing for key, one in self._objects.items() if key[0] == level}
                self._large[level] = Large(things)

    def find(self) -> list[Key]:
        """Return the keys of those that have changed.

        Raises:
            NotCarriedError: one has that no other process can have.
        """
        for place, group in enumerate(self._unchanged):
            if not group.are_same():
                left = Unchanged(group.objects)
                self._watched |= left.others  # from now on; whatever is raised in between, none is lost
                self._unchanged[place] = left
        if not self._tensors.are_same():
            changed = {key: each for key, each in self._batched.items() if not each.is_same()}
            self._watched |= changed  # from now on
            self._batched = {key: each for key, each in self._batched.items() if key not in changed}
            self._tensors = SameTensors({key: each.thing for key, each in self._batched.items()})
        found = [key for key, one in self._watched.items() if one.is_moving or not one.is_same()]
        if hidden := next((key for key in found if isinstance(self._watched[key].kind, Opaque)), None):
            kind = type(self._watched[hidden].thing).__qualname__
            raise NotCarriedError(
                f"{describe(hidden)} ({kind}) has changed, and what such a thing holds can't be read: keep that in a "
                "dict or a list"
            )
        return [*{*found, *self._find_written(Large.written)}]

    def find_written(self) -> list[Key]:
        """Look at all of the memory of large arrays and tensors; return the keys of those that were written to.

        Raises:
            NotCarriedError: one was that no other process can have.
        """
        return [*self._find_written(Large.all_written)]

    def _find_written(self, look: Callable[[Large], set[Key]]) -> set[Key]:
        for large in self._large.values():
            self.written |= look(large)
        for key in self.written:
            if key in self._objects and self._objects[key].kind is DATA:
                size = self._objects[key].thing.nbytes / (1 << 20)
                raise NotCarriedError(
                    f"{describe(key)}, an array of {size:.0f} MiB, was written to: keep what changes in arrays of at "
                    f"most {ARRAY_BYTES >> 20} MiB, and {ARRAYS_BYTES >> 20} MiB together"
                )
        return self.written & self._objects.keys()


def describe(key: Key) -> str:
    """Return the path to an object as a script would write it."""
    _, space, *way = key
    return f"`{'.'.join(map(str, way))}` of {space_name(space)}"


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
