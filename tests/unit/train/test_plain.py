"""A state is the same in another process, whatever plain values and objects it has, and nothing in it is run."""

import collections
import copy
import datetime as dt
import enum
import math
import pathlib
import subprocess
import sys
import tempfile
import zoneinfo
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unicron.errors import InvalidInputError, StateTransferError
from unicron.train.carry.compare import first_difference
from unicron.train.session.states import TorchStates
from unicron.train.snapshots.gathering import Gathering, collect_state, load_state
from unicron.train.snapshots.packed import Packing, map_file, unpack
from unicron.train.snapshots.plain import from_plain, to_plain


class Colour(enum.Enum):
    RED = 1


class Pair(NamedTuple):
    a: object
    b: object


class Projector:
    def __init__(self, basis, more):
        self.basis, self.more = basis, more


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self, a, b):
        self.a, self.b = a, b


class Ends:
    def __del__(self):
        pass


HASHED = st.one_of(
    *(st.integers(), st.floats(), st.booleans(), st.none(), st.text(), st.binary(), st.complex_numbers()),
    *(st.dates(), st.times(), st.timedeltas(), st.datetimes(timezones=st.just(dt.UTC) | st.none()), st.uuids()),
    *(st.decimals(allow_nan=False), st.fractions(), st.just(zoneinfo.ZoneInfo("UTC")), st.just(Colour.RED)),
    *(st.just(pathlib.Path("a/b")), st.just(torch.bfloat16), st.just(torch.device("cpu")), st.just(torch.Size([2, 3]))),
    *(st.integers(0, 9).map(range), st.floats(width=32).map(np.float32), st.floats().map(np.float64)),
    *(st.booleans().map(np.bool_), st.just(np.datetime64("2001-01-01"))),
)
TENSORS = st.sampled_from(
    [
        *(np.array(3.5), np.arange(6).reshape(2, 3).T, np.zeros(2, [("n", "<i4"), ("x", "<f8")]), np.zeros(1 << 15)),
        *(torch.tensor(3.0), torch.ones(2, 3), torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.cfloat)),
        *(torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr(), torch.empty(0, 2), torch.tensor([math.nan])),
    ]
).map(copy.deepcopy)
VALUES = st.recursive(
    HASHED | TENSORS | st.just(slice(1, None)),
    lambda inner: st.one_of(
        *(st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple), st.builds(Pair, inner, inner)),
        *(st.builds(Projector, inner, inner), st.builds(Slotted, inner, inner), st.sets(HASHED, max_size=3)),
        *(st.dictionaries(HASHED, inner, max_size=3), st.lists(inner, max_size=3).map(collections.deque)),
        st.dictionaries(st.text(), inner, max_size=3),
    ),
    max_leaves=8,
)


def elsewhere(value):
    """Return a value as another process has it."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "x"
        packing = Packing(value)
        packing.write(map_file(path, packing.size))
        return unpack(path, packing.size)


@given(VALUES)
def test_another_process_has_the_same(value):
    shared = Projector(copy.deepcopy(value), None)
    shared.more = [shared]
    state = {"a": value, "b": shared, "c": [shared]}
    found = from_plain(elsewhere(to_plain(state, "state")))
    assert first_difference(state, found) == ""


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (lambda: 1, "builtins.function"),
        (torch, "builtins.module"),
        (Ends(), "Ends"),
        (type("Local", (), {})(), "Local"),
        (Projector(torch.nn.Parameter(torch.ones(1)), 0), "basis is a torch.nn.parameter.Parameter"),
        (np.array([object()]), "numpy.ndarray"),
        (subprocess.CompletedProcess([], 0), "subprocess.CompletedProcess"),
        (open, "builtin"),
    ],
)
def test_what_no_process_can_be_given_is_refused_by_name(value, named):
    with pytest.raises(StateTransferError, match=named) as found:
        to_plain({"group": [value]}, "optimizer")
    assert str(found.value).startswith("optimizer.group")
    looped = []
    looped.append(looped)
    with pytest.raises(StateTransferError, match="leads to itself"):
        to_plain(looped, "optimizer")


@pytest.mark.parametrize(
    "forged",
    [
        ["object", "x", "subprocess", "Popen", {"pid": 1}],
        ["object", "x", "os", "system", {}],
        ["object", "x", __name__, "Ends", {}],
        ["object", "x", "not_imported", "Thing", {}],
        ["object", "x", "collections", "UserDict", {"data": 1}],
        ["enum", __name__, "Projector", "basis"],
        ["tuple", __name__, "Projector", []],
        ["dtype", "load"],
        ["array", "'<f8'", [2], b"short"],
        ["sparse", "torch.sparse_coo", True, [2, 2], [torch.tensor([[9], [9]]), torch.ones(1)]],
        ["__init__"],
        ["system"],
        [],
    ],
)
def test_what_was_forged_makes_nothing(forged):
    with pytest.raises(StateTransferError):
        from_plain({"a": [{"__value__": forged}]})
    assert "not_imported" not in sys.modules


class Strange(torch.optim.SGD):
    """Keeps all sorts of things, and what it keeps is all that an update depends on."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {"projector": Projector(torch.eye(2), group["shared"]), "seen": np.zeros(3), "name": "x"}
                    state |= {"kinds": {Colour.RED, 1}, (1, "a"): np.float64(0.1), "last": Pair(1, dt.date(2000, 1, 1))}
                state["projector"].basis = state["projector"].basis * 0.9
                state["seen"][1] += 1
                group["shared"].more += np.float32(0.1)
                rate = group["lr"] * state[1, "a"] * state["seen"][1] * group["shared"].more
                p.sub_(p.grad @ state["projector"].basis, alpha=float(rate))


