"""Tensors with the memory of carried ones, such as `parameter.data`: they have the values that those are given.

A module may keep one as an attribute until its hook computes another, as torch's `spectral_norm` does. A checkpoint
that a script has read has the very tensors that its optimizer goes on with.
"""

import itertools
from collections.abc import Iterable
from typing import Any

import torch

from unicron.train.carry.kinds import ATTACHED, Kind, NotCarriedError, Parts

Memories = dict[int, torch.Tensor]
"""Carried tensors that fill their memory, by its address."""


def memories_of(carried: Iterable[Any]) -> Memories:
    """Return where carried tensors are."""
    found = Memories()
    for each in carried:
        if type(each) in {torch.Tensor, torch.nn.Parameter} and each.layout == torch.strided and each.nbytes:
            storage = each.untyped_storage()
            if storage.nbytes() == each.nbytes and storage.data_ptr():
                found[storage.data_ptr()] = each
    return found


def alias_in(thing: Any, memories: Memories) -> "Kind | None":
    """Return the kind of a tensor that is somewhere in the memory of a carried one; None of all else."""
    owner = owner_of(thing, memories)
    return Alias(owner) if owner is not None else None


def owner_of(thing: Any, memories: Memories) -> torch.Tensor | None:
    """Return the carried tensor in whose memory a tensor is, as one of the same numbers; None of all else."""
    if type(thing) is not torch.Tensor or thing.requires_grad or thing.layout != torch.strided:
        return None
    storage = thing.untyped_storage().data_ptr()
    owner = memories.get(storage)
    there = owner is not None and owner.dtype == thing.dtype and owner.untyped_storage().data_ptr() == storage
    return owner if there else None


def alias_of(owner: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> torch.Tensor:
    """Return a tensor in the memory of another one."""
    return owner.detach().as_strided(shape, stride, offset)


class Alias(Kind):
    """A tensor by what a script has attached to it, as long as it has the memory of the carried one.

    Args:
        owner: the carried one.
    """

    def __init__(self, owner: torch.Tensor) -> None:
        self._carried = owner

    @property
    def _owner(self) -> torch.Tensor:
        return self._carried

    def _shares(self, thing: torch.Tensor) -> bool:
        return thing.untyped_storage().data_ptr() == self._owner.untyped_storage().data_ptr()

    def parts(self, thing: Any) -> Parts:
        """Return what is attached."""
        return ATTACHED.parts(thing)

    def fingerprint(self, thing: Any) -> tuple[Any, ...]:
        """Return what is attached, and how it lies in the memory."""
        place = thing.storage_offset(), *thing.shape, *thing.stride()
        return self._shares(thing), *place, *itertools.chain.from_iterable(ATTACHED.parts(thing))

    def state(self, thing: Any) -> Any:
        """Return what is attached.

        Raises:
            NotCarriedError: it has other values now.
        """
        if not self._shares(thing):
            raise NotCarriedError("a tensor that had a parameter's or moment's memory, and has other memory now")
        return thing.storage_offset(), tuple(thing.shape), thing.stride(), ATTACHED.parts(thing)

    def set_state(self, thing: Any, state: Any) -> None:
        """Have the same attached to it, and be at the same place of the memory."""
        if state[:3] != (thing.storage_offset(), tuple(thing.shape), thing.stride()):
            thing.data = alias_of(self._owner, state[1], state[2], state[0])
        ATTACHED.set_state(thing, state[3])


def moments_of(carried: Iterable[Any]) -> dict[int, "Moment"]:
    """Return the kinds of the tensors that carried optimizers have in their states, by identity."""
    optimizers = (each for each in carried if isinstance(each, torch.optim.Optimizer))
    states = ((one, parameter, state) for one in optimizers for parameter, state in one.state.items())
    return {
        id(tensor): Moment(one, parameter, name)
        for one, parameter, state in states
        for name, tensor in (state.items() if isinstance(state, dict) else ())
        if type(tensor) is torch.Tensor and tensor.layout == torch.strided
    }


class Moment(Alias):
    """A tensor of an optimizer's state that something else has, too, as long as the optimizer has it.

    Args:
        optimizer: whose it is.
        parameter: of it.
        name: of what it is of the parameter.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor, name: str) -> None:
        self._optimizer, self._parameter, self._name = optimizer, parameter, name

    @property
    def _owner(self) -> torch.Tensor:
        return self._optimizer.state.get(self._parameter, {}).get(self._name, _NONE)  # type: ignore[no-any-return]


_NONE = torch.empty(0)
