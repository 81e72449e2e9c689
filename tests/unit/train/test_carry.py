"""Whatever a script has and does to it, another process that made the same has it as well, or it is refused by name."""

import collections
import contextlib
import dataclasses
import datetime as dt
import enum
import functools
import io
import ipaddress
import itertools
import os
import pathlib
import pickle
import random
import re
import threading
import uuid
import zoneinfo
from types import MethodType, SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tqdm import tqdm

from unicron.train.carry.compare import first_difference, snapshot_differences
from unicron.train.carry.gradients import gradients_of
from unicron.train.carry.kinds import NotCarriedError
from unicron.train.carry.objects import text_of
from unicron.train.carry.own_snapshot import Heap
from unicron.train.carry.randomness import generators, set_generators
from unicron.train.carry.scripted import rounding_hint
from unicron.train.carry.tensors import LARGE_BYTES, Given
from unicron.train.carry.variables import Variables
from unicron.train.snapshots.optimizers import load_optimizer

MANY = int(os.environ.get("UNICRON_TEST_EXAMPLES", "150"))


class Colour(enum.Enum):
    RED, GREEN = 1, 2


class Level(enum.IntEnum):
    LOW, HIGH = 1, 1000


class Plain:
    total = 0

    def __init__(self, x, y):
        self.x, self.y = x, y

    @property
    def both(self):
        return self.x, self.y

    @both.setter
    def both(self, value):
        self.x = self.y = value

    def method(self, *_):
        self.calls = getattr(self, "calls", 1000) + 1


class Slotted:
    __slots__ = ("x", "y")

    def __init__(self, x, y):
        self.x, self.y = x, y


@dataclasses.dataclass
class Record:
    x: object
    y: object = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: object
    y: object


class Step(int):
    """A number with attributes."""


class Table(dict):
    pass


class Pair(NamedTuple):
    x: object
    y: object


def counting(x, y):
    calls, held = 1000, [x, y]

    def count(*_):
        nonlocal calls
        calls += 1
        held.append(calls)
        return calls, held

    return count


def text(value):
    return "".join(["a ", str(value), " text"])  # not interned


PLAIN = st.one_of(
    *(st.integers(-(2**70), 2**70), st.integers(250, 300), st.floats(), st.complex_numbers(), st.booleans(), st.none()),
    *(st.text(max_size=5).map(text), st.binary(max_size=5), st.sampled_from([*Colour, *Level]), st.dates()),
    *(st.datetimes(timezones=st.just(zoneinfo.ZoneInfo("UTC")) | st.none()), st.timedeltas(), st.times()),
    *(
        st.decimals(allow_nan=False),
        st.fractions(),
        st.uuids(),
        st.just(pathlib.Path("a/b")),
        st.integers(0, 999).map(range),
    ),
    *(st.floats().map(np.float64), st.integers(-(2**60), 2**60).map(np.int64), st.floats(width=16).map(np.float16)),
    *(st.just(np.dtype("f4")), st.just(torch.bfloat16), st.just(re.compile("a+", re.IGNORECASE))),
    *(st.just(np.datetime64("2001-01-01T00:00")), st.just(ipaddress.ip_address("10.0.0.1")), st.just(Step(1000))),
    *(st.just(dt.timezone(dt.timedelta(hours=1))), st.just(torch.device("cpu")), st.just(torch.Size([300, 2]))),
)


def numbers(value):
    return [float(len(repr(value))), 1.5, -0.0]


def objects(*values):
    made = np.empty(len(values), dtype=object)
    for number, each in enumerate(values):
        made[number] = each
    return made


def key_of(value):
    return 0 if value != value else value  # noqa: PLR0124 no number is no key that one finds again


