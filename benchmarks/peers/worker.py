"""Shared code of the peers' training scripts: the model of the example, its batches, notes and strikes."""

import argparse
import datetime as dt
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.struck import Scene, Standing

TIMEOUT = dt.timedelta(seconds=10)
"""After which the peers give a collective up: by default that takes them a minute, or half an hour."""

NOBODY = -1  # iteration of a process that has yet to get the state of others


class Watched(Scene):
    """This process of a peer: where it stands is what the script sets."""

    def __init__(self, replica: int, place: int, share: int) -> None:
        super().__init__()
        self.here = Standing(0, 0, 0, replica, place)
        self.share = share

    def standing(self) -> Standing:
        """Return where this process stands."""
        return self.here

    def formed(self, epoch: int, world: int) -> None:
        """Note that the groups of a membership have formed."""
        self.here.epoch, self.here.world = epoch, world
        self.note("formed", time.time())

    def reached(self, phase: str) -> None:
        """Strike, if the next strike is due here; peers reduce in the backward pass of the last microbatch."""
        super().reached(phase)
        if phase == "backward" and self.here.computed == self.share - 1:
            super().reached("reduce")

    def together(self, ranks: int) -> None:
        """Wait until that many processes are ready, so that the first iteration is everybody's."""
        folder = Path(self.orders.folder)
        (folder / f"ready-{os.getpid()}").touch()
        while len(list(folder.glob("ready-*"))) < ranks:
            time.sleep(0.02)


def join() -> None:
    """Form the group of all processes that torchrun started together."""
    dist.init_process_group("gloo", timeout=TIMEOUT)


def batch(args: argparse.Namespace, iteration: int, number: int, shard: int, shards: int) -> tuple[Any, Any]:
    """Return this rank's part of a microbatch: the same on every worker."""
    torch.manual_seed((args.seed * 100_003 + max(iteration, 0)) * 1009 + number)
    text = torch.randint(256, (args.batch, args.context + 1))
    text = (text.cumsum(1) + text[:, :1]) % 256
    return text[shard::shards, :-1], text[shard::shards, 1:]


def accumulate(
    scene: Watched,
    replicas: int,
    backward: Callable[[int], None],
    syncing: Callable[[bool], AbstractContextManager[object]],
) -> None:
    """Compute this replica's microbatches of an iteration.

    Args:
        scene: that notes them.
        replicas: that share the global batch.
        backward: computes the microbatch of that number.
        syncing: whether the gradients are reduced with it: those of the last one are.
    """
    scene.here.computed = 0
    for turn in range(scene.share):
        began = time.time()
        with syncing(turn == scene.share - 1):
            backward(scene.here.replica + replicas * turn)
        scene.here.computed += 1
        scene.note("computed" if scene.here.iteration > NOBODY else "idle", began)


def number(name: str) -> int:
    """Return a number from the environment."""
    return int(os.environ[name])


def save(model: Any, path: Path, *, writes: bool) -> None:
    """Save the whole parameters of a stage; all ranks of the replica take part in putting them together."""
    whole = {}
    for name, each in model.named_parameters():
        whole[name] = each.full_tensor() if hasattr(each, "full_tensor") else each.detach()
    if writes:
        unfinished = path.with_suffix(f".{os.getpid()}")
        torch.save(whole, unfinished)
        unfinished.rename(path)
