"""Values that are equal have no first difference, and a change anywhere in one is found where it was made."""

import collections
import copy
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import io
import math
import pathlib
import pickle
import random
import uuid
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unicron.train.carry.compare import first_difference, never_read, snapshot_differences
from unicron.train.carry.inert import read
from unicron.train.carry.own_snapshot import Heap
from unicron.train.carry.pickling import Pickler
from unicron.train.carry.variables import Variables


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Point:
    x: object
    y: object


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self, a, b):
        self.a, self.b = a, b


class Maker:
    """What a library calls to make its objects."""

    def __call__(self, value):
        return Lazy(value)


class Lazy:
    def __init__(self, value):
        self.value = value

    def __reduce__(self):
        return Maker(), (self.value,)


class Pair(NamedTuple):
    a: object
    b: object


NUMBERS = st.one_of(st.integers(), st.floats(), st.complex_numbers(), st.booleans(), st.none())
PLAIN = st.one_of(
    *(NUMBERS, st.text(), st.binary(), st.just(Colour.RED), st.dates(), st.datetimes(), st.decimals(), st.fractions()),
    *(st.uuids(), st.just(pathlib.Path("a/b")), st.integers().map(range), st.floats(width=32).map(np.float32)),
    st.integers(-(2**60), 2**60).map(np.int64),
)
TENSORS = st.lists(st.floats(width=16), min_size=1, max_size=3).flatmap(
    lambda values: st.sampled_from(
        [
            *(torch.tensor(values), torch.tensor(values, dtype=torch.bfloat16), torch.tensor(values).to_sparse()),
            *(torch.complex(torch.tensor(values), torch.tensor(values)), np.array(values), torch.tensor(values[0])),
        ]
    )
)


def holding(inner):
    return st.one_of(
        *(st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple), st.builds(Point, inner, inner)),
        *(st.lists(inner, max_size=3).map(collections.deque), st.builds(Slotted, inner, inner)),
        *(st.builds(Pair, inner, inner), st.dictionaries(PLAIN, inner, max_size=3), st.sets(PLAIN, max_size=3)),
    )


VALUES = st.recursive(PLAIN | TENSORS, holding, max_leaves=8)


def packed(value):
    stream = io.BytesIO()
    Pickler(stream, {}).dump(value)
    return stream.getvalue()


@given(VALUES)
def test_what_is_equal_does_not_differ(value):
    box = [value, {"deep": value}]
    box.append(box)
    for one, other in [(box, pickle.loads(pickle.dumps(box))), (box, box)]:
        assert first_difference(one, other) == ""
    assert first_difference(read(packed(box)), read(packed(copy.deepcopy(box)))) == ""


@given(VALUES, NUMBERS, NUMBERS, st.sampled_from([list, tuple, lambda x: {"k": x[0]}, lambda x: Point(0, x[0])]))
def test_one_number_that_differs_is_found(value, mine, other, kind):
    same = type(mine) is type(other) and (
        repr(mine) == repr(other) if isinstance(mine, float | complex) else mine == other
    )
    for values in ([value, kind([mine]), 0], [value, kind([other]), 0]), (kind([mine]), kind([other])):
        found = first_difference(*values)
        assert (found == "") is same
        read_found = first_difference(*(read(packed(each)) for each in values))
        assert (read_found == "") is same


def looped(value):
    made = {"a": value}
    made["self"] = made
    return made


SHARED = [1]
PAIRS = {
    "x[0]: 1 here, 2 there": (Point([1], 0), Point([2], 0)),
    "['a'].y[0]: 1.5": ({"a": Point(0, [1.5])}, {"a": Point(0, [2.5])}),
    "True here, 1 there": ([True], [1]),
    "1 here, 1.0 there": ([1], [1.0]),
    "-0.0 here, 0.0 there": ([-0.0], [0.0]),
    "2 items here, 1 there": ([1, 2], [1]),
    "2 items here, 1 there: keys 'b' only here": ({"a": 1, "b": 2}, {"a": 1}),
    "[2] here, [] there behind the first 1": ([1, 2], [1]),
    "order of keys": ({1: 1, 2: 2}, {2: 2, 1: 1}),
    "is in the set here": ({1, 2}, {1, 3}),
    "[1 of 3]: 2.0 here, 5.0 there": (torch.tensor([1.0, 2, 3]), torch.tensor([1.0, 5, 3])),
    "dtype: torch.float32": (torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16)),
    "grad: tensor": (torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))),
    "shared with something else": ([SHARED, SHARED], [[1], [1]]),
    "['a']: 1 here": (looped(1), looped(2)),
    "float32": (np.float32(1), np.float64(1)),
    "here, Decimal('2') there": (decimal.Decimal(1), decimal.Decimal(2)),
    "nothing there": (Slotted(1, 2), Slotted.__new__(Slotted)),
    "Fraction": ([fractions.Fraction(1, 3)], [0.1]),
    "datetime": ([dt.date(2000, 1, 1)], [dt.datetime(2000, 1, 1, tzinfo=dt.UTC)]),
}
PAIRS["grad: tensor"][0].grad = torch.ones(2)


