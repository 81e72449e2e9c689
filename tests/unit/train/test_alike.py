"""What is alike on all ranks, and what is a rank's own."""

from collections.abc import Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unicron.train.carry.beside import Beside
from unicron.train.carry.kinds import NotComparedError
from unicron.train.carry.own_snapshot import Heap
from unicron.train.carry.tensors import LARGE_BYTES, Given
from unicron.train.carry.variables import Variables
from unicron.train.inplace.alike import TOTAL, Alike, Moments
from unicron.train.inplace.ghost import _differences
from unicron.train.loops.active_loops import LoopSnapshot
from unicron.train.snapshots.digest import digests


class Notices:
    """What ranks leave for one another."""

    def __init__(self, left, rank):
        self._left, self._rank = left, rank

    def leave(self, name, data):
        self._left[self._rank, name] = data

    def read_left(self, names: Iterable[str], ranks):
        names = list(names)
        return [self._left.get((rank, name), b"") for rank in ranks for name in names]


class Rank:
    def __init__(self, left, rank, size):
        torch.manual_seed(0)
        self.model, self.head = torch.nn.Linear(3, 2), torch.nn.Parameter(torch.ones(2))
        self.optimizer = torch.optim.Adam([*self.model.parameters(), self.head])
        self.trained = {id(each) for each in self.model.parameters()}
        self.moments = Moments([self.optimizer], self.trained)
        self.beside = Beside()
        self.alike = Alike(rank, size, self.model, self.trained, self.moments, self.beside)
        self.notices = Notices(left, rank)

    def update(self, scale=1.0, head=1.0):
        for each in self.model.parameters():
            each.grad = torch.full_like(each, scale)
        self.head.grad = torch.full_like(self.head, head)
        self.optimizer.step()

    def advance(self, iteration):
        found = self.alike.end(self.notices)
        self.alike.begin(iteration, self.notices)
        return found


def ranks(size=3):
    left = {}
    return [Rank(left, rank, size) for rank in range(size)]


def compared(those, iteration=1):
    """Have all ranks compare, each looking twice after the others; return what each says."""
    said = [[rank.advance(iteration) for rank in those] for _ in range(3)]
    return ["".join(each) for each in zip(*said, strict=True)]


def test_ranks_that_are_alike_confirm_that_and_keep_only_what_is_their_own():
    those = ranks()
    for rank in those:
        rank.update()
    assert not any(rank.alike.is_confirmed for rank in those)
    assert compared(those) == ["", "", ""]
    assert all(rank.alike.is_confirmed for rank in those)
    assert all(rank.moments.own == {2} for rank in those), "moments of what is not reduced"


def test_no_rank_confirms_before_all_have_come_so_far():
    those = ranks()
    for rank in those:
        rank.update()
    for _ in range(3):
        assert [rank.advance(1) for rank in those[:2]] == ["", ""]
    assert not any(rank.alike.is_confirmed for rank in those)


def test_a_parameter_that_one_rank_has_otherwise_is_named_on_all():
    those = ranks()
    for number, rank in enumerate(those):
        rank.update(scale=-1.0 if number == 1 else 1.0)
    assert compared(those) == ["parameter weight"] * 3


def test_what_is_beside_a_model_is_each_ranks_own_where_it_differs_and_some_may_not_know_it_yet(monkeypatch):
    those = ranks()
    found = [{"bank": rank, "teacher": 5, "late": 1} for rank in range(3)]
    del found[0]["late"], found[2]["teacher"]
    for rank, each in zip(those, found, strict=True):
        rank.update()
        monkeypatch.setattr(rank.beside, "digests", lambda each=each: each)
    assert compared(those) == ["", "", ""]
    assert [rank.beside.own for rank in those] == [{"bank"}] * 3
    assert [rank.beside.alike for rank in those] == [each.keys() for each in found]
    assert [rank.beside.missing for rank in those] == [{"late", "teacher"}] * 3
    assert all(rank.beside.includes_smaller for rank in those), "as one of them may"
    assert all(rank.alike.is_confirmed for rank in those)


def test_a_connection_that_breaks_amid_a_comparison_ends_nobody():
    those = ranks()
    for number, rank in enumerate(those):
        rank.update(scale=-1.0 if number == 1 else 1.0)
        rank.advance(1)
    whole = those[0].notices
    those[0].notices = Broken(whole, "digests")
    assert (those[0].advance(1), those[0].alike.is_confirmed) == ("", False)
    those[0].notices = whole
    assert compared(those) == ["parameter weight"] * 3


class Broken:
    """Notices of which some can't be read."""

    def __init__(self, whole, name):
        self.leave, self._whole, self._name = whole.leave, whole, name

    def read_left(self, names, ranks):
        found = self._whole.read_left(names, ranks)
        return [b""] * len(found) if self._name in names else found


