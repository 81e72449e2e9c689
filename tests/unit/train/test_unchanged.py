"""Whatever changes of objects that are compared in one go shows, as if each were looked at by itself."""

import collections
import itertools
import random

import pytest
import torch

from unicron.train.carry.own_snapshot import Heap
from unicron.train.carry.unchanged import TOGETHER
from unicron.train.carry.variables import Variables


class Alike:
    """Whatever it is compared with it is said to equal."""

    def __init__(self, number=0):
        self.number, self.kept = number, [number]

    def __eq__(self, other):
        return True

    def __hash__(self):
        return 1


class Slotted:
    __slots__ = ("__dict__", "own")


class Named(dict):
    pass


def world():
    slotted = Slotted()
    slotted.own, slotted.more = 1, 2
    ordered = collections.OrderedDict(a=1.5, b=2.5)
    made = [[1.5], [], {"a": 1.5}, {}, {1, 2}, collections.deque([1.5, 2.5]), collections.defaultdict(list, a=1.5)]
    return [*made, ordered, Alike(), Alike(1), slotted, Named(a=1.5), torch.nn.Linear(2, 2), {"alike": Alike()}]


def numbered(things):
    heap, spaces = Heap([]), {"x": Variables({"things": things})}
    heap.number_objects(spaces)
    heap.snapshot(spaces, {})
    return heap


def names(heap):
    return [key[3:] for key in heap._find_changed()]


def swap_behind(things):
    """Have an OrderedDict's values be swapped, while its dict's are where they were."""
    ordered = things[7]
    first, second = ordered.values()
    del ordered["a"]
    ordered["a"], ordered["b"] = second, first
    ordered.move_to_end("a", last=False)
    assert list(dict.values(ordered)) == [first, second]
    assert list(ordered.values()) == [second, first]


CHANGES = {
    "an item": (1, lambda things: things[1].append(0)),
    "a key with the same value": (2, lambda things: things[2].update(b=things[2].pop("a", 0))),
    "a key": (3, lambda things: things[3].update(a=None)),
    "another of a set": (4, lambda things: things[4].symmetric_difference_update({2, 3})),
    "a deque that turns": (5, lambda things: things[5].rotate()),
    "a default": (6, lambda things: things[6]["b"]),
    "the order": (7, lambda things: things[7].move_to_end("a")),
    "values behind keys": (7, swap_behind),
    "an attribute": (8, lambda things: setattr(things[8], "number", 2)),
    "an attribute that says it is the same": (8, lambda things: setattr(things[8], "kept", Alike())),
    "an attribute's name": (9, lambda things: vars(things[9]).update(other=vars(things[9]).pop("number", 0))),
    "all attributes": (9, lambda things: setattr(things[9], "__dict__", {"number": 2, "kept": things[9].kept})),
    "a slot": (10, lambda things: setattr(things[10], "own", 2)),
    "an attribute beside slots": (10, lambda things: setattr(things[10], "more", 1)),
    "an attribute of a dictionary": (11, lambda things: setattr(things[11], "more", 1)),
    "an attribute of a module": (12, lambda things: things[12].eval()),
    "a value that says it is the same": (13, lambda things: things[13].update(alike=Alike())),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_shows(change):
    things = world()
    heap = numbered(things)
    place, make = CHANGES[change]
    for _ in range(2):
        assert names(heap) == []
    make(things)
    for _ in range(2):
        assert names(heap) == [(place,)]


def test_an_item_that_goes_to_the_next_list_shows_in_both():
    things = world()
    heap = numbered(things)
    things[1].append(things[0].pop())
    assert names(heap) == [(0,), (1,)]


def test_attributes_that_are_the_same_in_another_dictionary_are_looked_at_there():
    things = world()
    heap = numbered(things)
    things[8].__dict__ = dict(vars(things[8]))
    assert names(heap) == []
    things[8].number = 7
    assert names(heap) == [(8,)]


def test_what_changes_and_is_again_what_it_was_is_no_change_and_then_shows_in_order():
    things = [[number] for number in range(3 * TOGETHER)]
    heap = numbered(things)
    for place in (2 * TOGETHER + 1, 5, TOGETHER, 4):
        things[place].append(0)
        assert names(heap) == [(place,)]
        things[place].pop()
        assert names(heap) == []
    for place in (4, 2 * TOGETHER + 1, TOGETHER, TOGETHER + 1, 5):
        things[place].append(0)
    assert names(heap) == [(4,), (5,), (TOGETHER,), (TOGETHER + 1,), (2 * TOGETHER + 1,)]


def test_a_frozen_set_is_as_before_where_it_was_made_anew_in_another_order():
    things = [Slotted() for _ in range(2)]
    for each in things:
        each.names = frozenset({0, 8})
    heap = numbered(things)
    things[0].names, things[1].names = frozenset({8, 0}), frozenset({8.0, 0})
    assert names(heap) == [(1,)]


def test_what_raises_while_it_is_looked_at_loses_no_change():
    things = world()
    heap = numbered(things)
    things[0].append(1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("unicron.train.carry.unchanged.Numbered.views", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            heap._find_changed()
    assert names(heap) == [(0,)]


@pytest.mark.parametrize("seed", range(20))
def test_of_many_changes_each_shows(seed):
    drawn = random.Random(seed)
    things = [[], *(world() for _ in range(TOGETHER // 8))]
    heap = numbered(things)
    made = [*itertools.product(range(1, len(things)), sorted(CHANGES.keys() - {"values behind keys"}))]
    for _ in range(10):
        for outer, change in drawn.sample(made, drawn.choice([0, 1, 3, 40])):
            CHANGES[change][1](things[outer])
        if drawn.random() < 0.3:
            things[0].append(0)
        one_by_one = [key for key, one in heap._numbered.items() if not one.is_hidden and not one.is_same()]
        assert heap._find_changed() == one_by_one
