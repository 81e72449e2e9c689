"""What ranks tell each other with the gradient: which parameters had one, and what the buffers of the first rank are.

It is the gradient of one more parameter, so that it is whole on all ranks wherever the gradient is.
"""

import functools
import math
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from unicron.errors import DrillFailedError, InvalidInputError
from unicron.train.parallel import CURE, Parallel

WORDS = {torch.float64: torch.int32, torch.float32: torch.int16}
"""By the precision of the gradient, integers that it holds exactly; in any other it is those of one byte."""

EXACT_BITS = {torch.float64: 52, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
"""Of sums over ranks that it holds exactly."""


FOLLOWERS = 2
"""Parameters without a gradient are kept as an iteration begins, if they are at most so many times as many bytes as
those with one."""


class Buffers:
    """The buffers of a model, as bytes.

    Args:
        model: whose they are.

    Attributes:
        model: likewise.
        names: of them.
        size: bytes of all.
        reduced: what they were on the first rank as gradients were reduced last; None before that.
        changed: whether the first rank has seen each of them change before it was to send them again.
        shared: those of them that the script has had all ranks have alike, by a collective of its own.
        agreed: what tells apart what they were then, which all ranks are to have; 0 where they have shared none.
    """

    def __init__(self, model: Parallel) -> None:
        self.model, self._layout = model, _layout(model)
        self.names = list(self._layout)
        self.size = len(self.read())
        self.reduced: torch.Tensor | None = None
        self.changed = [False] * len(self.names)
        self.shared, self.agreed = set[int](), 0

    def share(self, tensors: Sequence[torch.Tensor]) -> None:
        """Note which of them are among tensors that the script has all ranks have alike."""
        theirs = {each.data_ptr() for each in tensors}
        self.shared |= {number for number, each in enumerate(self.model.module.buffers()) if each.data_ptr() in theirs}

    def agree(self, bits: int) -> None:
        """Have as those of the first rank what they are now, of those that are alike."""
        if self.shared and self.reduced is not None:
            sizes = [each.nbytes for each in self.model.module.buffers()]
            now, before = torch.split(self.read(), sizes), torch.split(self.reduced, sizes)
            self.reduced = torch.cat([(now if one in self.shared else before)[one] for one in range(len(sizes))])
            self.agreed = zlib.crc32(self.reduced.cpu().numpy().tobytes()) % (1 << bits)
        self.shared = set()

    def read(self) -> torch.Tensor:
        """Return what they are.

        Raises:
            InvalidInputError: there are others than there were, or they have another shape.
        """
        if (layout := _layout(self.model)) != self._layout:
            names = sorted(name for name, _ in layout.items() ^ self._layout.items())
            raise InvalidInputError(
                f"buffer {names[0]} of the model was added, left out or made in another shape or type in a training "
                f"loop, and a new rank would not have it: register it in that shape before the loop, {CURE}"
            )
        parts = [each.detach().contiguous().reshape(-1).view(torch.uint8) for each in self.model.module.buffers()]
        return torch.cat([each.to(self.model.device) for each in parts])

    @torch.no_grad()
    def write(self, data: torch.Tensor) -> None:
        """Have them be so."""
        if torch.equal(self.read(), data):
            return
        buffers = list(self.model.module.buffers())
        for buffer, part in zip(buffers, torch.split(data, [each.nbytes for each in buffers]), strict=True):
            buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))  # a clone begins where its type may

    def compare(self) -> None:
        """Note which of them have changed since gradients were reduced."""
        now = self.read()
        if self.reduced is None or torch.equal(now, self.reduced):
            return
        sizes = [each.nbytes for each in self.model.module.buffers()]
        pairs = zip(torch.split(now, sizes), torch.split(self.reduced, sizes), strict=True)
        for number, (one, other) in enumerate(pairs):
            self.changed[number] |= not torch.equal(one, other)