def test_moments_that_differ_become_each_ranks_own_and_go_with_its_snapshot():
    those = ranks()
    for number, rank in enumerate(those):
        rank.update()
        rank.optimizer.state[rank.model.bias]["exp_avg"].fill_(number)
    assert compared(those) == ["", "", ""]
    assert all(rank.moments.own == {1, 2} for rank in those)
    new = Rank({}, 1, 3)
    new.update(scale=3.0, head=5.0)
    new.moments.set_state(those[1].moments.state())
    assert new.moments.own == those[1].moments.own
    assert torch.equal(new.optimizer.state[new.model.bias]["exp_avg"], torch.ones(2))
    assert torch.equal(new.optimizer.state[new.head]["exp_avg"], those[1].optimizer.state[those[1].head]["exp_avg"])


def test_moments_that_a_rank_does_not_have_become_its_own_and_a_new_rank_has_none_either():
    those = ranks()
    for number, rank in enumerate(those):
        rank.update()
        if number:  # the update of this one is another rank's work
            del rank.optimizer.state[rank.model.weight]
    before = [rank.moments.look() for rank in those]
    assert compared(those) == ["", "", ""]
    assert [rank.moments.own for rank in those] == [{0, 2}] * 3
    assert all(one != rank.moments.look() for one, rank in zip(before, those, strict=True)), "it goes along"
    new = Rank({}, 2, 3)
    new.update()  # it has begun with the first rank's
    new.moments.set_state(those[2].moments.state())
    assert new.model.weight not in new.optimizer.state
    assert new.model.bias in new.optimizer.state


def rank_without(number=2):
    """Return ranks that have compared when none of them had moments of the weight."""
    those = ranks()
    for rank in those:
        rank.update()
        del rank.optimizer.state[rank.model.weight]
    compared(those)
    assert those[number].moments.alike == {1}
    return those


@pytest.mark.parametrize("has", [True, False])
def test_moments_that_were_never_compared_go_along_with_whoever_has_them_and_with_nobody_else(has):
    those = rank_without()
    before = those[2].moments.look()
    if has:
        those[2].update()
    assert (before != those[2].moments.look()) == has
    new = Rank({}, 2, 3)
    new.update()
    new.moments.set_state(those[2].moments.state())
    assert (new.model.weight in new.optimizer.state) == has
    assert new.model.bias in new.optimizer.state


@pytest.mark.parametrize("late", [True, False], ids=["all", "one"])
def test_new_moments_are_compared_at_once_where_all_ranks_have_them_and_else_when_that_is_due(late):
    those = rank_without()
    for iteration in range(2, 16):
        if iteration == 6:
            for rank in those if late else those[1:2]:
                rank.update()
                if not late:
                    rank.optimizer.state.pop(rank.head)  # that of the others is as old
        assert compared(those, iteration) == [""] * 3
        assert [0 in rank.moments.alike for rank in those] == [late and iteration >= 6] * 3
    if not late:
        with torch.no_grad():  # the others come to the same parameters
            for rank in (those[0], those[2]):
                rank.model.load_state_dict(those[1].model.state_dict())
        assert compared(those, 16) == [""] * 3
        assert all(0 in rank.moments.own for rank in those)


@pytest.mark.parametrize("alike", [True, False])
def test_large_tensors_of_which_no_rank_knew_are_compared_before_another_rank_gives_them(alike):
    those = ranks()
    for rank in those:
        rank.update()
    compared(those)
    assert all(rank.beside.can_be_given for rank in those), "there are none"
    for number, rank in enumerate(those):
        rank.beside._found = {"bank": (lambda: None, f"{0 if alike else number:016x} of something")}
    assert not any(rank.beside.can_be_given for rank in those)
    compared(those, 6)
    assert [rank.beside.can_be_given for rank in those] == [alike] * 3
    assert [rank.beside.own for rank in those] == [set() if alike else {"bank"}] * 3


def test_a_script_that_has_others_again_and_again_is_compared_ever_less_often(monkeypatch):
    [one] = ranks(1)
    looked = []
    monkeypatch.setattr(one.notices, "leave", lambda name, _: looked.append(iteration) if name == TOTAL else None)
    for iteration in range(2, 64):
        one.beside._found = {f"tensor of {iteration}": (lambda: None, f"{iteration:016x} of something")}
        one.alike._at = -1
        one.alike.begin(iteration, one.notices)
    assert looked == [2, 4, 6, 16, 32], "at 4 and 16 as that is due"


def test_a_new_rank_is_compared_when_the_others_are():
    those = ranks()
    for rank in those:
        rank.update()
    compared(those)
    new = those[2] = Rank(those[0].notices._left, 2, 3)
    new.update()
    new.alike.confirm(3)
    new.update(scale=7.0)
    assert compared(those, 3) == [""] * 3
    assert compared(those, 4) == ["parameter weight"] * 3


