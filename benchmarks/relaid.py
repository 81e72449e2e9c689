"""The script of `benchmarks.relayout`: examples/parallel/train.py, and every state that is left or taken is noted.

With UNICRON_NOTES naming a folder, each rank writes there what it leaves behind, and what it has when it has loaded
what others left: the two must make the same whole.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.struck import EXAMPLES, loaded
from unicron.contracts.states import StateRef
from unicron.snapshots.memory import SnapshotMemory
from unicron.train.session import session
from unicron.train.session.states import TorchStates
from unicron.train.snapshots.gathering import collect_state


def note(kind: str, iteration: int, seconds: float, size: int = 0) -> Path:
    """Note what a rank holds, how long that took to leave or take, and as how many bytes it lies where it was left."""
    path = Path(os.environ["UNICRON_NOTES"]) / f"{kind}-{iteration}-{os.environ['UNICRON_WORKER']}"
    path.with_suffix(".json").write_text(json.dumps({"kind": kind, "seconds": seconds, "size": size}))
    return path.with_suffix(".pt")


class Noting(TorchStates):
    """States that are noted."""

    async def export(self, place: int, iteration: int, *, taken: bool = False, kept: bool = False) -> StateRef:
        """Leave a state behind, and note it."""
        began = time.monotonic()
        ref = await super().export(place, iteration, taken=taken, kept=kept)
        if kept:  # a link takes no time: both are in memory
            os.link(
                SnapshotMemory.of_worker().path(ref.location.name),
                note("left", iteration, time.monotonic() - began, ref.size),
            )
        return ref

    async def fetch(self, sources: Any) -> None:
        """Take a state, and note how long it took."""
        began = time.monotonic()
        await super().fetch(sources)
        self.took = None if len(sources) == 1 == len(sources[0]) else (sources[0][0].iteration, began)

    def load(self) -> None:
        """Load what was taken, and note it where it was left behind by others."""
        super().load()
        if took := getattr(self, "took", None):
            torch.save(collect_state(took[0], self.protected), note("taken", took[0], time.monotonic() - took[1]))
            self.took = None


if __name__ == "__main__":
    session.TorchStates = Noting  # type: ignore[attr-defined]
    loaded(EXAMPLES / "parallel" / "train.py").main()
