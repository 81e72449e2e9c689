"""Large tensors beside the model: another rank gives them where it has the same, or they are refused by name."""

import pickle
import sys
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unicron.train.carry import beside
from unicron.train.carry.beside import KEPT, Beside, evidence_of
from unicron.train.carry.compare import first_difference, snapshot_differences
from unicron.train.carry.kinds import NotCarriedError
from unicron.train.carry.own_snapshot import Heap
from unicron.train.carry.tensors import LARGE_BYTES
from unicron.train.carry.variables import NAME, Variables
from unicron.train.loops.instrument import instrument
from unicron.train.loops.loops import Loops

WORDS = 6
REFUSED = "a large tensor outside of the model, can't be had from another rank"


class Holder:
    pass


def teacher(numbers):
    made = torch.nn.Linear(1, 1, bias=False)
    made.weight = torch.nn.Parameter(numbers.reshape(2, -1).clone(), requires_grad=False)
    return made


def attached(numbers):
    made = Holder()
    made.bank = numbers
    return made


MAKERS = {
    "a module": teacher,
    "a list": lambda numbers: [numbers, 5],
    "a dictionary": lambda numbers: {"shadow": numbers},
    "an object": attached,
    "the variable": lambda numbers: numbers,
    "turned": lambda numbers: {"shadow": numbers.reshape(2, -1).t()},
}
KINDS = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.complex64]


def tensor_in(thing):
    if isinstance(thing, torch.nn.Module):
        return thing.weight
    if isinstance(thing, Holder):
        return thing.bank
    if isinstance(thing, torch.Tensor):
        return thing
    return thing["shadow"] if isinstance(thing, dict) else thing[0]


def replace(thing, value):
    new = tensor_in(thing).detach() + value
    if isinstance(thing, dict):
        thing["shadow"] = new
    elif isinstance(thing, list):
        thing[0] = new
    else:
        tensor_in(thing).data = new


CHANGES = {
    "average": lambda thing, value: tensor_in(thing).data.mul_(2).add_(value),
    "copy": lambda thing, value: tensor_in(thing).detach().copy_(torch.full_like(tensor_in(thing), value)),
    "together": lambda thing, value: torch._foreach_add_([tensor_in(thing).data], value),
    "one of them": lambda thing, value: (
        tensor_in(thing).data.reshape(-1)[-1:].fill_(value)
        if tensor_in(thing).is_contiguous()
        else tensor_in(thing).data[-1].fill_(value)
    ),
    "in place of it": replace,
    "what is small": lambda thing, value: setattr(thing, "more", value) if isinstance(thing, Holder) else None,
}
STEPS = st.lists(st.tuples(st.sampled_from([*CHANGES]), st.integers(1, 5)), max_size=3)


class Rank:
    def __init__(self, recipe):
        self.things = {
            f"v{number}": MAKERS[name](torch.arange(WORDS).to(kind)) for number, (name, kind) in enumerate(recipe)
        }
        self.beside = Beside()
        self.heap, self.spaces = Heap([], self.beside), {"x": Variables(self.things)}
        self.heap.number_objects(self.spaces)

    def do(self, steps):
        for number, each in enumerate(self.things.values()):
            for name, value in steps:
                CHANGES[name](each, value + number)

    def snapshot(self, at=None):
        return self.heap.snapshot(self.spaces, {}, at=at)

    def state(self):
        return {name: each.clone() for name, each in self.beside.state_dict().items()}

    def become(self, left, other):
        self.beside.load_state_dict(other.state())
        self.beside.before.load_state_dict(
            {name: each.clone() for name, each in other.beside.before.state_dict().items()}
        )
        self.heap.restore(self.spaces, left)


@pytest.fixture
def _any_size(monkeypatch):
    monkeypatch.setattr(beside, "LARGE_BYTES", 8)
    monkeypatch.setattr(beside, "STRIDE_BYTES", 8)


