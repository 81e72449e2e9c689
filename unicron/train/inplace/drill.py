"""A drill: a rank ends on purpose, and the process that takes its place is to compute the very gradient that it had."""

import os
import sys
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import NoReturn, Protocol

import torch

from unicron.contracts.worker import DRILL, Drilled
from unicron.errors import DrillError
from unicron.train.snapshots.shards import local
from unicron.train.worker import channel

ITERATION = 2
"""In which a rank is replaced: by then the script has made updates, and has begun an iteration with their results."""

LATEST = 10
"""In which it is given up, where the script could not be had by another process until then, nor since."""

Fingerprints = list[tuple[str, bytes, float]]
"""Of each parameter: name, digest of its gradient, empty where it has none, and the sum of its squares."""

ROUNDING = 1e-3
"""By how much the norms of gradients may differ, in relation, on GPUs: some kernels add up in no certain order."""


class DrillRecords(Protocol):
    """The records that ranks publish for one another."""

    refusal: str
    gradient: "tuple[int, Fingerprints] | None"

    def publish_gradient(self, iteration: int, prints: "Fingerprints") -> None:
        """Publish the fingerprints of this rank's gradient."""


class Drill:
    """One rank's part in the drill of a script: the last one is replaced, if there are others.

    Args:
        line: to the agent.
        rank: of this process.
        size: how many ranks there are.
    """

    def __init__(self, line: channel.AgentChannel, rank: int, size: int) -> None:
        self._line, self._rank = line, rank
        self._due = os.environ.get(DRILL) == "due" and rank == size - 1 > 0

    def run(self, left: DrillRecords, iteration: int, models: Iterable[torch.nn.Module]) -> str:
        """End this process, if that is due; else compare its gradient with that of the rank which it replaces.

        Args:
            left: records of ranks.
            iteration: whose gradient the models have just now.
            models: wrapped in DistributedDataParallel.

        Returns:
            what differs; empty where nothing does, or there was no drill.
        """
        theirs, left.gradient = left.gradient, None
        if self._due and iteration >= ITERATION and (not left.refusal or iteration >= LATEST):
            self._due = False
            if not left.refusal:
                left.publish_gradient(iteration, fingerprints(_named_parameters(models)))
                _end(self._rank)
            self._line.send(Drilled(iteration=iteration, rank=self._rank, problem=left.refusal))
        if theirs is None or theirs[0] != iteration:
            return ""
        found = difference(fingerprints(_named_parameters(models)), theirs[1], exact=not torch.cuda.is_available())
        problem = f"{found} differs from the one that the rank had whose place it has taken" if found else ""
        self._line.send(Drilled(iteration=iteration, rank=self._rank, problem=problem))
        return problem


def _named_parameters(models: Iterable[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return (each for model in models for each in model.module.named_parameters())  # type: ignore[union-attr]


def fingerprints(parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> Fingerprints:
    """Return the fingerprints of the parameters' gradients."""
    found = Fingerprints()
    for name, parameter in parameters:
        if parameter.grad is None:
            found.append((name, b"", 0.0))
            continue
        gradient = local(parameter.grad).detach()
        data = gradient.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        found.append((name, blake2b(data, digest_size=16).digest(), float(gradient.double().square().sum())))
    return found


def difference(ours: Fingerprints, theirs: Fingerprints, *, exact: bool) -> str:
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


def _end(rank: int) -> NoReturn:
    """End this process, and say why."""
    error = DrillError(f"rank {rank} is replaced on purpose, to see whether another process can take its place")
    channel.report_exception(DrillError, error, None)
    sys.stderr.flush()
    os._exit(1)
