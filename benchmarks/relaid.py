"""The script of `benchmarks.relayout`: the example's decoder, and every state that is left behind or taken is noted.

    python -m benchmarks.relaid ARGUMENTS OF examples/parallel/train.py

With UNICRON_NOTES naming a folder, each rank writes there what it leaves behind, and what it has when it has loaded
what others left: the two must make the same whole.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from unicron.contracts.states import StateRef
from unicron.train import session
from unicron.train.gathering import laid_out
from unicron.train.state import path_of
from unicron.train.torch_shell import TorchShell

EXAMPLE = Path(__file__).parents[1] / "examples" / "parallel"
sys.path.insert(0, str(EXAMPLE))

import train  # type: ignore[import-not-found] # noqa: E402 the example is a script, in a folder of its own


def note(kind: str, iteration: int, shell: TorchShell, seconds: float, path: Path | None = None) -> None:
    """Note what a rank holds, as it lies at `path` or else is now, and how long that took to leave or take."""
    folder, name = Path(os.environ["UNICRON_NOTES"]), f"{kind}-{iteration}-{os.environ['UNICRON_WORKER']}"
    if path is None:
        torch.save(laid_out(iteration, shell.protected), folder / f"{name}.pt")
    else:
        os.link(path, folder / f"{name}.pt")  # takes no time: both are in memory
    found = {"kind": kind, "seconds": seconds}
    (folder / f"{name}.json").write_text(json.dumps(found))


class Noting(TorchShell):
    """A shell that notes states."""

    async def export(self, place: int, iteration: int, *, taken: bool = False, kept: bool = False) -> StateRef:
        """Leave a state behind, and note it."""
        began = time.monotonic()
        ref = await super().export(place, iteration, taken=taken, kept=kept)
        if kept:
            note("left", iteration, self, time.monotonic() - began, path_of(ref.location))
        return ref

    async def take(self, sources: Any) -> None:
        """Take a state, and note how long it took."""
        began = time.monotonic()
        await super().take(sources)
        self.took = None if len(sources) == 1 == len(sources[0]) else (sources[0][0].iteration, began)

    def load(self) -> None:
        """Load what was taken, and note it where it was left behind by others."""
        super().load()
        if took := getattr(self, "took", None):
            note("taken", took[0], self, time.monotonic() - took[1])
            self.took = None


if __name__ == "__main__":
    session.TorchShell = Noting  # type: ignore[attr-defined]
    train.main()
