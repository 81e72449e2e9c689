"""Ranks of any layout of the example, each a process of its own that plays its part alone, and what they hold."""

import importlib.util
import multiprocessing
import traceback
import zlib

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from helpers import ROOT
from unicron.contracts.tasks import ParallelLayout
from unicron.train.snapshots.gathering import collect_state
from unicron.train.snapshots.shards import Box, local

EXAMPLE = ROOT / "examples" / "parallel" / "train.py"
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(  # what would take each of its processes seconds; it knows no folder of the tests
    [
        "torch._dynamo",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "torch.testing._internal.distributed.fake_pg",
        "unicron.train.snapshots.gathering",
        "unicron.train.snapshots.stored.reading",
    ]
)
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


def plain_state(protected):
    """Return what a rank holds, as plain tensors by name."""
    return collect_state(3, protected)["objects"]


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def as_rank(layout, place, play, *args):
    """Have `play` called by the worker of a place, with what it protects, and return what it raised as text.

    It is no fork of the process that tests: that one has threads, and a lock that one of them holds is held for ever
    in its child.
    """
    there, here = FORKSERVER.Pipe()
    process = FORKSERVER.Process(target=_main, args=(here, layout, place, play, args))
    process.start()
    here.close()
    plain_state = there.recv()
    process.join()
    return plain_state


def _main(here, layout, place, play, args):
    try:
        play(rank(layout, place), *args)
        here.send("")
    except BaseException:  # noqa: BLE001 it is plain_state
        here.send(traceback.format_exc())
