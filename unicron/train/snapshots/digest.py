"""A 64-bit digest of a state, computed on the tensors' device, which replicas of a place compare."""

import functools
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any

import torch

from unicron.train.snapshots.shards import local

CHUNK = 1 << 16
"""Words that are mixed at once; what comes of them stays in a processor's cache."""

MASK = (1 << 64) - 1
ODD, STEP = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03
SHIFT = 29
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(named: Iterable[tuple[str, torch.Tensor]]) -> int:
    """Return 64 bits, as a signed number, of these tensors' names, types, shapes and bits; their order does not matter.

    Each word is multiplied by an odd number of its position and then folded, so that neither one that changes nor two
    that change places go unseen. Of a tensor that is spread over ranks it is this rank's shard.
    """
    found, sums = 0, dict[torch.device, torch.Tensor]()
    for name, tensor in named:
        mine = local(tensor).detach()
        text = f"{name} {mine.dtype} {tuple(mine.shape)}".encode()
        seed = int.from_bytes(blake2b(text, digest_size=8).digest())
        found += seed
        if mine.numel():
            sums[mine.device] = _mix(mine) * _signed(seed | 1) + sums.get(mine.device, 0)
    return _signed(found + sum(int(each) for each in sums.values()))


def named_tensors(protected: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the parameters and the optimizer's state of what is protected, by name.

    Buffers are left out: those of a batch norm depend on the microbatches that a replica happened to compute.
    """
    for name, thing in protected.items():
        if isinstance(thing, torch.nn.Module):
            yield from ((f"{name}.{each}", parameter) for each, parameter in thing.named_parameters())
        elif name == "optimizer":
            yield from _tensors(name, thing.state_dict())


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _tensors(f"{name}.{key}", each)
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from _tensors(f"{name}.{number}", each)


@functools.cache
def _factors(device: torch.device) -> torch.Tensor:
    return (torch.arange(CHUNK, device=device) * 2 + 1) * _signed(ODD)


def _mix(tensor: torch.Tensor) -> torch.Tensor:
    words, factors = _words(tensor), _factors(tensor.device)
    mixed, folded = torch.empty_like(factors[: len(words)]), torch.empty_like(factors[: len(words)])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(words), CHUNK):
        part = words[start : start + CHUNK]
        size = len(part)
        torch.mul(part, factors[:size], out=mixed[:size])
        torch.bitwise_right_shift(mixed[:size], SHIFT, out=folded[:size])
        mixed[:size] ^= folded[:size]
        total = total * _signed(STEP) + mixed[:size].sum()
    return total


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor as integers, the widest that fit."""
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).contiguous().flatten()
    if flat.nbytes % 8:
        return flat.view(INTEGERS[flat.element_size()])
    aligned = flat.storage_offset() * flat.element_size() % 8 == 0
    return (flat if aligned else flat.clone()).view(torch.int64)


def _signed(number: int) -> int:
    number &= MASK
    return number - (1 << 64) if number >> 63 else number


def digests(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
    """Return a digest of 64 bits for each of these tensors, by name; small ones take no call of their own."""
    found, small = dict[str, int](), dict[tuple[torch.device, int], list[tuple[str, torch.Tensor]]]()
    for name, tensor in named:
        mine = local(tensor).detach()
        if mine.nbytes > CHUNK or not mine.numel():
            found[name] = digest([("", mine)])
        else:
            flat = (torch.view_as_real(mine) if mine.is_complex() else mine).contiguous().flatten()
            small.setdefault((mine.device, flat.element_size()), []).append((name, flat.view(torch.uint8)))
    for (device, size), those in small.items():
        words = torch.cat([each for _, each in those]).view(INTEGERS[size]).to(torch.int64)
        counts = torch.tensor([len(each) // size for _, each in those], device=device)
        ends = counts.cumsum(0) - 1
        # from each tensor's own first word on: another rank may have others before it
        places = torch.arange(len(words), device=device) - (ends - counts + 1).repeat_interleave(counts)
        mixed = words * ((places * 2 + 1) * _signed(ODD))
        sums = (mixed ^ (mixed >> SHIFT)).cumsum(0)
        until = sums[ends]
        until[1:] -= sums[ends[:-1]]
        found |= zip((name for name, _ in those), until.tolist(), strict=True)
    return found