MAKERS = {
    "list": lambda a, _, x, y: [a, x, y],
    "dict": lambda a, b, x, y: {"x": x, 1000: y, key_of(b): a},
    "tuple key": lambda a, _, x, y: {(1000, text(1)): x, (1, key_of(a)): y},
    "set": lambda a, b, *_: {a, b, 1000, text(2)},
    "frozenset": lambda a, *_: frozenset({a, 1000}),
    "deque": lambda a, _, x, y: collections.deque([a, x, y], 4),
    "defaultdict": lambda _, __, x, y: collections.defaultdict(list, x=[x], y=y),
    "counter": lambda *_: collections.Counter(text("word").split()),
    "ordered": lambda a, _, x, y: collections.OrderedDict(x=x, y=y, a=a),
    "chain": lambda a, _, x, __: collections.ChainMap({"a": a}, {"x": x}),
    "table": lambda a, _, x, __: Table(a=a, x=x),
    "tuple": lambda a, _, x, y: (a, x, (y,)),
    "pair": lambda a, _, x, __: Pair(a, x),
    "object": lambda a, _, x, __: Plain(a, x),
    "slots": lambda a, _, x, __: Slotted(a, x),
    "dataclass": lambda a, _, x, __: Record(a, [x]),
    "frozen": lambda a, _, x, __: Frozen(a, x),
    "slice": lambda a, *_: [slice(1, 300), slice(a, None)],
    "step": lambda *_: Step(1000),
    "array": lambda a, *_: np.array(numbers(a)),
    "zero-dimensional array": lambda a, *_: np.array(float(len(repr(a)))),
    "structured array": lambda *_: np.zeros(3, [("n", "i4"), ("x", "f8")]),
    "array of objects": lambda a, _, x, __: objects(a, x, None),
    "tensor": lambda a, *_: torch.tensor(numbers(a)),
    "trained tensor": lambda a, *_: torch.tensor(numbers(a), requires_grad=True),
    "parameter": lambda a, *_: torch.nn.Parameter(torch.tensor(numbers(a))),
    "number": lambda a, *_: torch.tensor(numbers(a)[0]),
    "bfloat16": lambda a, *_: torch.tensor(numbers(a), dtype=torch.bfloat16),
    "complex tensor": lambda a, *_: torch.complex(torch.tensor(numbers(a)), torch.tensor(numbers(a))),
    "sparse": lambda a, *_: torch.tensor([numbers(a)]).to_sparse(),
    "empty": lambda *_: torch.zeros(0, 3),
    "view": lambda a, *_: torch.tensor(numbers(a))[::2],
    "module": lambda *_: torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Dropout()),
    "random": lambda *_: random.Random(5),
    "generator": lambda *_: np.random.default_rng(5),
    "random state": lambda *_: np.random.RandomState(5),
    "torch generator": lambda *_: torch.Generator().manual_seed(5),
    "partial": lambda a, _, x, __: functools.partial(max, x, a, default=1000),
    "method": lambda a, _, x, __: Plain(a, x).method,
    "closure": lambda a, _, x, __: counting(a, x),
    "bytes": lambda *_: bytearray(text("bytes").encode()),
    "stream": lambda *_: io.StringIO(text("stream")),
    "byte stream": lambda *_: io.BytesIO(text("stream").encode()),
    "iterator": lambda *_: iter([1000, 2000, 3000]),
    "count": lambda *_: itertools.count(1000),
    "cycle": lambda *_: itertools.cycle([1000, 2000]),
    "bar": lambda *_: tqdm(total=1000, file=io.StringIO(), desc="steps"),
    "bar of items": lambda _, __, x, ___: tqdm([x, 1, 2], file=io.StringIO()),
    "disabled bar": lambda *_: tqdm(total=1000, disable=True),
    "error": lambda a, *_: ValueError(a),
}


def made_again(value):
    return pickle.loads(pickle.dumps(value))


def build(recipe):
    """Return variables that lead to what is made, the same in each call, with no value shared between calls."""
    nodes = [[1000]]
    for name, a, b, x, y in recipe:
        nodes.append(MAKERS[name](made_again(a), made_again(b), nodes[x % len(nodes)], nodes[y % len(nodes)]))
    variables = {f"v{number}": node for number, node in enumerate(nodes)}
    variables |= {f"p{number}": made_again(each[1]) for number, each in enumerate(recipe)}
    for _, _, _, x, y in recipe[::2]:  # cycles
        add_to(nodes[x % len(nodes)], nodes[y % len(nodes)])
    return variables


def add_to(thing, value):
    if isinstance(thing, list):
        thing.append(value)
    elif isinstance(thing, Plain | Record | Table):
        thing.more = value
    elif isinstance(thing, dict) and not isinstance(thing, collections.Counter):
        thing["more"] = value


def set_item(v, i, _, value):
    thing = v[i]
    thing[next(iter(thing)) if isinstance(thing, dict) else 0] = value


def to_end(v, i, *_):
    thing = v[i]
    thing[key] = thing.pop(key := next(iter(thing)))


def write(v, i, *_):
    v[i].write("more" if isinstance(v[i], io.StringIO) else b"more")


