"""The cost of an iteration's snapshots in a script that is healed in place.

    python -m benchmarks.inplace_cost --json

A model of transformer blocks is trained in this process, once as the script is and once as a rank in place runs it,
in turns. `snapshot_ms` is the median of what an iteration spends on snapshots, `iteration_ms` that of
the plain one; `share` is the first over the second, `kib` the size of a snapshot. A record goes nowhere here.
"""

import ast
import statistics
import sys
import time
import types
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.command import Options, Result, main, option
from unicron.train.carry.variables import NAME
from unicron.train.loops.active_loops import LoopSnapshot
from unicron.train.loops.instrument import instrument
from unicron.train.loops.loops import Loops

WARM = 5  # iterations of a turn that do not count
SCRIPT = """
import torch

class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.attend = torch.nn.LayerNorm(width), torch.nn.Linear(width, 3 * width)
        self.gather, self.second = torch.nn.Linear(width, width), torch.nn.LayerNorm(width)
        layers = [torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)]
        self.feed = torch.nn.Sequential(*layers, torch.nn.Dropout(0.1))
        self.register_buffer("mask", torch.ones(64, 64))

    def forward(self, x):
        return x + self.feed(self.second(x + self.gather(self.attend(self.first(x))[..., : x.shape[-1]])))

model = torch.nn.Sequential(*[Block(width) for _ in range(blocks)])
optimizer = torch.optim.AdamW(model.parameters())
note("made", model, optimizer)
running, losses = 0.0, []
for step in range(iterations):
    x = torch.randn(4, 64, width)
    loss = model(x).square().mean()
    note("begin_iteration")
    loss.backward()
    note("record_reduce")
    optimizer.step()
    optimizer.zero_grad()
    note("record_update")
    running += loss.item()
    losses.append(loss.item())
    note("ended")
"""


class Timed(Loops):
    """Loops whose snapshots are timed, and which the script calls: no part of it, as nothing of Unicron is."""

    __module__ = "unicron.benchmark"

    def __init__(self, *, in_place: bool) -> None:
        self.hold, self.records = list[Any](), list[Any]()  # what goes another way than by snapshots, and snapshots
        self.spent_s, self.ended, self.spent = 0.0, [time.perf_counter()], [0.0]
        self._in_place = in_place
        super().__init__(0, lambda: (self.hold, [], {}, ()), lambda: None, self.records.append)

    def _take_snapshot(self, *arguments: Any, **named: Any) -> None:
        began = time.perf_counter()
        super()._take_snapshot(*arguments, **named)
        self.spent_s += time.perf_counter() - began

    def __call__(self, what: str, *things: Any) -> None:
        """Note how far the script is."""
        if what == "ended":
            self.ended.append(time.perf_counter())
            self.spent.append(self.spent_s)
        elif what == "made":
            model, optimizer = things
            self.hold.extend([*model.parameters(), optimizer])
        elif self._in_place:
            getattr(self, what)()


def train(options: Options, *, in_place: bool) -> tuple[list[float], list[float], int]:
    """Return seconds of each iteration, those of them that snapshots took, and bytes of the last snapshot."""
    loops = Timed(in_place=in_place)
    module = sys.modules["benchmark"] = types.ModuleType("benchmark")
    vars(module).update({NAME: loops, "__name__": "benchmark", "note": loops}, **vars(options))
    tree = instrument(SCRIPT, "script.py", "script.py") if in_place else ast.parse(SCRIPT)
    exec(compile(tree, "script.py", "exec"), vars(module))
    last = loops.records[-1] if in_place else None
    if in_place and not isinstance(last, LoopSnapshot):
        raise RuntimeError(f"no snapshot: {last}")
    size = sum(map(len, last.snapshots)) if isinstance(last, LoopSnapshot) else 0
    return _steps(loops.ended), _steps(loops.spent), size


def _steps(sums: Sequence[float]) -> list[float]:
    return [later - before for before, later in pairwise(sums)][WARM:]


def measure(options: Options, _: Path) -> Result:
    """Train in turns; return what snapshots took."""
    torch.set_num_threads(1)
    plain, ours, spent, size = list[float](), list[float](), list[float](), 0
    for _turn in range(options.turns):
        plain += train(options, in_place=False)[0]
        whole, of_snapshots, size = train(options, in_place=True)
        ours, spent = ours + whole, spent + of_snapshots
    before, after, taken = (1e3 * statistics.median(each) for each in (plain, ours, spent))
    milliseconds = {"iteration_ms": before, "in_place_ms": after, "snapshot_ms": taken}
    figures = {name: round(value, 3) for name, value in milliseconds.items()}
    return Result(figures | {"share": round(taken / before, 5), "kib": round(size / 1024, 1)})


if __name__ == "__main__":
    main(
        measure,
        option("--blocks", default=12),
        option("--width", default=256),
        option("--iterations", default=40, help="of each turn"),
        option("--turns", default=3),
    )
