"""Many small tensors that have not changed, compared in one go: a look at each by itself takes thirty times as long."""

import operator
from collections.abc import Mapping
from typing import Any

import torch

from unicron.train.carry.objects import COMPARED_BYTES, TENSOR
from unicron.train.snapshots.digest import INTEGERS

_required, _version, _attributes = map(operator.attrgetter, ("requires_grad", "_version", "__dict__"))


class SameTensors:
    """Tensors as they were when they were numbered.

    Args:
        tensors: by their keys.
    """

    def __init__(self, tensors: Mapping[Any, torch.Tensor]) -> None:
        self.tensors = dict(tensors)
        everything = [*self.tensors.values()]
        self._leaves = [each for each in everything if each.is_leaf]
        self._gradients, self._places = self._look(), [each.data_ptr() for each in everything]
        self._required = [*map(_required, everything)]
        self._versions = [*map(_version, everything)]  # a view in place, or another size, is a version, too
        groups: dict[tuple[Any, int], list[torch.Tensor]] = {}
        for each in everything:
            words = each.detach().reshape(-1).view(INTEGERS[each.element_size()])
            groups.setdefault((each.device, each.element_size()), []).append(words)
        self._contents = [(views, torch.cat(views)) for views in groups.values()]

    def _look(self) -> list[Any]:
        return [each.grad for each in self._leaves]

    def are_same(self) -> bool:
        """Return whether none has changed."""
        everything = self.tensors.values()
        return (
            [*map(torch.Tensor.data_ptr, everything)] == self._places
            and [*map(_required, everything)] == self._required
            and [*map(_version, everything)] == self._versions
            and not any(map(_attributes, everything))
            and all(map(operator.is_, self._look(), self._gradients))
            and all(torch.equal(torch.cat(views), before) for views, before in self._contents)
        )


def can_be_batched(thing: Any, kind: Any) -> bool:
    """Return whether a look at a tensor can be one at many."""
    return (
        kind is TENSOR
        and type(thing) in {torch.Tensor, torch.nn.Parameter}
        and thing.layout == torch.strided
        and thing.device.type != "meta"
        and thing.element_size() in INTEGERS
        and 0 < thing.nbytes <= COMPARED_BYTES
        and thing.is_contiguous()
        and not (thing.is_conj() or thing.is_neg() or vars(thing))
    )
