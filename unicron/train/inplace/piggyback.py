"""Data that is reduced along with the gradient: which parameters had one, and the buffers of the first rank.

It is the gradient of one more parameter, so that it is whole on all ranks wherever the gradient is.
"""

import functools
import math
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from unicron.errors import InvalidInputError
from unicron.train.carry.objects import text_of
from unicron.train.carry.tensors import LARGE_BYTES
from unicron.train.inplace.buckets import EITHER_WAY, ReadyOrder
from unicron.train.inplace.parallel import Parallel

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
        size: bytes of all.
        reduced: what they were on the first rank when ranks had them alike last; None before that.
    """

    def __init__(self, model: Parallel) -> None:
        self.model, self._layout = model, _layout(model)
        self.size = len(self.read())
        self.reduced: torch.Tensor | None = None

    @property
    def has_changed(self) -> bool:
        """Whether they have changed since gradients were reduced, so that those sent along are outdated."""
        return bool(self.model.given_digest.value != self.model.digest_buffers())

    def record_digest(self) -> None:
        """Record their digest; it is part of the script's snapshot."""
        self.model.given_digest.value = self.model.digest_buffers()

    def broadcast(self) -> None:
        """Broadcast those that the first rank has now, as torch does in each forward pass.

        Raises:
            InvalidInputError: there is a large one, which no snapshot has, and a new rank would have it change twice.
        """
        if large := [name for name, each in self.model.shared_buffers().items() if each.nbytes > LARGE_BYTES]:
            raise InvalidInputError(
                f"buffers were changed between a backward pass and a forward pass that is to have them on all ranks, "
                f"and {large[0]} of the model has more than {LARGE_BYTES >> 20} MiB: change them in the only forward "
                "pass of an iteration, give forward_sync_buffers=False to DistributedDataParallel if ranks need not "
                "share them"
            )
        data = self.read()
        dist.broadcast(data, 0)
        self.write(data)
        self.reduced = data

    def read(self) -> torch.Tensor:
        """Return them as bytes.

        Raises:
            InvalidInputError: there are others than there were, or they have another shape.
        """
        if (layout := _layout(self.model)) != self._layout:
            names = sorted(name for name, _ in layout.items() ^ self._layout.items())
            raise InvalidInputError(
                f"buffer {names[0]} of the model was added, left out or made in another shape or type in a training "
                "loop, and a new rank would not have it: register it in that shape before the loop"
            )
        parts = [
            each.detach().contiguous().reshape(-1).view(torch.uint8) for each in self.model.shared_buffers().values()
        ]
        return torch.cat([each.to(self.model.device) for each in parts])

    @torch.no_grad()
    def write(self, data: torch.Tensor) -> None:
        """Set them to these bytes, unless they have them already."""
        if torch.equal(self.read(), data):
            return
        buffers = list(self.model.shared_buffers().values())
        parts = torch.split(data, [each.nbytes for each in buffers])
        with torch.autograd._unsafe_preserve_version_counter(tuple(buffers)):  # type: ignore[attr-defined]  # noqa: SLF001 as torch does
            for buffer, part in zip(buffers, parts, strict=True):
                buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))  # a clone begins where its type may