def draw(v, i, *_):
    thing = v[i]
    if isinstance(thing, torch.Generator):
        torch.rand(1, generator=thing)
    else:
        thing.random()


CHANGES = {
    "add": lambda v, i, j, _: add_to(v[i], v[j]),
    "append": lambda v, i, _, value: v[i].append(value),
    "append made": lambda v, i, j, value: v[i].append(Plain(value, [v[j]])),
    "pop": lambda v, i, *_: v[i].pop(),
    "clear": lambda v, i, *_: v[i].clear(),
    "reverse": lambda v, i, *_: v[i].reverse(),
    "set item": set_item,
    "to end": to_end,
    "update": lambda v, i, _, value: v[i].update({text("new"): value}),
    "set of it": lambda v, i, *_: v[i].add(2000),
    "attribute": lambda v, i, _, value: set_attribute(v[i], "x", value),
    "attribute of another": lambda v, i, j, _: set_attribute(v[i], "x", v[j]),
    "new attribute": lambda v, i, _, value: set_attribute(v[i], "z", value),
    "property": lambda v, i, _, value: set_attribute(v[i], "both", value),
    "no attribute": lambda v, i, *_: delattr(v[i], "x"),
    "equal": lambda v, i, *_: set_attribute(v[i], "x", made_again(v[i].x)),
    "tensor": lambda v, i, *_: v[i].detach().add_(1),
    "no number": lambda v, i, *_: v[i].detach().fill_(torch.nan),
    "gradient": lambda v, i, *_: set_attribute(v[i], "grad", torch.ones_like(v[i])),
    "frozen": lambda v, i, *_: v[i].requires_grad_(False),
    "another shape": lambda v, i, *_: set_attribute(v[i], "data", torch.ones(7)),
    "array": lambda v, i, *_: np.add(v[i], 1000, out=v[i]),
    "part of an array": lambda v, i, *_: v[i].__setitem__(..., 2),
    "train": lambda v, i, *_: v[i](torch.randn(3, 2)).sum().item(),
    "evaluate": lambda v, i, *_: v[i].eval(),
    "call": lambda v, i, *_: v[i](),
    "draw": draw,
    "draw of all": lambda *_: (random.random(), np.random.rand(), torch.rand(1)),  # noqa: NPY002
    "write": write,
    "next": lambda v, i, *_: next(v[i]),
    "bar": lambda v, i, *_: (v[i].update(3), v[i].set_postfix(loss=0.5)),
    "bar's words": lambda v, i, *_: v[i].set_description("more"),
    "rebind": lambda v, i, _, value: v.update({i: value}),
    "rebind to another": lambda v, i, j, _: v.update({i: v[j]}),
    "rebind to new": lambda v, i, j, value: v.update({i: [v[j], value]}),
    "new variable": lambda v, i, j, value: v.update({f"n{i}": value, f"m{i}": v[j]}),
    "no variable": lambda v, i, *_: v.pop(i),
    "nothing": lambda *_: None,
}

