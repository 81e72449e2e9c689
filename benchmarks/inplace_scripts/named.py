"""The scripts of `cases.toml` as text."""

import tomllib
from pathlib import Path
from textwrap import indent
from typing import Any

CASES: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("cases.toml").read_text())

PLAIN = {
    "imports": "",
    "classes": "",
    "model": "DistributedDataParallel(nn.Linear(8, 1))",
    "optimizer": "torch.optim.SGD(model.parameters(), lr=0.1)",
    "setup": "",
    "loop": "for iteration in range(30):",
    "loss": "loss = loss_of(model, batch(iteration, rank))",
    "update": "optimizer.zero_grad()\nloss.backward()\noptimizer.step()",
    "ended": "",
    "closing": "",
    "last": "",
    "result": "model.module",
    "kept": "",
}
"""Of a script that trains one model in one loop."""

HEAD = """import copy, os, sys
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from benchmarks.inplace_scripts.case import FOLDER, batch, keep, loss_of, strike, validate
{imports}
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
"""


def text(name: str) -> str:
    """Return a script."""
    parts = PLAIN | CASES[name]
    script = parts.get("script") or _loop(parts)
    return "\n".join([f'"""{parts["about"]}"""', HEAD.format(**parts), script, "dist.destroy_process_group()", ""])


def _loop(parts: dict[str, Any]) -> str:
    opening = parts["loop"].splitlines()[-1]
    depth = opening[: len(opening) - len(opening.lstrip())]
    body = "\n".join(["strike(rank, iteration)", parts["loss"], parts["update"], parts["ended"]])
    return "\n".join(
        [
            parts["classes"],
            f"model = {parts['model']}",
            f"optimizer = {parts['optimizer']}",
            parts["setup"],
            parts["loop"],
            indent(body, depth + "    "),
            indent(parts["closing"], "    "),
            parts["last"],
            f"keep(rank, model={parts['result']}, {parts['kept']})",
        ]
    )
