"""Shared code of the scripts: data, the loss, the kill, and results. It knows nothing of Unicron.

A script is started with a folder and, where one of its ranks is to be killed, with `RANK:ITERATION`.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

FOLDER, STRIKES = Path(sys.argv[1]), sys.argv[2:]
MARK = "struck"  # the file in which a process leaves its number just before it kills itself
WIDTH = 8


def batch(number: int, rank: int = 0, size: int = 4) -> torch.Tensor:
    """Return inputs that depend on their number and the rank alone."""
    return torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(1000 * number + rank))


def loss_of(model: torch.nn.Module, inputs: torch.Tensor) -> Any:
    """Return the mean squared error of a model that is to learn the sine of the sum."""
    return (model(inputs) - inputs.sum(1, keepdim=True).sin()).float().square().mean()


def validate(model: torch.nn.Module) -> float:
    """Return the loss on inputs that are the same on all ranks and in all iterations."""
    with torch.no_grad():
        return float(loss_of(model, batch(999_983, size=32)))


def strike(rank: int, iteration: int) -> None:
    """End this process by SIGKILL where the benchmark says so, and only once."""
    if f"{rank}:{iteration}" in STRIKES and not (FOLDER / MARK).exists():
        (FOLDER / MARK).write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)


def keep(rank: int, **results: Any) -> None:
    """Write what a rank has at the end; of objects with a `state_dict()`, that."""
    plain = {name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in results.items()}
    scratch = FOLDER / f"{os.getpid()}.part"
    torch.save({"pid": os.getpid(), "results": plain}, scratch)
    scratch.replace(FOLDER / f"result-{rank}.pt")
