"""The training script of `benchmarks.checkpoint`: ways of keeping the state in every iteration take turns with none.

Where workers share the model, it is spread over them by torch's `fully_shard`. Each block of iterations has one way,
and each round has a block of each; the first iteration of a block does not count. What an iteration took is noted by
rank 0, from update to update.
"""

import argparse
import json
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.fsdp import fully_shard

from benchmarks.peers.train_plain import VOCABULARY, Decoder, loss_of
from unicron.contracts.traffic import Forecast
from unicron.train import Session
from unicron.train.session.states import TorchStates
from unicron.train.worker.traffic import Traffic

WAYS = ("none", "ours", "dcp_async", "torch_save")
PACED = ("none", "ours", "at_once")
"""Ways of a replica of several workers: copies in idle spans, or as soon as they are saved."""

SEQUENCE = 64


class Switched:
    """Says to the session whether to save, where its agent wants it, and to the agent whether something is sent."""

    def __init__(self) -> None:
        self.way, self.saved = "none", -1
        wanted: Any = vars(TorchStates)["saves"]
        TorchStates.saves = property(lambda states: self.way in PACED[1:] and wanted.fget(states))  # type: ignore[assignment]
        share, save = Traffic._share, TorchStates.save  # noqa: SLF001 so that agents know of nothing for a while

        def sharing(traffic: Traffic, forecast: Forecast) -> None:
            share(traffic, Forecast() if self.way == "at_once" else forecast)

        def saving(states: TorchStates, iteration: int) -> None:
            self.saved = iteration
            save(states, iteration)

        TorchStates.save = saving  # type: ignore[assignment,method-assign]
        Traffic._share = sharing  # type: ignore[assignment,method-assign] # noqa: SLF001


def keeper(folder: Path) -> dict[str, Callable[[int, dict[str, Any]], None]]:
    """Return what each way does behind an update, other than the session's own."""
    waiting: list[Future[Any]] = []

    def asynchronously(iteration: int, state: dict[str, Any]) -> None:
        if waiting:
            waiting.pop().result()
        saved: Any = async_save(state, checkpoint_id=folder / f"dcp-{iteration % 2}", no_dist=True)
        waiting.append(saved)

    def plainly(iteration: int, state: dict[str, Any]) -> None:
        torch.save(state, folder / f"plain-{iteration % 2}")

    return {"dcp_async": asynchronously, "torch_save": plainly}


def run() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    for name in ("width", "layers", "batch", "block", "shard"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--ways", nargs="+", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    torch.manual_seed(0)
    session, switched, keepers = Session(), Switched(), keeper(options.folder)
    model = Decoder(options.width, options.layers)
    if options.shard > 1:
        for part in (*model.layers.layers, model):
            fully_shard(part, mesh=session.mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    session.protect(model=model, optimizer=optimizer)
    before = time.perf_counter()
    for iteration in session.iterations():
        way = switched.way = options.ways[iteration // options.block % len(options.ways)]
        for _ in session.microbatches():
            session.backward(loss_of(model, torch.randint(VOCABULARY, (options.batch, SEQUENCE + 1))))
        session.step()
        if session.rank == 0:
            if keep := keepers.get(way):
                keep(iteration, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
            now = time.perf_counter()
            note = {"way": way, "iteration": iteration, "first": iteration % options.block == 0, "s": now - before}
            note["saved"] = switched.saved == iteration
            with (options.folder / "notes.jsonl").open("a") as file:
                file.write(json.dumps(note) + "\n")
            before = now
    (options.folder / "size").write_text(str(sum(each.nbytes for each in model.parameters()) * 3))
    shutil.rmtree(options.folder / "dcp-0", ignore_errors=True)


if __name__ == "__main__":
    run()
