"""A script as people write it for torchrun, with a checkpoint of its own after every fifth iteration.

Not for people: `benchmarks.scripts` runs it under several launchers. It notes what it does in a file of its process.
"""

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from unicron.train import watch

EVERY = 5
WIDTH, LAYERS, VOCABULARY, CONTEXT, BATCH = 128, 4, 256, 32, 2
PACE_S = 0.05  # each iteration's least time: four ranks on few cores would otherwise measure those


class Decoder(nn.Module):
    """A transformer, by default of 0.87 million parameters."""

    def __init__(self, width: int = WIDTH, layers: int = LAYERS) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        found: torch.Tensor = self.head(self.layers(self.embed(text)))
        return found


def batch(iteration: int, rank: int) -> torch.Tensor:
    """Return the text of a rank in an iteration, after the time that an iteration takes at least."""
    time.sleep(PACE_S)
    torch.manual_seed(iteration * 1009 + rank)
    return torch.randint(VOCABULARY, (BATCH, CONTEXT + 1))


def loss_of(model: nn.Module, text: torch.Tensor) -> Any:
    """Return the mean loss of a text."""
    return nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def notes_in(folder: Path) -> TextIO:
    """Return where this process notes what it does."""
    return (folder / f"{os.getpid()}.jsonl").open("w", buffering=1)


def raise_if_ordered(folder: Path, rank: int) -> None:
    """Raise, once, where the benchmark says so."""
    if (folder / f"raise-{rank}").exists():
        (folder / f"raise-{rank}").unlink()
        raise ArithmeticError("as the benchmark ordered")


def note(notes: TextIO, rank: int, iteration: int) -> None:
    """Note that an iteration is done."""
    notes.write(json.dumps({"rank": rank, "pid": os.getpid(), "iteration": iteration, "at": time.time()}) + "\n")


def run() -> None:
    """Train until killed."""
    folder = Path(os.environ["NOTES"])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Decoder())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    saved, begin = folder / "own.pt", 0
    if saved.exists():
        found = torch.load(saved, weights_only=True)
        model.module.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        begin = found["iteration"]
    watched = watch(model, begin) if "WATCHED" in os.environ else contextlib.nullcontext()
    with notes_in(folder) as notes, watched as watching:
        for iteration in range(begin, 10**6):
            loss = loss_of(model, batch(iteration, rank))
            loss.backward()
            raise_if_ordered(folder, rank)
            optimizer.step()
            optimizer.zero_grad()
            if watching is not None:
                watching.tick(loss)
            if iteration % EVERY == EVERY - 1 and rank == 0:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state | {"iteration": iteration + 1}, folder / "own.part")
                (folder / "own.part").rename(saved)
            note(notes, rank, iteration)


if __name__ == "__main__":
    run()