class Piggyback:
    """What goes along with the gradient of some models.

    Args:
        models: alike on all ranks.
        optimizers: whose options, such as learning rates, ranks tell each other in short.
        first: this rank is the first.

    Attributes:
        carrier: the parameter whose gradient it is.
    """

    def __init__(
        self, models: Sequence[Parallel], optimizers: Sequence[torch.optim.Optimizer] = (), *, first: bool
    ) -> None:
        self._models, self._first, self._optimizers = models, first, optimizers
        self._own, self._alike = 0, False
        self._reduced, self._units = dict[int, torch.nn.Parameter](), list[list[tuple[str, torch.nn.Parameter]]]()
        for model in models:
            own = {id(each) for each in model.reduced} - self._reduced.keys()
            new = [each for each in model.module.named_parameters() if id(each[1]) in own]
            self._reduced |= {id(parameter): parameter for _, parameter in new}
            self._units += [[each] for each in new] if model.uses_vary else [new]
        still = [each for model in models for each in model.module.parameters() if id(each) not in self._reduced]
        small = sum(each.nbytes for each in still) <= FOLLOWERS * sum(each.nbytes for each in self._reduced.values())
        self._followers = still if small else []  # as a key encoder, that follows in the forward pass
        self._buffers = [Buffers(each) for each in models if any(True for _ in each.module.buffers())]
        self._synced = [each for each in self._buffers if each.model.forward_sync_buffers]
        self._within = False
        self._base = self._now()
        kinds = [each.dtype for each in self._reduced.values()]
        dtype = functools.reduce(torch.promote_types, kinds)
        self._word = WORDS.get(dtype, torch.int8)
        words = {each: -(-each.size // self._word.itemsize) for each in self._synced}
        self._bits = max(0, EXACT_BITS.get(dtype, 0) - math.ceil(math.log2(models[0].rank.size)))
        sizes = (size for each in words for size in (1, len(each.names), words[each]))
        self._sizes = [1, len(self._units), *sizes]
        self.carrier = torch.nn.Parameter(torch.zeros(sum(self._sizes), dtype=dtype, device=models[0].device))

    def share(self, tensors: Sequence[torch.Tensor]) -> None:
        """Note that the script has all ranks have tensors alike: buffers may be among them."""
        for buffers in self._synced:
            buffers.share(tensors)

    def begin(self) -> None:
        """Keep what all is as an iteration begins: who comes later begins it, too."""
        self._base, self._within = self._now(), True

    def synchronise(self, model: Parallel) -> None:
        """Have the buffers that the first rank had as gradients were reduced, which torch would broadcast only now."""
        for buffers in self._synced:
            if buffers.model is not model:
                continue
            buffers.agree(self._bits)
            if self._first:
                buffers.compare()
            elif buffers.reduced is not None:
                buffers.write(buffers.reduced)

    @torch.no_grad()
    def give(self) -> None:
        """Send on its way with the gradient what this rank has to say.

        Raises:
            InvalidInputError: a gradient is there that is reduced with no other, or one is missing.
        """
        self._check()
        self._own = zlib.crc32(self._options().encode()) % (1 << self._bits)
        parts = [
            torch.tensor([self._own]),
            torch.tensor([any(each.grad is not None for _, each in unit) for unit in self._units]),
        ]
        for buffers in self._synced:
            parts += [torch.tensor([buffers.agreed]), torch.tensor(buffers.changed), self._words(buffers)]
        self.carrier.grad = torch.cat([each.to(self.carrier) for each in parts])

    def _check(self) -> None:
        for model in self._models:
            for name, parameter in model.module.named_parameters():
                if parameter.grad is not None and parameter.requires_grad and id(parameter) not in self._reduced:
                    raise InvalidInputError(
                        f"parameter {name} has a gradient, and did not require one when the model was made "
                        "DistributedDataParallel, so that ranks would drift apart: freeze it after that, with "
                        f"find_unused_parameters=True, {CURE}"
                    )
        for unit in self._units:
            missing = [name for name, parameter in unit if parameter.grad is None]
            if 0 < len(missing) < len(unit):
                raise InvalidInputError(
                    f"{len(missing)} of {len(unit)} parameters, such as {missing[0]}, have no gradient in this "
                    f"iteration: give find_unused_parameters=True to DistributedDataParallel, as torch says, {CURE}"
                )

    def _words(self, buffers: Buffers) -> torch.Tensor:
        data = buffers.read() if self._first else torch.zeros(buffers.size, dtype=torch.uint8)
        return torch.nn.functional.pad(data, (0, -buffers.size % self._word.itemsize)).view(self._word)

    def _options(self) -> str:
        """Return what all options of the optimizers are; ranks mostly have the same."""
        kept = [each for optimizer in self._optimizers for each in optimizer.param_groups]
        return repr([{name: each[name] for name in sorted(each) if name != "params"} for each in kept])

    @torch.no_grad()
    def take(self, summed: torch.Tensor, *, replaced: bool = False) -> None:
        """Have what came with the gradient.

        Args:
            summed: what all ranks have said.
            replaced: a rank was, not long ago.

        Raises:
            InvalidInputError: buffers have changed in a way that can't be followed.
            DrillFailedError: a rank that was replaced has other options of its optimizers than the others.
        """
        self._within, self.carrier.grad = False, None
        parts = iter(torch.split(summed, self._sizes))
        alike = int(next(parts)) == self._own * self._models[0].rank.size
        if replaced and self._alike and not alike:
            raise DrillFailedError(
                "since a rank was replaced the options of optimizers, such as learning rates, differ between ranks, "
                f"and did not before; here they are {self._options():.300}: keep what they depend on in variables of "
                f"the script, {CURE}"
            )
        self._alike = alike
        for unit, count in zip(self._units, next(parts).tolist(), strict=True):
            for _, parameter in unit if not count else ():
                parameter.grad = None
        for buffers in self._synced:
            agreed, changed, words = next(parts), next(parts), next(parts)
            if int(agreed) != buffers.agreed * self._models[0].rank.size:
                raise InvalidInputError(
                    "buffers of the model that ranks have had alike by a collective of the script are not alike in the "
                    f"next forward pass: have all ranks have all of them alike, {CURE}"
                )
            buffers.agreed = 0
            if names := [name for name, count in zip(buffers.names, changed.tolist(), strict=True) if count]:
                raise InvalidInputError(
                    f"buffer {names[0]} of the first rank was changed after the gradients were reduced and before a "
                    "forward pass that is to have it on all ranks: change it in the only forward pass of an iteration, "
                    f"give forward_sync_buffers=False to DistributedDataParallel if ranks need not share it, {CURE}"
                )
            buffers.reduced = words.to(self._word).view(torch.uint8)[: buffers.size].clone()

    def _now(self) -> dict[str, Any]:
        modules = [each for model in self._models for each in model.module.modules()]
        return {
            "buffers": [each.read() for each in self._buffers],
            "reduced": [each.reduced for each in self._buffers],
            "followers": [each.detach().clone() for each in self._followers],
            "requires_grad": [each.requires_grad for model in self._models for each in model.module.parameters()],
            "training": [each.training for each in modules],
        }

    def state_dict(self) -> dict[str, Any]:
        """Return what all was as the iteration began."""
        return self._base if self._within else self._now()

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have it be so. What is to come to the other ranks from the first, the first has already."""
        for buffers, data, reduced in zip(self._buffers, state["buffers"], state["reduced"], strict=True):
            first = self._first and reduced is not None
            buffers.reduced = None if reduced is None else reduced.to(buffers.model.device)
            buffers.write((reduced if first else data).to(buffers.model.device))
        for follower, value in zip(self._followers, state["followers"], strict=True):
            follower.copy_(value)
        parameters = [each for model in self._models for each in model.module.parameters()]
        for parameter, required in zip(parameters, state["requires_grad"], strict=True):
            parameter.requires_grad_(required)
        modules = [each for model in self._models for each in model.module.modules()]
        for module, training in zip(modules, state["training"], strict=True):
            module.training = training
        self._base = self._now()


def _layout(model: Parallel) -> dict[str, Any]:
    return {name: (each.shape, each.dtype) for name, each in model.module.named_buffers()}
