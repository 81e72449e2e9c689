"""The decoder of examples/parallel, small, in tests: what one plain process makes of it is what all layouts must."""

import asyncio
import textwrap

import torch

from helpers import ROOT, standby

EXAMPLE = ROOT / "examples" / "parallel"
SMALL = ["--width", "16", "--layers", "2", "--heads", "2", "--context", "8", "--batch", "4", "--chunks", "2"]


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
"""What a script begins with whose rank of place 1 is struck, once, as STRIKE says: how, where, at which call there."""


def struck_script(folder, example, text):
    """Write a script that strikes, and runs the one of `example`."""
    path = folder / "struck.py"
    path.write_text(textwrap.dedent(STRIKES).replace("{folder!r}", repr(str(example))) + textwrap.dedent(text))
    return path


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
