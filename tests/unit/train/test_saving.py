"""States as files that can be mapped, and how they are saved while the worker computes on."""

import os
import threading

import pytest
import torch

from unicron.contracts.states import StateLocation, StateRef, label, read_label
from unicron.errors import InvalidInputError, StateTransferError
from unicron.snapshots.memory import SnapshotMemory
from unicron.train.snapshots.gathering import Gathering, collect_state, load_state
from unicron.train.snapshots.packed import Packing, map_file, unpack
from unicron.train.snapshots.saving import StateSaver, copy_mutable

HERE = StateLocation(node="n1", worker="t-1", name="", address="n1:1")
REF = StateRef(task="t", iteration=7, place=0, location=HERE, size=0, checksum=b"")


def written(path, value):
    packing = Packing(value)
    packing.write(map_file(path, packing.size))
    return packing.size


@pytest.mark.parametrize(
    "value",
    [
        {"a": torch.arange(5), "b": [1, (2.5, None, "x")], 3: torch.ones(2, 3, dtype=torch.bfloat16)},
        {"scalar": torch.tensor(3.0), "empty": torch.empty(0, 4), "flag": torch.tensor([True, False])},
        {"turned": torch.arange(6.0).reshape(2, 3).t(), "complex": torch.tensor([1 + 2j])},
        {"nothing": {}, "least": -(2**63), "none": [None, (), b"x"]},
    ],
)
def test_a_state_is_read_as_it_was_written(tmp_path, value):
    size = written(tmp_path / "x", value)
    found = unpack(tmp_path / "x", size)

    def same(a, b):
        if type(a) is not type(b):
            return False
        if isinstance(a, torch.Tensor):
            return a.dtype == b.dtype and torch.equal(a, b)
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(same(each, b[key]) for key, each in a.items())
        return all(map(same, a, b)) if isinstance(a, list | tuple) and len(a) == len(b) else a == b

    assert same(value, found)


def test_tied_weights_are_written_once(tmp_path):
    tied = torch.ones(1000, 1000)
    assert written(tmp_path / "x", {"a": tied, "b": tied}) < 1.1 * tied.nbytes


@pytest.mark.parametrize("damage", ["empty", "short", "foreign", "beyond"])
def test_what_is_no_state_is_told_as_such(tmp_path, damage):
    path = tmp_path / "x"
    size = written(path, {"a": torch.arange(100)})
    data, tensors = path.read_bytes(), 100 * 8
    damaged = {"empty": b"", "short": data[:-3], "foreign": b"x" * size, "beyond": data[tensors:]}
    path.write_bytes(damaged[damage])
    with pytest.raises(StateTransferError, match="x is no state"):
        unpack(path, size - tensors if damage == "beyond" else size)


@pytest.mark.parametrize("cut", [0, 1, 8, 20, -1])
def test_a_label_that_is_not_whole_is_none(cut):
    data = label(REF)
    assert read_label(b"content" + data) == REF
    with pytest.raises(InvalidInputError, match=r"no saved state|the label of"):
        read_label(data[:cut])


@pytest.fixture
def saver(tmp_path):
    saved, failed = [], []
    memory = SnapshotMemory(tmp_path, 0)
    saver = StateSaver(memory, failed.append)
    saver.of, saver.why, saver.at, saver.memory = saved, failed, tmp_path, memory
    saver.save = lambda state: saver.begin(state, REF, saved.append, lambda: True, 0.5)
    saver.through = lambda state: (saver.save(state), saver.wait())[0]
    yield saver
    saver.wait()


def state(number):
    return {"iteration": number, "objects": {"model": {"weight": torch.full((1000,), float(number))}}}


def test_two_files_take_turns_and_each_says_what_it_holds(saver):
    names = [saver.through(state(number)) for number in range(4)]
    assert names == ["t-1.1.saved", "t-1.0.saved"] * 2
    for ref in saver.of[-2:]:
        path = saver.at / ref.location.name
        assert read_label(path.read_bytes()) == ref
        found = unpack(path, ref.size)["objects"]["model"]["weight"]
        assert found[0] == saver.of.index(ref)
    assert not saver.why


