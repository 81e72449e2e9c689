"""The script of `train_plain`, with a `Session`. Not for people: `benchmarks.scripts` runs it."""

import os
from pathlib import Path

import torch

from benchmarks.peers.train_plain import Decoder, batch, loss_of, note, notes_in, raise_if_ordered
from unicron.train import Session


def run() -> None:
    """Train until killed."""
    folder = Path(os.environ["NOTES"])
    torch.manual_seed(0)
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = Session(seed=0)
    session.protect(model=model, optimizer=optimizer)
    with notes_in(folder) as notes:
        for iteration in session.iterations():
            for microbatch in session.microbatches():
                session.backward(loss_of(model, batch(iteration, microbatch)))
                raise_if_ordered(folder, session.rank)
            session.step()
            note(notes, session.rank, iteration)


if __name__ == "__main__":
    run()
