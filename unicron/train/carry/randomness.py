"""Generators of random numbers that all of a process draw from: their states, and how they begin."""

import os
import pickle
import random
import sys
from hashlib import blake2b

import torch


def generators() -> bytes:
    """Return the states of the generators of random numbers that everybody in this process draws from.

    They are the same bytes as long as nothing is drawn.
    """
    numpy = sys.modules.get("numpy")
    cuda = torch.cuda.get_rng_state().numpy().tobytes() if torch.cuda.is_available() else None
    states = (
        torch.get_rng_state().numpy().tobytes(),
        random.getstate(),
        numpy.random.get_state(legacy=False) if numpy else None,
        cuda,
    )
    return pickle.dumps(states, pickle.HIGHEST_PROTOCOL)


def set_generators(states: bytes) -> None:
    """Have them be in these states."""
    of_torch, of_python, of_numpy, of_cuda = pickle.loads(states)  # noqa: S301 it comes signed, as snapshots do
    torch.set_rng_state(torch.frombuffer(bytearray(of_torch), dtype=torch.uint8))
    random.setstate(of_python)
    if of_numpy is not None:
        sys.modules["numpy"].random.set_state(of_numpy)
    if of_cuda is not None:
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(of_cuda), dtype=torch.uint8))


def seed(rank: int) -> None:
    """Have what is random in a script that seeds nothing be the same on a process that replaces this rank's."""
    number = int.from_bytes(blake2b(f"{os.environ.get('UNICRON_TASK', '')}:{rank}".encode(), digest_size=7).digest())
    torch.manual_seed(number)
    random.seed(number)
    if numpy := sys.modules.get("numpy"):  # it takes none so large
        numpy.random.seed(number % 2**32)