def test_a_state_that_changed_as_it_was_copied_is_none(saver):
    saver.through(state(0))
    saver.begin(state(1), REF, saver.of.append, lambda: False, 0.5)
    saver.wait()
    assert [ref.location.name for ref in saver.memory.saved()] == ["t-1.1.saved"], "the one before"
    assert len(saver.of) == 1
    [why] = saver.why
    assert "parameters were changed while they were copied" in why


def test_the_last_whole_state_stays_while_the_next_is_written(saver):
    for number in range(2):
        saver.through(state(number))
    held, begun = threading.Event(), threading.Event()

    class Slow(dict):
        def items(self):
            begun.set()
            held.wait()
            return super().items()

    before = (saver.at / "t-1.0.saved").read_bytes()
    saver.save({"iteration": 9, "objects": {"model": state(9)["objects"]["model"], "late": Slow()}})
    try:
        assert begun.wait(30)
        assert (saver.at / "t-1.0.saved").read_bytes() == before, "the whole one stays"
    finally:
        held.set()


def test_what_does_not_fit_is_told_and_the_last_whole_one_stays(saver):
    saver.through(state(0))
    whole = (saver.at / "t-1.1.saved").read_bytes()
    saver.memory.limit = 6000
    for number in (1, 2):
        saver.through(state(number))
        assert saver.failed
        assert [path.name for path in saver.at.iterdir()] == ["t-1.1.saved"]
        assert (saver.at / "t-1.1.saved").read_bytes() == whole, "the next attempt goes to the other file again"
    assert len(saver.of) == 1
    assert "more than the limit of 6000 bytes: raise UNICRON_STATE_LIMIT" in saver.why[0]
    saver.memory.limit = 1 << 30
    saver.through(state(3))
    assert not saver.failed
    assert [ref.location.name for ref in saver.of] == ["t-1.1.saved", "t-1.0.saved"]


def test_whatever_can_not_be_saved_is_told_and_ends_nothing(saver):
    saver.through({"iteration": 0, "objects": {"odd": lambda: 0}})
    assert saver.failed
    assert "objects of type function" in saver.why[0]
    assert not list(saver.at.iterdir())


def test_a_file_that_has_a_second_name_is_left_as_it_is(saver):
    saver.through(state(0))
    os.link(saver.at / "t-1.1.saved", saver.at / "held")
    before = (saver.at / "held").read_bytes()
    for number in (1, 2, 3):
        saver.through(state(number))
    assert (saver.at / "held").read_bytes() == before


def test_a_state_is_that_of_the_moment_at_which_saving_began(saver):
    model, seen = torch.nn.BatchNorm1d(4), torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], momentum=0.9, lr=0.1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(8, 4)).square().sum().backward()
    optimizer.step()
    protected = {"model": model, "optimizer": optimizer, "other": seen}
    expected = [each.clone() for each in model.state_dict().values()]
    aside = copy_mutable(collect_state(7, protected), protected)
    model(torch.randn(8, 4))  # moves the means of the batches while the thread has yet to begin
    optimizer.param_groups[0]["lr"] = 5.0
    saver.through(aside)
    ref = saver.of[0]
    fresh = torch.nn.BatchNorm1d(4)
    like = {"model": fresh, "optimizer": torch.optim.Adam(fresh.parameters()), "other": seen}
    gathering = Gathering(like)
    gathering.add(unpack(saver.at / ref.location.name, ref.size))
    load_state(gathering.result(7), like)
    assert all(map(torch.equal, expected, fresh.state_dict().values()))
    assert like["optimizer"].param_groups[0]["lr"] == 1e-3
    assert torch.equal(like["optimizer"].state[fresh.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])


def test_what_a_save_costs_is_what_the_cheapest_of_late_did(saver):
    assert saver.cost_s == 0.0
    for number in range(2):
        saver.through(state(number))
    assert 0.5 < saver.cost_s < 1.5  # with what the caller says that it took
