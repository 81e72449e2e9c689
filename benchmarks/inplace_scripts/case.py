"""Shared code of the scripts: data, the loss, the kill, and results. It knows nothing of Unicron.

A script is started with a folder and, where one of its ranks is to be killed, with `RANK:ITERATION`; with
`RANK:ITERATION:raise` where it is to fail by an exception.
"""

import os
import signal
import sys
from collections import deque
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch

FOLDER, STRIKES = Path(sys.argv[1]), sys.argv[2:]
MARK = "struck"  # the file in which a process leaves its number just before it kills itself
BEGUN = "begun"  # the file in which each process leaves its rank as it begins
BEFORE = "begun-before"  # what that was when a rank was struck
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


def begin(rank: int) -> None:
    """Note that a process of this rank has begun, if it is one of the ranks and not on trial beside them."""
    if "UNICRON_GHOST" not in os.environ:
        os.write(os.open(FOLDER / BEGUN, os.O_WRONLY | os.O_CREAT | os.O_APPEND), f"{rank}\n".encode())


def strike(rank: int, iteration: int) -> None:
    """End this process where the benchmark says so, by SIGKILL or an exception, and only once."""
    place = f"{rank}:{iteration}"
    how = next((each for each in STRIKES if each in {place, f"{place}:raise"}), "")
    if not how or (FOLDER / MARK).exists() or "UNICRON_GHOST" in os.environ:
        return
    if (FOLDER / BEGUN).exists():
        (FOLDER / BEFORE).write_text((FOLDER / BEGUN).read_text())
    (FOLDER / MARK).write_text(str(os.getpid()))
    if how.endswith("raise"):
        raise RuntimeError("struck, as the benchmark wants it")
    os.kill(os.getpid(), signal.SIGKILL)


def keep(rank: int, **results: Any) -> None:
    """Write what a rank has at the end; of objects with a `state_dict()`, that."""
    plain = {name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in results.items()}
    scratch = FOLDER / f"{os.getpid()}.part"
    torch.save({"pid": os.getpid(), "results": _plain(plain)}, scratch)
    scratch.replace(FOLDER / f"result-{rank}.pt")


def _plain(value: Any) -> Any:
    """Return a value as who has not the script's classes can read it: of other objects their attributes."""
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset | deque):
        return [_plain(part) for part in (sorted(value, key=repr) if isinstance(value, set | frozenset) else value)]
    if isinstance(value, np.ndarray | np.generic):
        return [value.dtype.str, _plain(value.tolist())]
    if isinstance(value, Enum | type) or callable(value):
        return f"{type(value).__name__} {getattr(value, 'name', '')}"
    if isinstance(value, torch.Tensor | int | float | complex | str | bytes | None):
        return value
    return [type(value).__name__, _plain(vars(value)) if hasattr(value, "__dict__") else str(value)]
