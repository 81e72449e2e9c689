"""One of two ranks of examples/parallel/train.py's decoder, with a `Session` or with plain torch, that takes turns.

Not for people: `benchmarks.overhead` runs it. Pairs of ranks pass a turn around: one computes a block of iterations,
the others wait, so that all have the same cores and the same moments of the machine.
"""

import argparse
import contextlib
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.command import ROOT
from benchmarks.harness.processes import cpu_s
from benchmarks.struck import loaded
from unicron.train import Session
from unicron.train.groups.inner import DIMENSIONS
from unicron.train.session.overlap import Overlap

SCRIPT = ROOT / "examples" / "parallel" / "train.py"
MODES = ("dp", "fsdp", "tp")
BATCH, CONTEXT, LAYERS, HEADS = 8, 64, 4, 4
MICROBATCHES = 4
SMALL, SMALL_ROUNDS = 64, 50  # elements of the small all-reduce, and how many of them make one median


class Turns:
    """The turn that pairs pass around, a number in a file; rank 0 of a pair passes it on, and notes what it took."""

    def __init__(self, folder: Path, pair: int, pairs: int, rank: int) -> None:
        self._turn, self._pair, self._pairs, self._rank = folder / "turn", pair, pairs, rank
        self._notes = folder / f"pair-{pair}.jsonl"
        self._others = [int(pid) for pid in (folder / "others").read_text().split()]
        self._round, self._began, self._used, self._others_used = 0, 0.0, 0.0, 0.0

    def begin(self) -> None:
        """Wait for this pair's turn."""
        while int(self._turn.read_text()) < self._round * self._pairs + self._pair:
            time.sleep(0.001)
        self._began, self._used = time.perf_counter(), time.process_time()
        self._others_used = sum(map(cpu_s, self._others))

    def end(self, group: Any) -> None:
        """Note what the turn took, and a small all-reduce in `group` if there is one; pass the turn on."""
        found = {"seconds": time.perf_counter() - self._began, "cpu_s": time.process_time() - self._used}
        found["others_s"] = sum(map(cpu_s, self._others)) - self._others_used
        if group is not None:
            found["small_us"] = small_us(group)
        self._round += 1
        if self._rank == 0:
            with self._notes.open("a") as file:
                file.write(json.dumps(found) + "\n")
            following = self._turn.with_suffix(f".{self._pair}")
            following.write_text(str((self._round - 1) * self._pairs + self._pair + 1))
            following.rename(self._turn)


def small_us(group: Any) -> float:
    """Return the microseconds of a small all-reduce."""
    tensor, taken = torch.zeros(SMALL), list[float]()
    for _ in range(SMALL_ROUNDS):
        began = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        taken.append(time.perf_counter() - began)
    return 1e6 * statistics.median(taken)


def batch(shard: int, shards: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets."""
    text = torch.randint(256, (BATCH, CONTEXT + 1))[shard::shards]
    return text[:, :-1], text[:, 1:]


def plain(options: argparse.Namespace) -> None:
    """Train with torch alone, as one writes it for the same layout."""
    train = loaded(SCRIPT)
    dist.init_process_group("gloo")
    turns = Turns(options.folder, options.pair, options.pairs, dist.get_rank())
    model = train.Decoder(options.width, LAYERS, HEADS, CONTEXT)
    own, shard, shards, group = MICROBATCHES, 0, 1, None
    if options.mode == "dp":
        model, own = DistributedDataParallel(model), MICROBATCHES // 2
    else:
        mesh = init_device_mesh("cpu", (1, 2, 1) if options.mode == "fsdp" else (1, 1, 2), mesh_dim_names=DIMENSIONS)
        train.spread(model, mesh, HEADS)
        shard, shards = mesh["shard"].get_local_rank(), mesh["shard"].size()
        group = mesh["tensor"].get_group() if options.mode == "tp" else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(options.rounds):
        turns.begin()
        for _ in range(options.block):
            for number in range(own):
                apart = options.mode == "dp" and number < own - 1
                with model.no_sync() if apart else contextlib.nullcontext():
                    inputs, targets = batch(shard, shards)
                    (train.loss_of(model(inputs), targets) / own).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        turns.end(group)
    dist.destroy_process_group()


def with_session(options: argparse.Namespace) -> None:
    """Train with a session."""
    train = loaded(SCRIPT)
    if options.apart:
        overlap: Any = Overlap
        overlap.during = lambda *_: contextlib.nullcontext()
    session = Session(seed=1)
    mesh = session.mesh
    model = train.Decoder(options.width, LAYERS, HEADS, CONTEXT)
    train.spread(model, mesh, HEADS)
    session.protect(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))
    shard, shards = mesh["shard"].get_local_rank(), mesh["shard"].size()
    turns: Turns | None = None
    for iteration in session.iterations():
        turns = turns or Turns(options.folder, options.pair, options.pairs, session.rank)
        if iteration % options.block == 0:
            turns.begin()
        for _ in session.microbatches():
            inputs, targets = batch(shard, shards)
            session.backward(train.loss_of(model(inputs), targets))
        session.step()
        if iteration % options.block == options.block - 1:
            turns.end(mesh["tensor"].get_group() if options.mode == "tp" else None)


def run() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--apart", action="store_true", help="reduce when the backward pass is done, and not in it")
    for name in ("pair", "pairs", "block", "width", "rounds"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    (plain if options.plain else with_session)(options)


if __name__ == "__main__":
    run()
