"""Large arrays and tensors of a script: whether it writes to them, where nothing tells and there is much to look at.

Of each some words are looked at in each iteration, which shows what writes to all of it, as an average of weights does.
All else is looked at in turn, for at most a hundredth of the time.
"""

import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from xxhash import xxh3_64_intdigest

from unicron.train.carry.kinds import NotCarriedError
from unicron.train.snapshots.digest import digest
from unicron.train.snapshots.shards import local

SAMPLES = 64
"""Words of each that are looked at in each iteration."""

SLICE_BYTES, SHARE = 16 << 20, 0.01
"""What is looked at in one go, and for how much of the time."""

Key = tuple[Any, ...]


class Large:
    """Some large arrays and tensors, as they are now.

    Args:
        things: by their keys.
    """

    def __init__(self, things: Mapping[Key, Any]) -> None:
        memories = [(key, memory) for key, each in things.items() if (memory := _memory_of(each)) is not None]
        self._memory: dict[Key, torch.Tensor] = dict(
            {(each.data_ptr(), len(each)): (key, each) for key, each in reversed(memories)}.values()
        )
        self._samples: dict[torch.device, tuple[list[Key], list[torch.Tensor], torch.Tensor]] = {}
        for device in {each.device for each in self._memory.values()}:
            keys = [key for key, each in self._memory.items() if each.device == device]
            words = [words_of(self._memory[key]) for key in keys]
            views = [each[:: max(1, len(each) // SAMPLES)] for each in words]
            self._samples[device] = keys, views, torch.cat(views)
        self._digests = [(key, part, _digest(part)) for key, part in self._parts()]
        self._next, self._free_at = 0, time.monotonic()

    def _parts(self) -> Iterator[tuple[Key, torch.Tensor]]:
        for key, memory in self._memory.items():
            for part in torch.split(memory, SLICE_BYTES):
                yield key, part

    def written(self) -> set[Key]:
        """Return the keys of those that are known to have been written to, after a look at some of them."""
        found = set[Key]()
        for keys, views, before in self._samples.values():
            if not torch.equal(now := torch.cat(views), before):
                sizes = [len(each) for each in views]
                pairs = zip(keys, torch.split(now, sizes), torch.split(before, sizes), strict=True)
                found |= {key for key, one, other in pairs if not torch.equal(one, other)}
        if self._digests and (began := time.monotonic()) >= self._free_at:
            self._next = (self._next + 1) % len(self._digests)
            found |= self._written_parts(self._next, self._next + 1)
            ended = time.monotonic()
            self._free_at = ended + (ended - began) / SHARE
        return found

    def all_written(self) -> set[Key]:
        """Return the keys of those that have been written to, after a look at all of them."""
        return self._written_parts(0, len(self._digests))

    def _written_parts(self, first: int, end: int) -> set[Key]:
        return {key for key, part, before in self._digests[first:end] if _digest(part) != before}


def _memory_of(thing: Any) -> torch.Tensor | None:
    """Return the memory of an array or a tensor as bytes; None where there is none.

    Raises:
        NotCarriedError: nobody can look at it as at one piece.
    """
    if isinstance(thing, torch.Tensor):
        if thing.layout != torch.strided or thing.device.type == "meta":
            return None
        storage = local(thing).detach().untyped_storage()
        try:
            held = storage.data_ptr() != 0
        except RuntimeError:
            held = False
        if not held:  # a class of its own, that holds its numbers in other tensors
            return None
        memory = torch.empty(0, dtype=torch.uint8, device=thing.device).set_(storage)
    else:
        numpy = sys.modules["numpy"]
        whole = thing
        while isinstance(whole.base, numpy.ndarray) and whole.base.flags.writeable:
            whole = whole.base
        if not (whole.flags.c_contiguous or whole.flags.f_contiguous) or whole.dtype.hasobject:
            raise NotCarriedError("a large array that has gaps, or holds objects")
        memory = torch.from_numpy(whole.reshape(-1, order="A").view(numpy.uint8))
    return memory


def words_of(memory: torch.Tensor) -> torch.Tensor:
    """Return memory as words of 8 bytes, but for what is at its end: a byte of each number may never change."""
    return memory[: len(memory) // 8 * 8].view(-1, 8)


def _digest(part: torch.Tensor) -> int:
    if part.device.type != "cpu":
        return digest([("", part)])
    memory: Any = part.numpy()
    return xxh3_64_intdigest(memory)