RECIPES = st.lists(
    st.tuples(st.sampled_from([*MAKERS]), PLAIN, PLAIN, st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=5
)
DONE = st.lists(st.tuples(st.sampled_from([*CHANGES]), st.integers(0, 5), st.integers(0, 5), PLAIN), max_size=6)


def set_attribute(thing, name, value):
    assert type(thing) is not collections.OrderedDict  # torch has thousands, and nobody gives them any
    setattr(thing, name, value)


def do(changes, variables):
    for name, i, j, value in changes:
        with contextlib.suppress(Exception):
            CHANGES[name](variables, f"v{i}", f"v{j}", made_again(value))


def by_name(variables):
    return dict(sorted(variables.items()))


def numbered(variables):
    heap, spaces = Heap([]), {"x": Variables(variables)}
    heap.number_objects(spaces)
    return heap, spaces


@settings(max_examples=MANY, deadline=None, report_multiple_bugs=False, phases=[Phase.generate, Phase.shrink])
@given(RECIPES, DONE, DONE)
def test_another_process_has_what_this_one_had(recipe, first, then):
    torch.manual_seed(0)
    (ours, theirs) = (build(recipe), build(recipe))
    heap, spaces = numbered(ours)
    other, others = numbered(theirs)
    refused = ""
    try:
        heap.snapshot(spaces, {})
        do(first, ours)
        heap.snapshot(spaces, {})
        do(then, ours)
        other.restore(others, heap.snapshot(spaces, {}))
    except NotCarriedError as error:
        refused = str(error)
    if refused:
        assert re.match(r"`\w+(\..*)?` of x", refused)
        return
    assert first_difference(by_name(ours), by_name(theirs)) == ""
    states = generators()
    for variables in (ours, theirs):  # what is shared is shared there, too
        set_generators(states)
        do(then, variables)
    assert first_difference(by_name(ours), by_name(theirs)) == ""


@settings(max_examples=100, deadline=None)
@given(RECIPES)
def test_what_is_as_it_was_takes_nothing_and_is_never_refused(recipe):
    ours = build(recipe)
    heap, spaces = numbered(ours)
    heap.snapshot(spaces, {})
    assert heap._find_changed() == [] or any(heap._numbered[key].is_moving for key in heap._find_changed())


@pytest.mark.parametrize(
    "value", [1000, 1.5, text(1), b"of bytes", 2**80, np.float64(0.1), dt.date(2000, 1, 1), (1000, 1)]
)
def test_what_is_set_to_an_equal_value_has_not_changed(value):
    thing = Plain(made_again(value), 0)
    heap, _ = numbered({"thing": thing})
    thing.x = made_again(value)
    assert heap._find_changed() == []
    for other in (True, 1, 1.0, "1", -0.0, 0.0, np.float32(1), np.float64(1), uuid.UUID(int=1), float("nan")):
        thing.x = other
        assert len(heap._find_changed()) == 1


MIB = 1 << 17  # numbers
LARGE = {
    "an array": (lambda: np.zeros(2 * MIB), ""),
    "a large array": (lambda: np.zeros(9 * MIB), "`x` of x, an array of 9 MiB, was written"),
    "a large array that is turned": (lambda: np.zeros((9, MIB)).T, "`x` of x, an array of 9 MiB, was written"),
    "bytes of an array": (lambda: np.zeros(9 * MIB * 8 + 3, np.uint8), "`x` of x, an array of 9 MiB, was written"),
    "a tensor": (lambda: torch.zeros(2 * MIB), ""),
    "a large tensor": (
        lambda: torch.zeros(9 * MIB),
        "`x` of x, a large tensor outside of the model, can't be had from another rank: no",
    ),
}


@pytest.mark.parametrize("kind", LARGE)
@pytest.mark.parametrize("level", ["", "0.0"])
def test_what_is_written_to_large_memory_is_carried_or_refused(kind, level):
    make, refused = LARGE[kind]
    for write_all in (True, False):
        ours, theirs = {"x": make()}, {"x": make()}
        heaps = [numbered({} if level else each) for each in (ours, theirs)]
        for (heap, spaces), each in zip(heaps, (ours, theirs), strict=True):
            spaces["x"] = Variables(each)
            heap.number_objects(spaces, level or "again.")
        memory = ours["x"].numpy() if isinstance(ours["x"], torch.Tensor) else ours["x"]
        memory[...] = 1 if write_all else 0
        memory[-1] = 1
        (heap, spaces), (other, others) = heaps
        refusal = ""
        try:
            heap.find_written()
            other.restore(others, heap.snapshot(spaces, {}))
        except NotCarriedError as error:
            refusal = str(error)
        assert refusal.startswith(refused)
        assert bool(refusal) is bool(refused)
        assert refusal or first_difference(ours, theirs) == ""
        if write_all and refused.endswith("was written"):
            with pytest.raises(NotCarriedError, match=refused):
                heap.snapshot(spaces, {})


def test_arrays_that_together_are_too_much_are_looked_at_in_turn():
    ours = {f"x{number}": np.zeros(7 * MIB) for number in range(3)}
    heap, spaces = numbered(ours)
    ours["x2"][77] = 1
    with pytest.raises(NotCarriedError, match="`x2` of x, an array of 7 MiB, was written"):
        for _ in iter(lambda: heap.snapshot(spaces, {}), 0):  # sooner or later
            pass


class Refresh(threading.Thread):
    """A thread of a library that shows people how far something is."""

    __module__ = "rich.live"


class OwnRefresh(Refresh):
    """One that another library has made of it."""


@pytest.mark.parametrize("draws", [True, False])
@pytest.mark.parametrize(("alone", "kind"), [(True, threading.Thread), (False, threading.Thread), (True, OwnRefresh)])
def test_numbers_that_a_thread_may_have_drawn_are_refused_by_the_name_of_the_thread(draws, alone, kind):
    heap, spaces = numbered({"x": [1]})
    go, done = threading.Event(), threading.Event()

    def loads_ahead():
        if draws:
            np.random.rand()  # noqa: NPY002 the generator that all share
        go.set()
        done.wait()

    thread = kind(target=loads_ahead, daemon=True)
    thread.start()
    go.wait()
    try:
        if alone and kind is threading.Thread:
            done.set()
            thread.join()
        for _ in range(2):
            with (
                contextlib.nullcontext()
                if alone or not draws
                else pytest.raises(NotCarriedError, match=r"a thread that runs `loads_ahead` \(test_carry.py:")
            ):
                heap.snapshot(spaces, {})
    finally:
        done.set()
        thread.join()
    heap.snapshot(spaces, {})


@settings(max_examples=100, deadline=None)
@given(RECIPES, PLAIN, PLAIN)
def test_a_text_of_options_is_by_value_in_all_processes(recipe, one, other):
    ours, theirs = ({"lr": one, (1, "key"): build(recipe)} for _ in range(2))
    assert text_of(ours) == text_of(theirs)
    assert "0x" not in text_of({"hook": Plain(1, 2), "function": counting(1, 2), "a": np.float64(0.1)})
    if first_difference(one, other):
        assert text_of({"lr": one}) != text_of({"lr": other})


def normalized(view):
    """Return a module as torch's `spectral_norm` makes it, with variables, numbered: it keeps its weight's memory."""
    torch.manual_seed(3)
    module = torch.nn.Linear(3, 3)
    module.kept, module.view = module.weight.data, view(module.weight.data)
    variables = {"module": module}
    heap = Heap(module.parameters())
    spaces = {"script": Variables(variables)}
    heap.number_objects(spaces)
    return module, heap, spaces


@pytest.mark.parametrize("view", [lambda weight: weight, lambda weight: weight.t(), lambda weight: weight[1:]])
def test_what_has_the_memory_of_a_parameter_has_its_values_however_old_a_snapshot_is(view):
    module, heap, spaces = normalized(view)
    before = heap.snapshot(spaces, {})
    with torch.no_grad():
        module.weight += 1
    module.kept.seen, module.later = 4, view(module.weight.data)
    after = heap.snapshot(spaces, {})
    again, other, there = normalized(view)
    with torch.no_grad():
        again.weight.copy_(module.weight)
    other.restore(there, before)  # of a loop around, that began before the parameters changed
    other.restore(there, after)
    again.weight.data.zero_()
    assert not any(bool(each.any()) for each in (again.kept, again.view, again.later))
    assert again.kept.seen == 4
    module.kept.set_(torch.ones(3))
    with pytest.raises(
        NotCarriedError, match=r"module\.kept` of script: a tensor that had a parameter's or moment's memory"
    ):
        heap.snapshot(spaces, {})


class Criterion(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))
        self.calls, self.inner = 0, torch.nn.BatchNorm1d(2)

    def forward(self, x):
        self.seen += 1
        self.calls += 1
        return self.inner(x).sum()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_that_compiled_functions_may_round_otherwise_is_said_where_they_may():
    def halve(x):
        return x / 2

    before = torch._C._jit_set_profiling_mode(True)
    try:
        torch.jit.script(halve)
        assert "halve, and may round otherwise in its first calls" in rounding_hint()
        assert rounding_hint() == "", "its profiling mode is off"
    finally:
        torch._C._jit_set_profiling_mode(before)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("how", [torch.jit.script, lambda module: torch.jit.trace(module, torch.ones(2, 2))])