@pytest.mark.usefixtures("_any_size")
@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([*MAKERS]), st.sampled_from(KINDS)), min_size=1, max_size=3),
    *(STEPS, STEPS, STEPS, st.booleans()),
)
def test_a_new_rank_has_what_the_lost_one_had_or_it_is_refused_by_name(recipe, first, then, later, together):
    lost, survivor, new = Rank(recipe), Rank(recipe), Rank(recipe)
    for rank in (lost, survivor):
        rank.do(first)
        rank.snapshot()
        rank.do(then)
    left = lost.snapshot()
    if together:
        survivor.snapshot()
        assert survivor.beside.digests() == lost.beside.digests()
    survivor.do(later)
    refused = ""
    try:
        new.become(left, survivor)
    except NotCarriedError as error:
        refused = str(error)
    same = first_difference(lost.things, survivor.things) == ""
    if refused:
        assert REFUSED in refused
        assert not (same and together)
    else:
        assert first_difference(lost.things, new.things) == ""
        assert new.beside.digests() == lost.beside.digests(), "it can give them in its turn"
        assert new.beside.are_alike
        assert lost.beside.are_alike is not bool(lost.beside.digests())
        assert first_difference(new.state(), {name: lost.state()[name] for name in new.state()}) == ""
        assert snapshot_differences(new.snapshot(), lost.snapshot()) == {}


@pytest.mark.usefixtures("_any_size")
@pytest.mark.parametrize("change", ["average", "in place of it"])
def test_a_rank_that_is_lost_before_it_makes_its_average_is_given_what_was_before_that(change):
    recipe = [("a module", torch.float32), ("a dictionary", torch.bfloat16)]
    lost, survivor, new = Rank(recipe), Rank(recipe), Rank(recipe)
    for _ in range(3):
        for rank in (lost, survivor):
            rank.snapshot("updated")
            rank.do([(change, 1)])
            rank.snapshot("end")
    lefts = [rank.snapshot("updated") for rank in (lost, survivor)]
    survivor.do([(change, 1)])
    survivor.snapshot("end")
    new.become(lefts[0], survivor)
    assert first_difference(lost.things, new.things) == ""
    for _ in range(KEPT):
        survivor.snapshot("elsewhere")
    assert not survivor.beside.before.state_dict(), "no copy stays for good"


@pytest.mark.usefixtures("_any_size")
def test_a_copy_of_what_only_the_first_rank_has_drawn_is_given_though_it_never_changes():
    lost, survivor, new = (Rank([("a module", torch.float32)]) for _ in range(3))
    given = {evidence_of(tensor_in(each)) for each in lost.things.values()}
    for rank in (lost, survivor):
        rank.heap.carry_copies(given)
    new.do([("average", 5)])  # it has drawn something else, before there are numbers
    new.heap = Heap([], new.beside)
    new.heap.number_objects(new.spaces)
    left = lost.snapshot()
    survivor.snapshot()
    assert first_difference(lost.things, new.things)
    new.become(left, survivor)
    assert first_difference(lost.things, new.things) == ""


def test_a_large_one_differs_where_ranks_do_and_is_then_refused_by_name():
    size = LARGE_BYTES // 4 + 1
    ours, theirs = ({"bank": {"all": torch.zeros(size), "few": torch.zeros(3)}} for _ in range(2))
    ranks = [(Heap([], Beside()), {"x": Variables(each)}, each) for each in (ours, theirs)]
    for number, (heap, spaces, each) in enumerate(ranks):
        heap.number_objects(spaces)
        each["bank"]["all"][7] = each["bank"]["few"][0] = number + 1
        heap.snapshot(spaces, {})
    (heap, spaces, _), (other, *_) = ranks
    [name] = heap._beside.digests()
    assert name == "`bank.all` of x"
    assert heap._beside.digests() != other._beside.digests()
    heap._beside.own.add(name)
    with pytest.raises(NotCarriedError, match=r"`bank.all` of x: a tensor of 4194308 bytes .* not the same on all"):
        heap.snapshot(spaces, {})


