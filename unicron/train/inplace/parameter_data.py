"""What is written to parameters by way of their `data`, as where averages are swapped in for a validation.

torch gives a tensor with a version of its own for each use of `data`, so that a write raises none that is known. Here
all uses of one parameter's share one version. What numpy writes raises none, as with any tensor.
"""

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch.utils.weak import WeakIdKeyDictionary

PLAIN: Any = torch.Tensor.data


class ParameterData:
    """The `data` of parameters that are trained."""

    def __init__(self) -> None:
        self._watched, self._replaced = dict[int, torch.Tensor](), 0
        self._handed_out: Any = WeakIdKeyDictionary()
        self._counted = dict[int, torch.Tensor]()

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Count writes to these, and to no others."""
        self._watched = {id(each): each for each in parameters}
        found = {one: self._handed_out.get(each) for one, each in self._watched.items()}
        self._counted = {one: each for one, each in found.items() if each is not None}

    @property
    def writes(self) -> int:
        """A count that grows with each write."""
        return self._replaced + sum(each._version for each in self._counted.values())  # noqa: SLF001 there is no other way to it

    def read(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return a parameter's `data`; torch's where that is not trained, as a forward pass may read and write it."""
        known = self._handed_out.get(parameter)
        if known is None or not _is_memory_of(known, parameter):
            with torch.inference_mode(mode=False):  # what is made in that mode has no version
                made = PLAIN.__get__(parameter)
            if not (parameter.requires_grad or id(parameter) in self._watched):
                return cast("torch.Tensor", made)
            self._forget(parameter)
            self._handed_out[parameter] = known = made
            if id(parameter) in self._watched:
                self._counted[id(parameter)] = made
        return cast("torch.Tensor", known.detach())

    def write(self, parameter: torch.Tensor, value: torch.Tensor) -> None:
        """Put another tensor in the place of a parameter's."""
        self._forget(parameter)
        self._replaced += id(parameter) in self._watched
        PLAIN.__set__(parameter, value)

    def _forget(self, parameter: torch.Tensor) -> None:
        """Forget a tensor that is no longer the parameter's; what was written to it stays counted."""
        self._handed_out.pop(parameter, None)
        if (before := self._counted.pop(id(parameter), None)) is not None:
            self._replaced += before._version + 1  # noqa: SLF001 as above


def _is_memory_of(data: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether a tensor handed out before still is the parameter's numbers."""
    return (data.data_ptr(), data.shape, data.stride(), data.dtype, data.device) == (
        parameter.data_ptr(),
        parameter.shape,
        parameter.stride(),
        parameter.dtype,
        parameter.device,
    )
