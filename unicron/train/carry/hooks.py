"""Hooks that the modules and tensors of a script get: which shows in none of their attributes."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from unicron.train.carry.kinds import NotCarriedError, is_of_script, own_hooks
from unicron.train.carry.pickling import Key
from unicron.train.carry.unchanged import describe


class Hooks:
    """The hooks that there are, and those that were registered since objects were numbered."""

    def __init__(self) -> None:
        self._next, self._known = 0, set[int]()
        self._modules, self._tensors = list[tuple[Key, Any]](), list[tuple[Key, Any]]()

    def number(self, things: Iterable[tuple[Key, Any]]) -> None:
        """Note the hooks that these objects have now, by their keys."""
        known = list(things)
        self._modules = [(key, thing) for key, thing in known if isinstance(thing, torch.nn.Module)]
        self._tensors = [(key, thing) for key, thing in known if isinstance(thing, torch.Tensor)]
        self._next, self._known = RemovableHandle.next_id, {number for _, number in self._of_tensors()}

    @property
    def registered(self) -> int:
        """The number of the next hook, if any was registered since; else 0."""
        return RemovableHandle.next_id if self._next != RemovableHandle.next_id else 0

    def skip_to(self, number: int) -> None:
        """Have hooks that are registered from now on get this number or later ones, as another process has it."""
        self._next, RemovableHandle.next_id = -1, max(number, RemovableHandle.next_id)

    def find(self, keys: Iterable[int]) -> Iterator[Key]:
        """Find modules that have got hooks since, which are none of the objects with these identities.

        Raises:
            NotCarriedError: a tensor has got one.
        """
        if not self.registered:
            return
        for key, number in self._of_tensors():
            if number not in self._known:
                raise NotCarriedError(f"{describe(key)} has got a hook, which no other process would have")
        for key, module in self._modules:
            if any(id(hooks) not in keys for hooks in own_hooks(module).values()):
                yield key

    def _of_tensors(self) -> Iterator[tuple[Key, int]]:
        for key, tensor in self._tensors:
            for hooks in (tensor._backward_hooks, tensor._post_accumulate_grad_hooks):  # noqa: SLF001
                if hooks:
                    yield from ((key, number) for number, each in hooks.items() if is_of_script(each))
