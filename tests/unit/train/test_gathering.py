"""States handed from any layout to any other: each rank is a process of its own that plays its part alone."""

import copy

import pytest
import torch
from helpers.layouts import HEADS, LAYOUTS, as_rank, filled, load_example, plain_state, same
from helpers.stored import spread
from torch import nn

from unicron.contracts.tasks import ParallelLayout
from unicron.errors import StateTransferError
from unicron.train.snapshots.gathering import Gathering, Needs, assemble, collect_state, load_state
from unicron.train.snapshots.shards import Box


def leave(protected, path):
    torch.save(collect_state(3, filled(protected)), path)


def read(path):
    return torch.load(path, weights_only=True, mmap=True)


def gather(protected, files):
    gathering = Gathering(protected)
    for path in files:
        gathering.add(read(path))
    return gathering.result(3)


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """The files of all places, as ranks of each layout leave them."""
    folder = tmp_path_factory.mktemp("left")
    found = {}
    for number, layout in enumerate(LAYOUTS):
        found[layout] = [folder / f"{number}-{place}" for place in range(layout.replica_workers)]
        assert [as_rank(layout, place, leave, path) for place, path in enumerate(found[layout])] == [""] * len(
            found[layout]
        )
    return found


def takes_all(protected, left):
    load_state(gather(protected, left[LAYOUTS[0]]), protected)
    first = plain_state(protected)
    expected = plain_state(filled(protected))
    assert same(first, expected)
    for files in left.values():
        assert same(gather(protected, files)["objects"], expected)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_rank_of_a_layout_gets_its_part_of_what_any_layout_left(layout, left):
    for place in range(layout.replica_workers):
        assert as_rank(layout, place, takes_all, left) == ""


def check_whole(protected, left):
    expected = plain_state(filled(protected))
    for files in left.values():
        assert same(assemble(read(path)["objects"] for path in files), expected)


@pytest.mark.slow
def test_the_places_of_any_layout_make_up_the_whole_model_and_its_optimizer(left):
    assert as_rank(ParallelLayout(), 0, check_whole, left) == ""


def assembles(_, files):
    assemble(read(path)["objects"] for path in files)


@pytest.mark.slow
def test_what_a_place_lacks_is_named(left):
    assert "together lack model position elements" in as_rank(
        ParallelLayout(), 0, assembles, left[ParallelLayout(shard=3)][:2]
    )


def test_a_tensor_that_one_place_has_whole_and_others_in_parts_is_whole():
    weight = torch.rand(6, 2)
    parts = [{"model": {"w": each}} for each in (*spread(weight, 3), weight)]
    for some in (parts, parts[::-1], [parts[1], parts[3]], [parts[3], parts[0]]):
        assert torch.equal(assemble(some)["model"]["w"], weight)


@pytest.mark.slow
def test_a_rank_of_the_same_place_is_enough(left):
    layout = ParallelLayout(shard=3)
    assert as_rank(layout, 1, gather, left[layout][1:2]) == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "used", "expected"),
    [
        (ParallelLayout(pipeline=2), ParallelLayout(tensor=2), slice(1), "lack model blocks.1."),
        (ParallelLayout(pipeline=2), ParallelLayout(tensor=2), slice(1), "same names in all layouts"),
        (ParallelLayout(tensor=2), ParallelLayout(), slice(1), "elements"),
        (ParallelLayout(shard=3), ParallelLayout(shard=2), slice(1, 3), "elements"),
        (ParallelLayout(shard=3), ParallelLayout(shard=2), slice(0), "lack model:"),
    ],
)
def test_what_is_missing_is_named(before, after, used, expected, left):
    plain_state = as_rank(after, 0, gather, [*left[before][used], *left[before][used]])
    assert "StateTransferError" in plain_state
    assert expected in plain_state


@pytest.mark.slow
def test_other_shapes_and_groups_are_refused(left):
    [path] = left[ParallelLayout()]
    example = load_example()
    model = example.Decoder(width=12, layers=2, heads=HEADS, context=5)
    wider = {"model": example.Decoder(width=16, layers=2, heads=HEADS, context=5)}
    with pytest.raises(StateTransferError, match=r"model .* has the shape .*16.* here and .*12.* in the state"):
        Gathering(wider).add(read(path))
    alone = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    with pytest.raises(StateTransferError, match="optimizer has 1 groups of parameters here and 2 in the state"):
        Gathering(alone).add(read(path))
    with pytest.raises(StateTransferError, match="the state has no 'ema'"):
        Gathering({"model": model, "ema": nn.Linear(1, 1)}).add(read(path))


