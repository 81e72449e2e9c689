"""Running means of batch normalization, which forward passes change: on all ranks those of the first, as DDP has."""

from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

from unicron.errors import InvalidInputError


class RunningMeans:
    """Those of some models. They go with the gradient, so that they are whole on all ranks wherever that is.

    Args:
        models: that are trained, alike on all ranks.
        first: this rank is the first.
        ranks: how many there are; the gradient is a mean over them.

    Attributes:
        carrier: a parameter whose gradient they are; None where there are none.

    Raises:
        InvalidInputError: the parameters, and with them the gradient, have too few digits for them.
    """

    def __init__(self, models: torch.nn.Module, *, first: bool, ranks: int) -> None:
        norms = [module for module in models.modules() if isinstance(module, _NormBase)]
        self._buffers = [each for module in norms for each in module.buffers(recurse=False)]
        self._first, self._ranks = first, ranks
        self._within = False
        self.carrier: torch.nn.Parameter | None = None
        self._base = self._copies()
        if not self._buffers:
            return
        like = next(models.parameters())
        if like.dtype not in {torch.float32, torch.float64}:
            raise InvalidInputError(
                f"`heal: in-place` can't keep the running means of BatchNorm the same in {like.dtype}: keep the "
                "parameters in float32 (autocast computes in less), use GroupNorm or LayerNorm, or set `heal: restart`"
            )
        count = sum(each.numel() for each in self._buffers)
        self.carrier = torch.nn.Parameter(torch.zeros(count, dtype=like.dtype, device=like.device))

    def begin(self) -> None:
        """Keep what they are as an iteration begins: who comes later begins it, too."""
        self._base, self._within = self._copies(), True

    @torch.no_grad()
    def give(self) -> None:
        """Send those of the first rank on their way with the gradient."""
        if self.carrier is None:
            return
        self.carrier.grad = torch.zeros_like(self.carrier)
        if self._first:
            torch.cat([each.reshape(-1).to(self.carrier) for each in self._buffers], out=self.carrier.grad)
            self.carrier.grad *= self._ranks

    @torch.no_grad()
    def take(self) -> None:
        """Have what came with the gradient."""
        self._within = False
        if self.carrier is None or self.carrier.grad is None:
            return
        parts = torch.split(self.carrier.grad, [each.numel() for each in self._buffers])
        for buffer, part in zip(self._buffers, parts, strict=True):
            buffer.copy_((part if buffer.is_floating_point() else part.round()).view_as(buffer))

    def _copies(self) -> list[torch.Tensor]:
        return [each.clone() for each in self._buffers]

    def state_dict(self) -> dict[str, Any]:
        """Return what they were as the iteration began."""
        return {"base": self._base if self._within else self._copies()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have them be so."""
        for buffer, base in zip(self._buffers, state["base"], strict=True):
            buffer.copy_(base)
        self._base = self._copies()
