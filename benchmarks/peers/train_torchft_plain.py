"""The script of `train_plain`, as torchft documents it. Not for people: `benchmarks.scripts --vs torchft` runs it."""

import os
from pathlib import Path
from typing import Any

import torch
import torchft

from benchmarks.peers.train_plain import Decoder, batch, loss_of, note, notes_in, raise_if_told
from benchmarks.peers.worker import TIMEOUT, join


def main() -> None:
    """Train until killed; each process is a replica."""
    join()
    folder, rank = Path(os.environ["NOTES"]), int(os.environ["REPLICA_GROUP_ID"])
    torch.manual_seed(0)
    model = Decoder()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        replica_id=f"replica_{rank}",
        timeout=TIMEOUT,
    )
    averaged = torchft.DistributedDataParallel(manager, model)
    optimizer = torchft.Optimizer(manager, inner)
    with notes_in(folder) as notes:
        while True:
            iteration = manager.current_step()
            optimizer.zero_grad()
            loss_of(averaged, batch(iteration, rank)).backward()
            raise_if_told(folder, rank)
            optimizer.step()
            if manager.current_step() > iteration:
                note(notes, rank, manager.current_step() - 1)


if __name__ == "__main__":
    main()