@pytest.mark.parametrize(
    "broken",
    [
        {"__spread__": [[4], [3]], "shard": torch.zeros(2)},
        {"__spread__": [[4], [-1]], "shard": torch.zeros(2)},
        {"__spread__": [[4, 4], [0]], "shard": torch.zeros(2)},
        {"__spread__": 3, "shard": 1},
    ],
)
def test_a_part_that_is_none_is_refused(broken):
    model = nn.Linear(4, 4)
    state = collect_state(0, {"model": model})
    state["objects"]["model"]["bias"] = broken
    with pytest.raises(StateTransferError, match="the state has a"):
        Gathering({"model": model}).add(state)


class Counting(nn.Linear):
    """A module that keeps the very tensor that it is given of its state."""

    def get_extra_state(self):
        return self.count

    def set_extra_state(self, state):
        self.count = state


def counting():
    torch.manual_seed(0)
    model = Counting(3, 3)
    model.count = torch.tensor([4])
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def test_what_is_loaded_has_nothing_of_the_file_that_it_came_from():
    state, taker, expected = collect_state(3, counting()), counting(), counting()
    gathering = Gathering(taker)
    gathering.add(state)
    load_state(gathering.result(3), taker)
    file = [*state["objects"]["model"].values()]
    file += [each for of in state["objects"]["optimizer"]["state"].values() for each in of.values()]
    for each in file:
        each.data.zero_()
    assert same(plain_state(taker), plain_state(expected))
    assert taker["model"].count == 4


def test_what_a_module_keeps_beside_its_parameters_stays_of_its_kind():
    left, taker = Counting(1, 1), Counting(1, 1)
    left.count, taker.count = ([1, (2, 3)], {"seen": 4}), None
    gathering = Gathering({"model": taker})
    gathering.add(collect_state(3, {"model": left}))
    load_state(gathering.result(3), {"model": taker})
    assert taker.count == ([1, (2, 3)], {"seen": 4})


class Mixed(torch.optim.Optimizer):
    """Keeps moments in float32 whatever its parameters are, one of them in a list."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            moments = torch.randn(2, *parameter.shape)
            self.state[parameter] = {"step": torch.tensor(1.0), "first": moments[0], "others": [moments[1]]}


def test_moments_keep_their_type_whatever_that_of_their_parameter_is():
    models = [nn.Linear(4, 4).bfloat16() for _ in range(2)]
    optimizers = [Mixed(model.parameters()) for model in models]
    optimizers[0].param_groups[0]["lr"] = 0.2
    optimizers[0].step()
    state = collect_state(3, {"model": models[0], "optimizer": optimizers[0]})
    protected = {"model": models[1], "optimizer": optimizers[1]}
    gathering = Gathering(protected)
    gathering.add(state)
    groups, states = optimizers[1].param_groups, optimizers[1].state
    group, order = groups[0], [*groups[0]]
    load_state(gathering.result(3), protected)
    assert same(collect_state(3, protected)["objects"], state["objects"])
    assert optimizers[1].param_groups is groups, "a script may have them in variables of its own"
    assert groups[0] is group
    assert [*group] == order
    assert optimizers[1].state is states


def test_a_checkpoint_that_shares_an_optimizers_tensors_shares_them_when_a_state_has_been_loaded():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    read = optimizer.state_dict()  # has the very tensors, as what a script loads has
    state = collect_state(3, {"model": model, "optimizer": optimizer})
    state = {**state, "objects": copy.deepcopy(state["objects"])}
    optimizer.step()
    load_state(state, {"model": model, "optimizer": optimizer})
    found = optimizer.state[model.weight]
    assert found["step"].item() == 1
    assert all(read["state"][0][name] is each for name, each in found.items())


def test_of_an_optimizer_a_rank_needs_all_settings_and_what_is_of_its_own_parameters():
    model = nn.Linear(3, 2)
    needs, box = Needs({"model": model, "optimizer": torch.optim.AdamW(model.parameters())}), Box.of(model.weight.data)
    assert needs.has(["optimizer", "state", "weight", "exp_avg"], box)
    assert not needs.has(["optimizer", "state", "weight.of.another.stage", "exp_avg"], box)
    assert needs.has(["optimizer", "param_groups", 0, "lr"], box)
