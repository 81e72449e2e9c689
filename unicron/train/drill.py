"""A drill: a rank ends on purpose, and the process that takes its place is to compute the very gradient that it had."""

import os
import sys
from collections.abc import Iterable
from hashlib import blake2b
from typing import NoReturn

import torch

from unicron.contracts.worker import DRILL
from unicron.errors import DrillError
from unicron.train import channel
from unicron.train.shards import local

ITERATION = 2
"""In which a rank is replaced: by then the script has made updates, and has begun an iteration with their results."""

Prints = list[tuple[str, bytes, float]]
"""Of each parameter: name, digest of its gradient, empty where it has none, and the sum of its squares."""

ROUNDING = 1e-3
"""By how much the norms of gradients may differ, in relation, on GPUs: some kernels add up in no certain order."""


def is_due(rank: int, size: int) -> bool:
    """Return whether this rank is to be replaced: the last one is, if there are others."""
    return os.environ.get(DRILL) == "due" and rank == size - 1 > 0


def prints(parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> Prints:
    """Return what tells gradients apart."""
    found = Prints()
    for name, parameter in parameters:
        if parameter.grad is None:
            found.append((name, b"", 0.0))
            continue
        gradient = local(parameter.grad).detach()
        data = gradient.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        found.append((name, blake2b(data, digest_size=16).digest(), float(gradient.double().square().sum())))
    return found


def difference(ours: Prints, theirs: Prints, *, exact: bool) -> str:
    """Return which gradient differs first; empty where none does.

    Args:
        ours: of this process.
        theirs: of the rank whose place it has taken.
        exact: bit by bit; else up to rounding.
    """
    if [name for name, *_ in ours] != [name for name, *_ in theirs]:
        return "the parameters"
    for (name, one, mine), (_, other, its) in zip(ours, theirs, strict=True):
        if one == other or (not exact and one and other and abs(mine - its) <= 2 * ROUNDING * max(mine, its)):
            continue
        return f"the gradient of {name}"
    return ""


def end(rank: int) -> NoReturn:
    """End this process, and say why."""
    error = DrillError(f"rank {rank} is replaced on purpose, to see whether another process can take its place")
    channel.report_exception(DrillError, error, None)
    sys.stderr.flush()
    os._exit(1)