def test_large_moments_of_which_nobody_knows_yet_whether_they_are_alike_are_waited_for_and_not_refused():
    parameter = torch.nn.Parameter(torch.ones(LARGE_BYTES // 8 + 1))
    optimizer = torch.optim.Adam([parameter])
    moments = Moments([optimizer], {id(parameter)})
    heap, spaces = Heap([optimizer]), {"optimizers": Variables({"moments": moments})}
    heap.number_objects(spaces)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with pytest.raises(NotComparedError, match="`moments` of optimizers: ranks are compared before"):
        heap.snapshot(spaces, {})
    moments.left_out = True  # as on trial
    assert len(heap.snapshot(spaces, {})) < LARGE_BYTES
    moments.left_out = False
    moments.keep_own([], [0], {})
    assert len(heap.snapshot(spaces, {})) < LARGE_BYTES


def test_what_a_rank_finds_out_to_be_its_own_amid_a_trial_is_no_difference():
    def record(own):
        torch.manual_seed(0)
        parameter = torch.nn.Parameter(torch.ones(2))
        optimizer, seen = torch.optim.Adam([parameter]), []
        moments = Moments([optimizer], {id(parameter)})
        heap, spaces = (
            Heap([optimizer]),
            {"x": Variables({"seen": seen}), "optimizers": Variables({"moments": moments})},
        )
        heap.number_objects(spaces)
        parameter.grad = torch.ones(2)
        optimizer.step()
        seen.append(own)
        moments.keep_own(["optimizer's state of parameter 0: exp_avg"] * own, [], {})
        return LoopSnapshot([("a", 0, 0, 0)], [b""], [heap.snapshot(spaces, {})])

    assert list(_differences(record(0), record(1), set())) == ["`seen` of x"]
    assert not _differences(record(1), record(1), set())


def test_moments_that_become_alike_between_the_snapshots_of_two_loops_are_as_new_as_what_was_loaded():
    def made(updates):
        parameter = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
        moments = Moments([optimizer], {id(parameter)})
        heap, spaces = Heap([optimizer]), {"optimizers": Variables({"moments": moments})}
        heap.number_objects(spaces)
        heap.keep_states([Given(moments)])
        update(parameter, optimizer, updates)
        return heap, spaces, moments, parameter, optimizer

    def update(parameter, optimizer, times):
        for _ in range(times):
            parameter.grad = torch.ones(2)
            optimizer.step()

    heap, spaces, moments, parameter, optimizer = made(1)
    outer = heap.snapshot(spaces, {}, ends=False)  # of the epoch's head
    moments.keep_own([], [0], {})
    update(parameter, optimizer, 4)
    inner = heap.snapshot(spaces, {})
    other, its_spaces, _, its_parameter, its_optimizer = made(5)  # what it was given by another rank
    newest = its_optimizer.state[its_parameter]["momentum_buffer"].clone()
    other.restore(its_spaces, outer, ends=False)
    other.restore(its_spaces, inner)
    assert torch.equal(its_optimizer.state[its_parameter]["momentum_buffer"], newest)


def test_they_are_compared_again_when_four_times_as_many_iterations_are_done():
    those = ranks()
    for rank in those:
        rank.update()
    compared(those)
    for iteration in (2, 3):
        those[2].update(scale=7.0)
        assert compared(those, iteration) == ["", "", ""]
    assert compared(those, 4) == ["parameter weight"] * 3


@given(
    st.lists(
        st.tuples(
            st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64]),
            st.lists(st.integers(0, 5), max_size=3),
        ),
        min_size=1,
        max_size=6,
    ),
    st.data(),
)
def test_digests_differ_where_a_tensor_does_and_nowhere_else(kinds, data):
    named = [
        (f"{number}", torch.arange(2, 2 + torch.Size(shape).numel()).reshape(shape).to(dtype))
        for number, (dtype, shape) in enumerate(kinds)
    ]
    before = digests(named)
    assert before == digests([(name, each.clone()) for name, each in named])
    assert before == digests(named[:1]) | digests(named[1:]), "whatever another rank has before it"
    full = [number for number, (_, each) in enumerate(named) if each.numel()]
    if not full:
        return
    number = data.draw(st.sampled_from(full))
    changed = named[number][1]
    at = data.draw(st.integers(0, changed.numel() - 1))
    changed.view(-1)[at] = 0
    after = digests(named)
    assert [name for name in before if before[name] != after[name]] == [f"{number}"]


@pytest.mark.parametrize("elements", [100, 40_000])
def test_digests_see_two_numbers_change_places(elements):
    tensor = torch.arange(elements, dtype=torch.float32)
    before = digests([("it", tensor)])
    tensor[[3, 7]] = tensor[[7, 3]]
    assert digests([("it", tensor)]) != before
