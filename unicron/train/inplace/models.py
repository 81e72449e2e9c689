"""The modules of a script as one, with a state that depends on nothing but what they are made of."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

EXTRA = "_extra_state"
"""The name of what a module has besides tensors, as torch has it."""


class Models(torch.nn.ModuleList):
    """Modules whose state is their parameters, their buffers that torch saves, and what they say is besides.

    Scripts exchange `state_dict` for their own, which leaves out what is not to be in a checkpoint, or renames it: all
    that is not LoRA's, say.
    """

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return it by name."""
        return {name: each.detach() for name, each in self._tensors()} | {
            name: module.get_extra_state() for name, module in self._with_more()
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Set all of it.

        Raises:
            KeyError: something is missing.
        """
        del strict, assign
        for name, each in self._tensors():
            each.copy_(state_dict[name])
        for name, module in self._with_more():
            module.set_extra_state(state_dict[name])

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.named_parameters()
        for prefix, module in self.named_modules():
            kept = {*module._buffers.keys()} - module._non_persistent_buffers_set  # noqa: SLF001 it has no other name
            for name, each in module.named_buffers(recurse=False):
                if name in kept:
                    yield f"{prefix}.{name}", each

    def _with_more(self) -> Iterator[tuple[str, torch.nn.Module]]:
        for prefix, module in self.named_modules():
            if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
                yield f"{prefix}.{EXTRA}", module