@pytest.mark.parametrize("words", PAIRS)
def test_the_difference_says_where_and_what(words):
    one, other = PAIRS[words]
    assert words in first_difference(one, other)
    assert first_difference(other, one)
    assert first_difference(one, one) == first_difference(other, other) == ""


def test_generators_differ_by_what_is_drawn_next():
    for make in (
        random.Random,
        np.random.default_rng,
        np.random.RandomState,
        lambda n: torch.Generator().manual_seed(n),
    ):
        assert first_difference(make(1), make(1)) == ""
        assert first_difference(make(1), make(2))


def test_nothing_that_is_read_is_run(tmp_path):
    class Writes:
        def __reduce__(self):
            return pathlib.Path.touch, (tmp_path / "made",)

    assert first_difference(read(pickle.dumps([Writes()])), read(pickle.dumps([Writes()]))) == ""
    assert not (tmp_path / "made").exists()
    assert math.isnan(read(pickle.dumps(math.nan)))
    for kind in (lambda number: uuid.UUID(int=number), Lazy):
        assert "2 there" in first_difference(*(read(pickle.dumps(kind(number))) for number in (1, 2)))


def test_a_variable_that_is_yet_to_be_set_is_missed_where_the_snapshot_from_which_this_began_had_it_and_else_not():
    def snapshot(variables, dead=()):
        heap, spaces = Heap([]), {"train.py": Variables({"lr": 0.5})}
        heap.number_objects(spaces)
        return heap.snapshot({"train.py": Variables({"lr": 0.5, **variables})}, {"train.py": set(dead)})

    lived, began = snapshot({"loss": 8.0, "best": 2.0}), snapshot({"loss": 9.0, "best": 2.0}, dead=["loss"])
    dead = never_read(began)
    assert snapshot_differences(snapshot({"best": 2.0}), lived, dead) == {}
    assert "`best`" in str(snapshot_differences(snapshot({}), lived, dead))
    assert "7.0 here, 8.0 there" in str(snapshot_differences(snapshot({"loss": 7.0, "best": 2.0}), lived, dead))
    assert "nothing here, 8.0 there" in str(snapshot_differences(snapshot({"best": 2.0}), lived))


def test_snapshots_of_a_script_differ_by_the_name_of_a_variable():
    def snapshot(change):
        variables = {"kept": [1, 2], "lr": 0.5, "seen": 0}
        spaces = {"train.py": Variables(variables)}
        torch.manual_seed(1)
        heap = Heap([])
        heap.number_objects(spaces)
        variables["kept"].append(3)
        exec(change, variables)
        return heap.snapshot(spaces, {})

    first = snapshot("seen = kept")
    assert snapshot_differences(first, snapshot("seen = kept")) == {}
    for change, words in {
        "seen = kept; lr = 0.25": "`lr` of train.py: nothing here, 0.25 there",
        "seen = kept; kept[1] = 5": "`kept` of train.py[0][1][1]: 2 here, 5 there",
        "seen = [1, 2, 3]": "`seen` of train.py: kept here, [1, 2, 3] there",
        "seen = kept; import torch; torch.rand(1); del torch": "the random numbers of torch",
    }.items():
        assert words in str(snapshot_differences(first, snapshot(change)))
    gone = [
        snapshot(f"seen = kept; held = kept; kept.append({number}); kept = []; seen = held = 0") for number in (4, 5)
    ]
    assert snapshot_differences(*gone) == {}, "nothing leads to it any more"
    still = [snapshot(f"seen = kept; kept.append({number}); kept = []") for number in (4, 5)]
    assert "`kept` of train.py[0][3][1]: 4 here, 5 there" in str(snapshot_differences(*still))
