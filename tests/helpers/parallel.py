"""The decoder of examples/parallel, small, in tests: what one plain process makes of it is what all layouts must."""

import asyncio
import os
import subprocess
import sys

import torch

from helpers import ROOT

EXAMPLE = ROOT / "examples" / "parallel"
SMALL = ["--width", "16", "--layers", "2", "--heads", "2", "--context", "8", "--batch", "4", "--chunks", "2"]


def parameters(out):
    """Return the parameters that were saved in `out`, of all stages."""
    found = {}
    for path in out.glob("stage-*.pt"):
        found |= torch.load(path, weights_only=True)
    return found


async def plain_parameters(script, out, iterations, microbatches):
    """Run the script as one plain process, without any cluster; return the parameters."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("UNICRON_")}
    counts = ["--iterations", str(iterations), "--microbatches", str(microbatches)]
    command = [sys.executable, str(script), *SMALL, "--out", str(out), *counts]
    await asyncio.to_thread(subprocess.run, command, check=True, env={**kept, "OMP_NUM_THREADS": "1"})
    return parameters(out)


def differing(found, expected):
    """Return the names of parameters that are not there, or not the same but for the last digits of a double."""
    return sorted(found.keys() ^ expected.keys()) + [
        name
        for name in found.keys() & expected.keys()
        if not torch.allclose(found[name], expected[name], rtol=1e-9, atol=1e-12)
    ]