def test_what_a_compiled_module_holds_is_carried(how):
    def made():
        variables = {"criterion": how(Criterion()), "total": 0}
        return variables, *numbered(variables)

    (ours, heap, spaces), (theirs, other, others) = made(), made()
    for _ in range(3):
        ours["criterion"](torch.rand(2, 2))
    ours["criterion"].eval()
    other.restore(others, heap.snapshot(spaces, {}))
    one, another = ours["criterion"], theirs["criterion"]
    assert first_difference(dict(one.state_dict()), dict(another.state_dict())) == ""
    looks = [(getattr(each, "calls", 0), each.training, each.inner.training) for each in (one, another)]
    assert looks[0] == looks[1]
    before = another.seen.item()
    another(torch.ones(2, 2))
    assert another.seen.item() == before + 1


@pytest.mark.parametrize("size", [8, 1 << 15])
def test_what_has_the_first_ranks_numbers_is_as_it_was_loaded_and_changes_from_there(size):
    ours, theirs = {"x": torch.randn(size), "y": torch.ones(2)}, {"x": torch.randn(size), "y": torch.ones(2)}
    (heap, spaces), (other, its_spaces) = numbered(ours), numbered(theirs)
    other.keep_states([Given(theirs["x"]), theirs["y"]])
    theirs["x"].copy_(ours["x"])
    theirs["y"].zero_()
    for _ in range(2):
        other.restore(its_spaces, heap.snapshot(spaces, {}))
        assert torch.equal(theirs["x"], ours["x"])
        assert torch.equal(theirs["y"], torch.ones(2)), "each process makes that by itself"
        assert not snapshot_differences(other.snapshot(its_spaces, {}), heap.snapshot(spaces, {}))
        theirs["x"][3] += 1
        assert snapshot_differences(other.snapshot(its_spaces, {}), heap.snapshot(spaces, {}))
        ours["x"][3] += 1