def made(rate=None):
    torch.manual_seed(0)
    model, shared = torch.nn.Linear(2, 3, bias=False), Projector(None, np.float32(1))
    optimizer = Strange(model.parameters(), lr=rate if rate is not None else 0.1 * np.sqrt(2))
    optimizer.param_groups[0]["shared"] = shared
    return {"model": model, "optimizer": optimizer}, shared


def train(protected, steps):
    for _ in range(steps):
        protected["model"](torch.ones(4, 2)).square().sum().backward()
        protected["optimizer"].step()
        protected["optimizer"].zero_grad()


@pytest.mark.parametrize("rate", [None, 0.1, np.float32(0.1), torch.tensor(0.1)])
def test_an_optimizer_goes_on_bit_by_bit_in_another_process(rate):
    (ours, _), (theirs, shared) = made(rate), made(rate)
    train(ours, 3)
    gathering = Gathering(theirs)
    gathering.add(elsewhere(collect_state(3, ours)))
    load_state(gathering.result(3), theirs)
    own = theirs["optimizer"].param_groups[0]
    assert type(own["lr"]) is type(ours["optimizer"].param_groups[0]["lr"])
    assert own["shared"] is shared
    parameters = [next(each["model"].parameters()) for each in (ours, theirs)]
    for _ in range(2):
        states = [each["optimizer"].state[p] for each, p in zip((ours, theirs), parameters, strict=True)]
        assert first_difference(*map(dict, states)) == ""
        assert torch.equal(*parameters)
        train(ours, 2), train(theirs, 2)


def holding(function):
    protected, shared = made()
    protected["optimizer"].param_groups[0]["filter"] = function
    shared.more = [function]
    return protected


def with_(value):
    return lambda p: (p, value, [each * 2 for each in "ab"])


def is_bias(p):
    return p.ndim == 1


def marked(function, **marks):
    vars(function).update(marks)
    return function


def unfinished():
    def function():
        return later

    if not function:
        later = 1
    return function


@pytest.mark.parametrize(
    "function",
    [is_bias, len, dict, torch.relu, with_(3), with_((1, with_("x"), ["set"])), marked(with_(1), rate=2), unfinished()],
)
def test_a_function_among_options_is_the_own_one_of_each_process(function):
    is_made = function.__name__ == "<lambda>"
    kept = marked(with_(function.__closure__[0].cell_contents), **vars(function)) if is_made else function
    theirs = holding(kept)
    gathering = Gathering(theirs)
    gathering.add(elsewhere(collect_state(3, holding(function))))
    load_state(gathering.result(3), theirs)
    assert theirs["optimizer"].param_groups[0]["filter"] is kept
    assert theirs["optimizer"].param_groups[0]["shared"].more == [kept]


@pytest.mark.parametrize(
    ("there", "here"),
    [
        *((is_bias, len), (with_(3), with_(4)), (lambda: 1, lambda: 2), (is_bias, None), (len, "len")),
        (marked(with_(1), rate=2), marked(with_(1), rate=3)),
    ],
)
def test_another_function_than_this_process_has_is_refused(there, here):
    theirs = holding(here)
    gathering = Gathering(theirs)
    gathering.add(elsewhere(collect_state(3, holding(there))))
    with pytest.raises(StateTransferError, match=r"param_groups.0.\S+ is .*, and .* here"):
        load_state(gathering.result(3), theirs)


def test_a_set_that_a_function_keeps_is_the_same_in_whatever_order():
    theirs = holding(with_({8, 0}))
    assert [*{8, 0}] != [*{0, 8}], "the order in which numbers that share a place were added"
    gathering = Gathering(theirs)
    gathering.add(elsewhere(collect_state(3, holding(with_({0, 8})))))
    load_state(gathering.result(3), theirs)


@pytest.mark.parametrize("function", [with_(torch.ones(1)), with_(torch), torch.ones(1).relu])
def test_a_function_that_keeps_what_may_differ_is_refused(function):
    with pytest.raises(StateTransferError, match=r"^optimizer\.param_groups\.0\.\S+ is a "):
        collect_state(0, holding(function))


def test_what_can_not_be_given_is_said_as_it_is_protected():
    protected, _ = made()
    protected["optimizer"].state["hook"] = lambda: 1
    with pytest.raises(InvalidInputError, match=r"optimizer.state.hook is a builtins.function"):
        TorchStates(None, None).protect(protected)
