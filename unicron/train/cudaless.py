"""Megatron-core without a GPU: what it takes for granted of CUDA is done by the processor.

megatron-core 0.16 names the device "cuda" where it makes small tensors of its own. Nothing here is called where there
is a GPU.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

FACTORIES = ("empty", "full", "ones", "tensor", "zeros")


def patch() -> None:
    """Have megatron-core run on the CPU, in this process, from now on."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker  # noqa: PLC0415 an optional package

    cuda: Any = torch.cuda
    cuda.current_device = lambda: "cpu"
    cuda.synchronize = lambda *_: None
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    # what is not spread draws from torch's own generator then, which a session seeds before each microbatch
    CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    torch.Tensor.type = _called_cuda(torch.Tensor.type)  # type: ignore[method-assign]


def _on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*arguments: Any, **named: Any) -> Any:
        if str(named.get("device", "")).startswith("cuda"):
            named["device"] = "cpu"
        return make(*arguments, **named)

    return made


def _called_cuda(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return `Tensor.type` for optimizers that sort parameters by it and know those of CUDA only."""

    @functools.wraps(method)
    def called(tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        found = method(tensor, *arguments, **named)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found

    return called
