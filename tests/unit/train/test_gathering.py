"""States handed from any layout to any other: each rank is a process of its own that plays its part alone."""

import importlib.util
import multiprocessing
import traceback
import zlib
from pathlib import Path

import pytest
import torch
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.tensor.parallel  # before processes are forked that would each take seconds for it
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from unicron.contracts.tasks import ParallelLayout
from unicron.errors import StateTransferError
from unicron.train.gathering import Gathering, laid_out, loaded
from unicron.train.shards import Box, local

EXAMPLE = Path(__file__).parents[3] / "examples" / "parallel" / "train.py"
HEADS = 2
LAYOUTS = [
    ParallelLayout(),
    ParallelLayout(tensor=2),
    ParallelLayout(pipeline=2),
    ParallelLayout(shard=2),
    ParallelLayout(shard=3),
    ParallelLayout(tensor=2, pipeline=2),
    ParallelLayout(tensor=2, shard=2),
]


def load_example():
    spec = importlib.util.spec_from_file_location("parallel_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def whole(name, what):
    """Return the tensor that belongs to a parameter's name, elsewhere and in every layout the same."""
    return torch.Generator().manual_seed(zlib.crc32(f"{name} {what}".encode()))


def rank(layout, place):
    """Build what the worker of a place protects, with parameters and moments of its own."""
    distributed.init_process_group("fake", rank=place, world_size=layout.replica_workers, store=FakeStore())
    mesh = init_device_mesh(
        "cpu", (layout.pipeline, layout.shard, layout.tensor), mesh_dim_names=("pipeline", "shard", "tensor")
    )
    torch.manual_seed(place)
    example = load_example()
    model = example.Decoder(width=12, layers=2, heads=HEADS, context=5)
    example.spread(model, mesh, HEADS)
    decayed = [each for each in model.parameters() if each.dim() > 1]
    plain = [each for each in model.parameters() if each.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": plain, "weight_decay": 0.0}], lr=1e-3)
    return {
        "model": model,
        "optimizer": optimizer,
        "rates": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    }


def filled(protected):
    """Give it what all ranks together have of a state."""
    names = {id(each): name for name, each in protected["model"].named_parameters()}
    for group in protected["optimizer"].param_groups:
        group["lr"] = 0.5
        for each in group["params"]:
            part = protected["optimizer"].state[each] = {"step": torch.tensor(7.0)}
            for what in ("value", "exp_avg", "exp_avg_sq"):
                box = Box.of(each.detach())
                full = torch.rand(box.whole, generator=whole(names[id(each)], what))
                mine = full[tuple(slice(at, at + size) for at, size in zip(box.offset, box.shape, strict=True))]
                with torch.no_grad():
                    held = each if what == "value" else torch.zeros_like(each)
                    local(held).copy_(mine)
                if what != "value":
                    part[what] = held.detach()
    protected["rates"].last_epoch = 7
    return protected


def told(protected):
    """Return what a rank holds, as plain tensors by name."""
    return laid_out(3, protected)["objects"]


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def as_rank(layout, place, play, *args):
    """Have `play` called by the worker of a place, with what it protects, and return what it raised as text."""
    there, here = multiprocessing.Pipe()

    def main():
        try:
            play(rank(layout, place), *args)
            here.send("")
        except BaseException:  # noqa: BLE001 it is told
            here.send(traceback.format_exc())

    process = multiprocessing.get_context("fork").Process(target=main)
    process.start()
    told = there.recv()
    process.join()
    return told


def leave(protected, path):
    torch.save(laid_out(3, filled(protected)), path)


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
    loaded(gather(protected, left[LAYOUTS[0]]), protected)
    first = told(protected)
    expected = told(filled(protected))
    assert same(first, expected)
    for files in left.values():
        assert same(gather(protected, files)["objects"], expected)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_rank_of_a_layout_gets_its_part_of_what_any_layout_left(layout, left):
    for place in range(layout.replica_workers):
        assert as_rank(layout, place, takes_all, left) == ""


def test_a_rank_of_the_same_place_is_enough(left):
    layout = ParallelLayout(shard=3)
    assert as_rank(layout, 1, gather, left[layout][1:2]) == ""


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
    told = as_rank(after, 0, gather, [*left[before][used], *left[before][used]])
    assert "StateTransferError" in told
    assert expected in told


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
    state = laid_out(0, {"model": model})
    state["objects"]["model"]["bias"] = broken
    with pytest.raises(StateTransferError, match="the state has a"):
        Gathering({"model": model}).add(state)