class Piggyback:
    """The data that goes along with the gradient of some models.

    Args:
        models: alike on all ranks.
        optimizers: whose options, such as learning rates, are exchanged among ranks in short.
        first: this rank is the first.

    Attributes:
        carrier: the parameter whose gradient it is.
    """

    def __init__(
        self, models: Sequence[Parallel], optimizers: Sequence[torch.optim.Optimizer] = (), *, first: bool
    ) -> None:
        self._models, self._first, self._optimizers = models, first, optimizers
        self._own_digest, self._options_equal = 0, False
        self._reduced, self._units = dict[int, torch.nn.Parameter](), list[list[tuple[str, torch.nn.Parameter]]]()
        for model in models:
            own = {id(each) for each in model.reduced} - self._reduced.keys()
            new = [each for each in model.module.named_parameters() if id(each[1]) in own]
            self._reduced |= {id(parameter): parameter for _, parameter in new}
            self._units += [[each] for each in new] if model.uses_vary else [new]
        still = [each for model in models for each in model.module.parameters() if id(each) not in self._reduced]
        still += [each for model in models if not model.forward_sync_buffers for each in model.module.buffers()]
        small = sum(each.nbytes for each in still) <= FOLLOWERS * sum(each.nbytes for each in self._reduced.values())
        self._followers = still if small else []  # as a key encoder, that follows in the forward pass
        self._synchronized = [Buffers(each) for each in models if each.forward_sync_buffers and each.shared_buffers()]
        many = models[0].rank.size > EITHER_WAY  # whose sums are rounded by their order
        self._orders = [each.ready for each in models if many]
        self._in_iteration = self._has_point = False
        self._base, self._flags = self._current(), dict[str, Any]()
        kinds = [each.dtype.to_real() for each in self._reduced.values()]
        dtype = functools.reduce(torch.promote_types, kinds)
        self._word = WORDS.get(dtype, torch.int8)
        self._bits = max(0, EXACT_BITS.get(dtype, 0) - math.ceil(math.log2(models[0].rank.size)))
        words = [-(-each.size // self._word.itemsize) for each in self._synchronized]
        words += [-(-len(each) // self._word.itemsize) for each in map(_order_bytes, self._orders)]
        modules = [each for model in models for each in model.modules() if getattr(each, "sparse", False) is True]
        tables = {id(getattr(each, "weight", None)) for each in modules}
        self._sparse = [each for number, each in self._reduced.items() if number in tables]
        self._sizes = [1, len(self._units), *words, *(len(each) for each in self._sparse)]
        self.carrier = torch.nn.Parameter(torch.zeros(sum(self._sizes), dtype=dtype, device=models[0].device))

    def invalidate_shared(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take buffers for changed that a collective of the script has set: on some ranks they have."""
        shared = {each.data_ptr() for each in tensors}
        for buffers in self._synchronized:
            if any(each.data_ptr() in shared for each in buffers.model.shared_buffers().values()):
                buffers.model.given_digest.value = None

    def begin_iteration(self) -> None:
        """Keep the present values, unless those are kept of the point at which another process would begin it."""
        if not self._has_point:
            self._base = {**self._current(), **self._flags}
        self._in_iteration = True
        for order in self._orders:
            order.begin()

    def synchronize_buffers(self, model: Parallel) -> None:
        """Set a model's buffers to those of the first rank: those sent along, unless they have changed since."""
        for buffers in self._synchronized:
            if buffers.model is not model:
                continue
            if buffers.has_changed:
                buffers.broadcast()
            elif buffers.reduced is not None and not self._first:
                buffers.write(buffers.reduced)
            buffers.record_digest()

    @torch.no_grad()
    def attach(self) -> None:
        """Put what this rank sends along into the carrier's gradient.

        Raises:
            InvalidInputError: a gradient is there that is reduced with no other, or one is missing.
        """
        self._check()
        self._own_digest = zlib.crc32(self._options().encode()) % (1 << self._bits)
        parts = [
            torch.tensor([self._own_digest]),
            torch.tensor([any(each.grad is not None for _, each in unit) for unit in self._units]),
        ]
        for buffers in self._synchronized:
            parts.append(self._words(buffers.read() if self._first else torch.zeros(buffers.size, dtype=torch.uint8)))
            buffers.record_digest()
        for order in self._orders:
            data = _order_bytes(order)
            parts.append(self._words(data if self._first else torch.zeros_like(data)))
        parts += map(_touched_rows, self._sparse)
        self.carrier.grad = torch.cat([each.to(self.carrier) for each in parts])

    def _check(self) -> None:
        for model in self._models:
            for name, parameter in model.module.named_parameters():
                known = id(parameter) in self._reduced or name in model.parameters_to_ignore
                if parameter.grad is not None and parameter.requires_grad and not known:
                    raise InvalidInputError(
                        f"parameter {name} has a gradient, and did not require one when the model was made "
                        "DistributedDataParallel, so that ranks would drift apart: freeze it after that, with "
                        "find_unused_parameters=True"
                    )
        for unit in self._units:
            missing = [name for name, parameter in unit if parameter.grad is None]
            if 0 < len(missing) < len(unit):
                raise InvalidInputError(
                    f"{len(missing)} of {len(unit)} parameters, such as {missing[0]}, have no gradient in this "
                    "iteration: give find_unused_parameters=True to DistributedDataParallel, as torch says"
                )

    def _words(self, data: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(data, (0, -len(data) % self._word.itemsize)).view(self._word)

    def _bytes(self, words: torch.Tensor) -> torch.Tensor:
        return words.to(self._word).view(torch.uint8)

    def _options(self) -> str:
        """Return what all options of the optimizers are; ranks mostly have the same."""
        kept = [each for optimizer in self._optimizers for each in optimizer.param_groups]
        return text_of([{name: value for name, value in each.items() if name != "params"} for each in kept])

    @torch.no_grad()
    def apply(self, summed: torch.Tensor, *, replaced: bool = False) -> None:
        """Apply what came along with the reduced gradient.

        Args:
            summed: the carrier's gradient, summed over the ranks.
            replaced: a rank was, not long ago.

        Raises:
            InvalidInputError: a rank that was replaced has other options of its optimizers than the others.
        """
        self._in_iteration = self._has_point = False
        self.carrier.grad = None
        parts = iter(torch.split(summed, self._sizes))
        alike = int(next(parts)) == self._own_digest * self._models[0].rank.size
        if replaced and self._options_equal and not alike:
            raise InvalidInputError(
                "since a rank was replaced the options of optimizers, such as learning rates, differ between ranks, "
                f"and did not before; here they are {self._options():.300}: keep what they depend on in variables of "
                "the script"
            )
        self._options_equal = alike
        for unit, count in zip(self._units, next(parts).tolist(), strict=True):
            for _, parameter in unit if not count else ():
                parameter.grad = None
        for buffers in self._synchronized:
            buffers.reduced = self._bytes(next(parts))[: buffers.size].clone()
        for order in self._orders:
            order.take(self._bytes(next(parts))[: 4 * order.count].cpu().clone().view(torch.int32).tolist())
        for parameter in self._sparse:
            parameter.grad = _as_sparse(parameter.grad, next(parts) > 0)

    def _current(self) -> dict[str, Any]:
        return {
            "buffers": [each.read() for each in self._synchronized],
            "reduced": [each.reduced for each in self._synchronized],
            "orders": [[each.passes, each.known or []] for each in self._orders],
            "followers": [each.detach().clone() for each in self._followers],
            **self._which(),
        }

    def record_point(self) -> None:
        """Keep the present values, at a point at which another process can begin.

        What a script changes on its way to the next iteration, such as the buffers of a model that it calls without
        DistributedDataParallel, that process changes again.
        """
        self._base, self._flags, self._has_point = self._current(), self._which(), True

    def _which(self) -> dict[str, Any]:
        modules = [each for model in self._models for each in model.module.modules()]
        return {
            "requires_grad": [each.requires_grad for model in self._models for each in model.module.parameters()],
            "training": [each.training for each in modules],
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the values where another process would begin; behind an update, the present ones."""
        return self._base if self._in_iteration or self._has_point else self._current()

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore these values; the first rank takes the buffers that it is to send to the others."""
        for buffers, data, reduced in zip(self._synchronized, state["buffers"], state["reduced"], strict=True):
            first = self._first and reduced is not None
            buffers.reduced = None if reduced is None else reduced.to(buffers.model.device)
            buffers.write((reduced if first else data).to(buffers.model.device))
            buffers.record_digest()
        for order, (passes, known) in zip(self._orders, state["orders"], strict=True):
            order.passes, order.known = passes, known or None
        for follower, value in zip(self._followers, state["followers"], strict=True):
            follower.copy_(value)
        parameters = [each for model in self._models for each in model.module.parameters()]
        for parameter, required in zip(parameters, state["requires_grad"], strict=True):
            parameter.requires_grad_(required)
        modules = [each for model in self._models for each in model.module.modules()]
        for module, training in zip(modules, state["training"], strict=True):
            module.training = training
        self._base, self._flags, self._has_point = self._current(), self._which(), False


def _touched_rows(parameter: torch.Tensor) -> torch.Tensor:
    """Return 1 for each row of which a sparse gradient has something, though that be zero; else 0."""
    touched, gradient = torch.zeros(len(parameter), device=parameter.device), parameter.grad
    if gradient is not None and gradient.is_sparse:
        touched[gradient.coalesce().indices()[0]] = 1
    return touched


def _as_sparse(gradient: torch.Tensor | None, touched: torch.Tensor) -> torch.Tensor | None:
    """Return a gradient as the sum of sparse ones, which has the rows that any of them has."""
    if gradient is None:
        return None
    rows = touched.nonzero().reshape(1, -1)
    return torch.sparse_coo_tensor(rows, gradient[rows[0]], gradient.shape, is_coalesced=True)


def _order_bytes(order: ReadyOrder) -> torch.Tensor:
    return torch.tensor(order.noted, dtype=torch.int32).view(torch.uint8)


def _layout(model: Parallel) -> dict[str, Any]:
    return {name: (each.shape, each.dtype) for name, each in model.shared_buffers().items()}
