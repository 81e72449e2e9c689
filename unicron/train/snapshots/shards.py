"""Tensors that torch has spread over the ranks of a replica (DTensor): what this rank holds of them.

torch.distributed.tensor takes seconds to import, so nothing here does where no tensor is spread.
"""

import functools
from typing import Any, NamedTuple

import torch

from unicron.errors import StateTransferError

MARK = "__spread__"


class Box(NamedTuple):
    """The part of a tensor that a rank holds.

    Attributes:
        whole: shape of the tensor.
        offset: where in it the part begins, in each dimension.
        shape: of the part.
    """

    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Box":
        """Return the box of what this rank holds of a tensor; all of it, where it is not spread.

        Raises:
            StateTransferError: what it holds is no box.
        """
        if not is_sharded(tensor):
            return cls(tuple(tensor.shape), (0,) * tensor.dim(), tuple(tensor.shape))
        spread: Any = tensor
        box, held = _box(spread.shape, spread.device_mesh, spread.placements), tuple(local(spread).shape)
        if box.shape != held:
            raise StateTransferError(
                f"this rank has {held} of a tensor of {tuple(tensor.shape)}, spread as {spread.placements}, instead of "
                f"{box.shape}: how it is spread can't be described to others"
            )
        return box

    def overlap(self, other: "Box") -> "Box | None":
        """Return what both hold, None where that is nothing."""
        first = tuple(map(max, self.offset, other.offset))
        ends = [
            min(mine + a, theirs + b)
            for mine, a, theirs, b in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        ]
        shape = tuple(end - begin for begin, end in zip(first, ends, strict=True))
        return None if any(size <= 0 for size in shape) else Box(self.whole, first, shape)

    def within(self, other: "Box") -> tuple[slice, ...]:
        """Return where it lies in what `other` holds, which it is a part of."""
        return tuple(
            slice(mine - theirs, mine - theirs + size)
            for mine, theirs, size in zip(self.offset, other.offset, self.shape, strict=True)
        )


@functools.cache  # torch takes 50 us to work it out, and a state has thousands
def _box(shape: torch.Size, mesh: Any, placements: Any) -> Box:
    from torch.distributed.tensor._utils import (  # noqa: PLC0415 who has such tensors has imported it
        compute_local_shape_and_global_offset,
    )

    held, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    return Box(tuple(shape), tuple(offset), tuple(held))


def is_sharded(tensor: Any) -> bool:
    """Return whether ranks of the replica share this tensor."""
    return isinstance(tensor, torch.Tensor) and hasattr(tensor, "placements")


def local(tensor: Any) -> torch.Tensor:
    """Return what this rank holds of a tensor: all of it, where it is not spread."""
    held: torch.Tensor = tensor._local_tensor if is_sharded(tensor) else tensor  # noqa: SLF001 `to_local` may take 20 us
    return held


def redistribute_like(tensor: Any, other: Any) -> Any:
    """Return `tensor` spread over the ranks as `other` is; a gradient may be a sum that is still to be made."""
    if not is_sharded(tensor) or tensor.placements == other.placements:
        return tensor
    return tensor.redistribute(other.device_mesh, other.placements)


def as_shard_of(shard: torch.Tensor, other: Any) -> torch.Tensor:
    """Return the tensor whose part on this rank is `shard`, spread as `other` is."""
    if not is_sharded(other):
        return shard
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 who has such tensors has imported it

    made: Any = DTensor  # its `from_local` takes 0.1 ms to work out the same spec again
    found: torch.Tensor = made(shard, other._spec, requires_grad=False)  # noqa: SLF001 as torch's own sharding does
    return found


def encode_shard(tensor: torch.Tensor) -> Any:
    """Return this rank's shard of a tensor with its box, as plain values and a plain tensor; or the whole tensor."""
    held = tensor.detach()
    if not is_sharded(held):
        return held
    box = Box.of(held)
    return {MARK: [list(box.whole), list(box.offset)], "shard": local(held)}


def decode_shard(value: Any) -> tuple[Box, torch.Tensor] | None:
    """Undo `encode_shard`; return None where `value` is no tensor.

    Raises:
        StateTransferError: it is marked as a shard, and is none.
    """
    if isinstance(value, torch.Tensor):
        return Box.of(value), value
    if not (isinstance(value, dict) and MARK in value):
        return None
    try:
        (whole, offset), shard = value[MARK], value["shard"]
        box = Box(tuple(map(int, whole)), tuple(map(int, offset)), tuple(shard.shape))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise StateTransferError(f"the state has a tensor that is none: {error!r}") from error
    dimensions = zip(*box, strict=False)
    inside = all(begin >= 0 and begin + size <= end for end, begin, size in dimensions)
    if not (len(box.whole) == len(box.offset) == len(box.shape) and inside):
        raise StateTransferError(f"the state has a part of {box.shape} at {box.offset} of a tensor of {box.whole}")
    return box, shard
