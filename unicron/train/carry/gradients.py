"""Gradients in a rank's own snapshot: all of them, where more is added to them before an update, or which there are."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from unicron.train.carry.kinds import NotCarriedError
from unicron.train.carry.tensors import raw, unraw
from unicron.train.snapshots.shards import as_shard_of, local

ABSENT, LEFT_OUT, ZERO = range(3)
"""Of gradients that a snapshot has not: there was none, there was one, or there was one that is all zeros."""


def gradients_of(parameters: Iterable[torch.nn.Parameter], *, whole: bool, zeroed: bool) -> Any:
    """Return the gradients of parameters, for a snapshot.

    Args:
        parameters: of the models.
        whole: all numbers; else which there are.
        zeroed: the script makes them zero where they are, so those that are there may be nothing.

    Raises:
        NotCarriedError: there is a large one, to which more may be added.
    """
    there = [each.grad for each in parameters]
    if whole:
        return [each if each is None else _raw_parts(local(each)) for each in there]
    return bytes(
        ABSENT if each is None else ZERO if zeroed and not bool(local(each).any()) else LEFT_OUT for each in there
    )


def restore_gradients(
    parameters: Sequence[torch.nn.Parameter], summed: Iterable[Any], *, whole: bool
) -> list[torch.nn.Parameter]:
    """Restore them; return the parameters that had one which the snapshot has not, and are given NaN in its place."""
    missing = []
    for parameter, one in zip(parameters, summed, strict=False):
        if whole:
            gradient = None if one is None else unraw(*one).to(parameter.device)
            parameter.grad = None if gradient is None else as_shard_of(gradient, parameter)
        elif one == LEFT_OUT:
            missing.append(parameter)
            parameter.grad = torch.full_like(parameter, torch.nan)
        elif one == ZERO:  # an optimizer moves what has one, and a script may look at it
            parameter.grad = torch.zeros_like(parameter)
        else:
            parameter.grad = None
    return missing


def _raw_parts(tensor: torch.Tensor) -> tuple[bytes, torch.dtype, tuple[int, ...]]:
    try:
        return raw(tensor), tensor.dtype, tuple(tensor.shape)
    except NotCarriedError as error:
        why = "gradients are kept from one iteration to the next, as if more were to be added"
        raise NotCarriedError(f"{why}, one of them {error}: call zero_grad() right behind each update") from error