def test_smaller_ones_are_given_too_where_a_snapshot_gets_too_large_with_them():
    ours = {"teacher": [torch.zeros(LARGE_BYTES // 8) for _ in range(20)]}
    heap, spaces = Heap([], given := Beside()), {"x": Variables(ours)}
    heap.number_objects(spaces)
    ours["teacher"][0].fill_(1)
    heap.snapshot(spaces, {})
    assert not given.digests(), "each rank's own, as long as there is room"
    for each in ours["teacher"]:
        each.fill_(2)
    assert len(heap.snapshot(spaces, {})) < LARGE_BYTES
    assert len(given.digests()) == 20


def test_there_is_a_limit_to_what_is_read_in_each_iteration(monkeypatch):
    monkeypatch.setattr(beside, "LEAST_BYTES", LARGE_BYTES)
    ours = {"bank": torch.zeros(LARGE_BYTES)}
    heap, spaces = Heap([]), {"x": Variables(ours)}
    heap.number_objects(spaces)
    ours["bank"].fill_(1)
    with pytest.raises(NotCarriedError, match=r"`bank` of x: .* outside of DistributedDataParallel .* over 4 MiB"):
        heap.snapshot(spaces, {})


@pytest.mark.parametrize("write", ["part.add_(1)", "whole[at : at + 4096].data.add_(1)"])
def test_a_digest_is_made_anew_where_the_numbers_may_be_others(write, monkeypatch):
    made = []
    find = beside.evidence_of
    monkeypatch.setattr(beside, "evidence_of", lambda tensor: made.append(1) or find(tensor))
    whole = torch.zeros(LARGE_BYTES)
    ours = {"bank": whole}
    heap, spaces = Heap([], given := Beside()), {"x": Variables(ours)}
    heap.number_objects(spaces)
    whole.add_(1)
    heap.snapshot(spaces, {})
    before = given.digests()
    heap.snapshot(spaces, {})
    assert len(made) == 1
    exec(write, {"whole": whole, "part": whole[5:6], "at": 123_457})
    heap.snapshot(spaces, {})
    assert len(made) == 2
    assert given.digests() != before


EPOCHS = """
class Average(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(SIZE), requires_grad=False)

average, shadow = Average(), {"weight": torch.zeros(SIZE)}
for epoch in range(3):
    log = []
    for step in range(3):
        log.append(step)
        note(epoch, step, list(log), float(average.weight[-1]), float(shadow["weight"][-1]))
        backward()
        average.weight.data.mul_(0.9).add_(step + epoch)
        shadow["weight"] = shadow["weight"] * 0.5 + average.weight
"""


class Watched:
    """A script on one rank; it is given what another one had in `there`."""

    __module__ = "unicron.tests"

    def __init__(self, there=None):
        self.passed, self.there, self.records, self._from = [], [], [there and there[1]], there
        self.loops = Loops(0, lambda: ([], [], {}, ()), self._meet, self.records.append)
        iteration = (self.loops.begin_iteration, self.loops.record_reduce, self.loops.record_update)
        module = sys.modules["script_of_a_test"] = types.ModuleType("script_of_a_test")
        vars(module).update({NAME: self.loops, "note": self, "torch": torch, "SIZE": LARGE_BYTES // 4 + 1})
        vars(module).update(backward=lambda: [each() for each in iteration])
        exec(compile(instrument(EPOCHS, "x.py", "x.py"), "x.py", "exec"), vars(module))

    def _meet(self):
        if self._from:
            self.loops.load_state_dict(self._from[0])
            self.loops.taker.beside.load_state_dict(self._from[2])
            self.loops.take_over(pickle.loads(pickle.dumps(self._from[1])))

    def __call__(self, *values):
        self.passed.append(values)
        given = {name: each.clone() for name, each in self.loops.taker.beside.state_dict().items()}
        self.there.append((self.loops.state_dict(), self.records[-1], given))


@pytest.mark.parametrize("step", [0, 2, 3, 5, 8])
def test_a_script_goes_on_as_it_would_have_with_an_average_of_its_weights(step):
    try:
        whole = Watched()
        again = Watched(whole.there[step])
        assert again.passed == whole.passed[step:]
        state, record, given = whole.there[step]
        if step:
            with pytest.raises(NotCarriedError, match=REFUSED):
                Watched((state, record, {name: each + 1 for name, each in given.items()}))
    finally:
        sys.modules.pop("script_of_a_test", None)