def test_what_was_loaded_and_is_as_a_later_snapshot_has_it_has_changed_for_both():
    ours, theirs = {"x": torch.zeros(3)}, {"x": torch.zeros(3)}
    (heap, spaces), (other, its_spaces) = numbered(ours), numbered(theirs)
    other.keep_states([Given(theirs["x"])])
    on_the_way = heap.snapshot(spaces, {}, ends=False)
    for each in (ours["x"], theirs["x"]):
        each.add_(1)
    other.restore(its_spaces, on_the_way, ends=False)
    other.restore(its_spaces, heap.snapshot(spaces, {}), ends=True)
    assert not snapshot_differences(other.snapshot(its_spaces, {}), heap.snapshot(spaces, {}))


def resumed():
    """Return a model's optimizer and a checkpoint that was loaded into it, as numbered in a process."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter])
    zeros = {"exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3), "step": torch.tensor(4.0)}
    read = {"opt": {"state": {0: zeros}, "param_groups": optimizer.state_dict()["param_groups"]}}
    optimizer.load_state_dict(read["opt"])
    heap, spaces = Heap([parameter, optimizer]), {"x": Variables({"read": read})}
    heap.number_objects(spaces)
    return parameter, optimizer, zeros, heap, spaces


def test_what_a_checkpoint_that_was_read_shares_with_an_optimizer_goes_with_that():
    (parameter, optimizer, ours, heap, spaces), (_, other, theirs, taker, its_spaces) = resumed(), resumed()
    on_the_way = heap.snapshot(spaces, {}, ends=False)
    parameter.sum().backward()
    optimizer.step()
    assert ours["step"] == 5
    load_optimizer(other, optimizer.state_dict())
    taker.restore(its_spaces, on_the_way, ends=False)
    taker.restore(its_spaces, heap.snapshot(spaces, {}), ends=True)
    assert first_difference(ours, theirs) == ""
    assert not snapshot_differences(taker.snapshot(its_spaces, {}), heap.snapshot(spaces, {}))
    optimizer.state[parameter]["exp_avg"] = torch.ones(3)
    with pytest.raises(NotCarriedError, match=r"`read.opt.state.0.exp_avg` .*has other memory now"):
        heap.snapshot(spaces, {})


def test_a_gradient_can_be_changed_in_place_where_it_was_carried_as_where_it_was_computed():
    ours, theirs = {"x": torch.ones(3, requires_grad=True)}, {"x": torch.ones(3, requires_grad=True)}
    (heap, spaces), (other, its_spaces) = numbered(ours), numbered(theirs)
    ours["x"].square().sum().backward()
    other.restore(its_spaces, heap.snapshot(spaces, {}))
    for each in (ours["x"], theirs["x"]):
        each.grad.detach_().zero_()  # as scripts' own zero_grad does, after torch's
    assert not snapshot_differences(other.snapshot(its_spaces, {}), heap.snapshot(spaces, {}))


def test_an_object_by_which_others_are_found_in_a_dict_is_found_another_way_itself():
    def made():
        layer = torch.nn.Linear(1, 1)
        return {"layers": {layer: SimpleNamespace(layer=layer, count=0)}, "net": {"a": {"b": {"c": {"d": layer}}}}}

    ours, theirs = made(), made()
    (heap, spaces), (other, its_spaces) = numbered(ours), numbered(theirs)
    [[layer, kept]], [[its_layer, its_kept]] = ours["layers"].items(), theirs["layers"].items()
    kept.count, kept.last = 3, layer
    other.restore(its_spaces, heap.snapshot(spaces, {}))
    assert its_kept.count == 3
    assert its_kept.last is its_layer


@pytest.mark.parametrize(
    "made",
    [lambda: torch.arange(6.0).reshape(2, 3).t(), lambda: torch.ones(1, 2, 3, 4).to(memory_format=torch.channels_last)],
)
def test_a_tensor_lies_in_memory_as_it_did(made):
    ours, theirs = {"kept": []}, {"kept": []}
    (heap, spaces), (other, its_spaces) = numbered(ours), numbered(theirs)
    ours["kept"].append(made())
    other.restore(its_spaces, heap.snapshot(spaces, {}))
    [kept] = theirs["kept"]
    assert torch.equal(kept, made())
    assert kept.stride() == made().stride()
    assert kept.data_ptr() % 64 == 0


class Scales:
    def scale(self):
        return "scales"

    @classmethod
    def made(cls):
        return cls


class Halves(Scales):
    def scale(self):
        return "halves"


def test_a_bound_method_is_what_it_was_whatever_its_object_has_by_that_name():
    ours, theirs = ({"x": Halves(), "kept": []} for _ in range(2))
    (heap, spaces), (other, its_spaces) = numbered(ours), numbered(theirs)
    kept = ours["x"]
    ours["kept"] += [kept.scale, super(Halves, kept).scale, kept.made, Halves.made]
    kept.scale = kept.made = len
    other.restore(its_spaces, heap.snapshot(spaces, {}))
    assert [each() for each in theirs["kept"]] == ["halves", "scales", Halves, Halves]
    assert theirs["kept"][0].__self__ is theirs["x"]
    assert theirs["x"].scale is len


def test_a_method_that_a_script_binds_by_itself_is_bound_to_the_object_that_is_there():
    def made():
        def fused(own):
            return own

        thing = Halves()
        thing.scale = MethodType(fused, thing)
        return {"x": thing}

    ours, theirs = made(), made()
    (heap, spaces), (other, its_spaces) = numbered(ours), numbered(theirs)
    own = theirs["x"].scale.__func__
    ours["x"].forward = MethodType(ours["x"].scale.__func__, ours["x"])  # as where a model is unwrapped
    other.restore(its_spaces, heap.snapshot(spaces, {}))
    assert theirs["x"].forward() is theirs["x"]
    assert theirs["x"].forward.__func__ is own


def test_an_optimizer_whose_options_hold_a_function_is_carried_with_the_values_that_this_keeps():
    def made():
        optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
        optimizer.param_groups[0]["filter"] = counting(1.0, 2.0)
        heap, spaces = Heap([optimizer]), {"x": Variables({"optimizer": optimizer})}
        heap.number_objects(spaces)
        return heap, spaces, optimizer.param_groups[0]

    (heap, spaces, ours), (other, its_spaces, theirs) = made(), made()
    own = theirs["filter"]
    ours["filter"]()
    ours["lr"] = 0.5
    other.restore(its_spaces, heap.snapshot(spaces, {}))
    assert (theirs["filter"], theirs["lr"]) == (own, 0.5)
    assert theirs["filter"]() == (1002, [1.0, 2.0, 1001, 1002])


def test_a_large_gradient_that_is_kept_is_named_with_the_cure():
    parameter = torch.nn.Parameter(torch.ones(LARGE_BYTES // 4 + 1))
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(NotCarriedError, match=r"gradients are kept .*: call zero_grad\(\) right behind each update"):
        gradients_of([parameter], whole=True, zeroed=False)


class Spread(torch.Tensor):
    """A tensor with a shape and no numbers of its own, as DTensor is."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), named=None):
        made = function(*(each.inner if isinstance(each, cls) else each for each in arguments), **(named or {}))
        return cls(made) if function is torch.ops.aten.detach.default else made


def test_a_large_tensor_without_memory_of_its_own_is_not_read():
    heap, spaces = Heap([]), {"x": Variables({"one": Spread(torch.ones(LARGE_BYTES))})}
    heap.number_objects(spaces)
    heap.find_written()
    assert heap.snapshot(spaces, {})
