"""The decoder of examples/parallel, small, in tests: what one plain process makes of it is what all layouts must."""

import asyncio
import textwrap

import torch

from helpers import ROOT, standby
from helpers.training import task

EXAMPLE = ROOT / "examples" / "parallel"
SMALL = ["--width", "16", "--layers", "2", "--heads", "2", "--context", "8", "--batch", "4", "--chunks", "2"]


ITERATIONS, MICROBATCHES = 4, 4

STRIKES = """
    import os, signal, sys
    import torch
    sys.path.insert(0, {folder!r})
    import train

    how, where, count = os.environ.get("STRIKE", "never never 0").split()
    calls = [int(count)]

    def strike():
        calls[0] -= 1
        if calls[0] or os.environ["UNICRON_PLACE"] != "1":
            return
        try:
            os.close(os.open(os.environ["MARKER"], os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        if how == "raise":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)

    def before(owner, name):
        then = getattr(owner, name)
        def struck(self, *arguments, **named):
            strike()
            return then(self, *arguments, **named)
        setattr(owner, name, struck)

    def in_backward(owner):
        then = owner.forward
        def forward(self, *arguments, **named):
            found = then(self, *arguments, **named)
            first = found[0] if isinstance(found, tuple) else found
            if first.requires_grad:
                first.register_hook(lambda _: strike())
            return found
        owner.forward = forward

"""
"""Prelude of a script whose rank of place 1 fails once, as STRIKE says: how, where, at which call there."""


PARALLEL = """
    import torch.distributed as dist
    from unicron.train.session.gradients import TorchGradients
    from unicron.train.session.ranks import TorchRanks
    from unicron.train.session.states import TorchStates

    class Session(train.Session):
        def step(self):
            ranks = torch.ones(1)
            dist.all_reduce(ranks)  # as clipping by the norm of all gradients does
            super().step()

    train.Session = Session
    torch.set_default_dtype(torch.float64)  # the order of summation then makes no visible difference
    if where == "backward":
        in_backward(train.Block)
    elif where != "never":
        owners = train.Block, TorchRanks, TorchStates, TorchGradients
        before(next(each for each in owners if hasattr(each, where)), where)
    train.main()
"""
"""For the example: one that sums something over the ranks of a replica, too."""


def struck_script(folder, example, text):
    """Write a script that strikes, and runs the one of `example`."""
    path = folder / "struck.py"
    path.write_text(textwrap.dedent(STRIKES).replace("{folder!r}", repr(str(example))) + textwrap.dedent(text))
    return path


async def trained(scene, script, out, name, layout, **env):
    """Train to the end; return the parameters, which are there by then."""
    size = layout.replica_workers
    fields = {"min_workers": size, "max_workers": 2 * size, "microbatches": MICROBATCHES, "iterations": ITERATIONS}
    await scene.client.submit(task(script, name, *SMALL, "--out", str(out), layout=layout, env=env, **fields))
    await scene.ends(name)
    return parameters(out)


def parameters(out):
    """Return the parameters that were saved in `out`."""
    return torch.load(out / "model.pt", weights_only=True)


async def plain_parameters(script, out, iterations, microbatches):
    """Run the script as one plain process, without any cluster; return the parameters."""
    counts = ["--iterations", str(iterations), "--microbatches", str(microbatches)]
    code, written = await asyncio.to_thread(standby.run, script, *SMALL, "--out", str(out), *counts)
    assert code == 0, written
    return parameters(out)


def differing(found, expected):
    """Return the names of parameters that are not there, or not the same but for the last digits of a double."""
    return sorted(found.keys() ^ expected.keys()) + [
        name
        for name in found.keys() & expected.keys()
        if not torch.allclose(found[name], expected[name], rtol=1e-9, atol=1e-12)
    ]
