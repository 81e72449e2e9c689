"""Generators of random numbers that all of a process draw from: their states, and how they begin."""

import os
import random
import sys
from hashlib import blake2b
from typing import Any

import torch

Generators = tuple[Any, ...]


def generators() -> Generators:
    """Return the states of the generators of random numbers that everybody in this process draws from."""
    numpy = sys.modules.get("numpy")
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return torch.get_rng_state(), random.getstate(), numpy.random.get_state(legacy=False) if numpy else None, cuda


def are_same(one: Generators, other: Generators) -> bool:
    """Return whether nothing was drawn in between."""
    numpy_same = one[2] is other[2] or (
        one[2]["state"]["pos"] == other[2]["state"]["pos"]
        and bool((one[2]["state"]["key"] == other[2]["state"]["key"]).all())
    )
    cuda_same = one[3] is other[3] or torch.equal(one[3], other[3])
    return torch.equal(one[0], other[0]) and one[1] == other[1] and numpy_same and cuda_same


def set_generators(states: Generators) -> None:
    """Have them be in these states."""
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    if states[2] is not None:
        sys.modules["numpy"].random.set_state(states[2])
    if states[3] is not None:
        torch.cuda.set_rng_state(states[3])


def seed(rank: int) -> None:
    """Have what is random in a script that seeds nothing be the same on a process that replaces this rank's."""
    number = int.from_bytes(blake2b(f"{os.environ.get('UNICRON_TASK', '')}:{rank}".encode(), digest_size=7).digest())
    torch.manual_seed(number)
    random.seed(number)
    if numpy := sys.modules.get("numpy"):  # it takes none so large
        numpy.random.seed(number % 2**32)
