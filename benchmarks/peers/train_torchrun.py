"""Training as torchrun documents it: a group that starts anew as a whole, from a checkpoint after every iteration.

Not for people: `benchmarks.parallel --vs torchrun` runs it. Plain replicas are averaged by DDP and saved by rank 0;
other layouts by FSDP2 over replicas and shards (HSDP), with tensor and pipeline parallelism inside, and saved with
`torch.distributed.checkpoint`.
"""

import contextlib
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.worker import TIMEOUT, Watched, accumulate, batch, join, number, save
from benchmarks.struck import example

DIMENSIONS = ("replicate", "pipeline", "shard", "tensor")


class Snapshot:
    """Checkpoints of plain replicas, one file."""

    def __init__(self, folder: Path, parts: dict[str, Any]) -> None:
        self._path, self._parts = folder / "snapshot.pt", parts

    def load(self) -> int:
        """Load the last one; return how many iterations it has."""
        if not self._path.exists():
            return 0
        state = torch.load(self._path, weights_only=True)
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
        return int(state["iterations"])

    def save(self, iterations: int) -> None:
        """Save what there is after so many iterations."""
        if dist.get_rank() == 0:
            unfinished = self._path.with_suffix(".new")
            torch.save(
                {name: part.state_dict() for name, part in self._parts.items()} | {"iterations": iterations}, unfinished
            )
            unfinished.rename(self._path)


class Sharded:
    """Checkpoints of sharded models, a folder each."""

    def __init__(self, folder: Path, parts: dict[str, Any]) -> None:
        from torch.distributed.checkpoint import state_dict, state_dict_loader, state_dict_saver  # noqa: PLC0415 takes a while

        self._load, self._save, self._api = state_dict_loader.load, state_dict_saver.save, state_dict
        self._folder, self._parts = folder / "checkpoints", parts
        # stages of a pipeline have parameters of different names, so groups of them can't be saved as lists
        self._options = state_dict.StateDictOptions(flatten_optimizer_state_dict=True)

    def _state(self) -> dict[str, Any]:
        model, optimizer = self._api.get_state_dict(
            self._parts["model"], self._parts["optimizer"], options=self._options
        )
        return {"model": model, "optimizer": optimizer, "rates": self._parts["rates"].state_dict()}

    def load(self) -> int:
        """Load the last one; return how many iterations it has."""
        there = [int(path.parent.name) for path in self._folder.glob("*/.metadata")]
        if not there:
            return 0
        state = self._state()
        self._load(state, checkpoint_id=self._folder / str(max(there)))
        self._api.set_state_dict(
            self._parts["model"],
            self._parts["optimizer"],
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=self._options,
        )
        self._parts["rates"].load_state_dict(state["rates"])
        return max(there)

    def save(self, iterations: int) -> None:
        """Save what there is after so many iterations; the one before stays until this is whole."""
        self._save(self._state(), checkpoint_id=self._folder / str(iterations))
        if dist.get_rank() == 0:
            shutil.rmtree(self._folder / str(iterations - 1), ignore_errors=True)


def spread(train: Any, model: Any, mesh: Any, heads: int) -> tuple[Any, Any]:
    """Return the model over all ranks, and the context of a microbatch's backward pass."""
    if mesh["replicate"].size() == mesh.size():
        averaged = DistributedDataParallel(model)
        return averaged, lambda last: contextlib.nullcontext() if last else averaged.no_sync()
    train.spread(model, {name: mesh[name] for name in DIMENSIONS} | {"shard": mesh["replicate", "shard"]}, heads)

    def syncing(last: bool) -> contextlib.AbstractContextManager[object]:
        model.set_requires_gradient_sync(last)
        return contextlib.nullcontext()

    return model, syncing


def scheduled(train: Any, model: Any, pipeline: Any, chunks: int) -> Any:
    """Return the pipeline's schedule, None without a pipeline."""
    if pipeline.size() == 1:
        return None
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B  # noqa: PLC0415 takes a second

    stage = PipelineStage(
        model, pipeline.get_local_rank(), pipeline.size(), torch.device("cpu"), group=pipeline.get_group()
    )
    return Schedule1F1B(stage, chunks, loss_fn=train.loss_of)


def layout() -> Any:
    """Return the mesh of all ranks, whose groups give up after a while too."""
    shape = tuple(number(name.upper()) for name in DIMENSIONS)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=DIMENSIONS)
    for name in DIMENSIONS:
        _set_pg_timeout(TIMEOUT, mesh.get_group(name))
    return mesh


def main() -> None:
    """Train until it is ended."""
    join()
    mesh = layout()
    replicas, pipeline, shard = mesh["replicate"].size(), mesh["pipeline"], mesh["shard"]
    size = mesh.size() // replicas
    scene = Watched(dist.get_rank() // size, dist.get_rank() % size, number("MICROBATCHES") // replicas)
    train = example(scene)
    args = train.arguments()
    torch.manual_seed(args.seed)
    model = train.Decoder(args.width, args.layers, args.heads, args.context)
    averaged, syncing = spread(train, model, mesh, args.heads)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    schedule, stage = scheduled(train, model, pipeline, args.chunks), pipeline.get_local_rank()

    def backward(microbatch: int) -> None:
        inputs, targets = batch(args, scene.here.iteration, microbatch, shard.get_local_rank(), shard.size())
        if schedule is None:
            (train.loss_of(averaged(inputs), targets) / scene.share).backward()
        else:
            schedule.step(*([] if stage else [inputs]), target=targets if stage == pipeline.size() - 1 else None)

    folder = Path(scene.orders.folder)
    kind = Snapshot if size == 1 else Sharded
    checkpoints = kind(folder, {"model": model, "optimizer": optimizer, "rates": rates})
    first = checkpoints.load()
    scene.formed(number("TORCHELASTIC_RESTART_COUNT"), mesh.size())
    for iteration in range(first, args.iterations):
        scene.here.iteration, began = iteration, time.time()
        accumulate(scene, replicas, backward, syncing)
        scene.reached("update")
        if schedule is not None:
            for each in model.parameters():
                each.grad /= scene.share
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
        scene.note("updated", began)
        checkpoints.save(iteration + 1)
        if iteration + 1 == number("KEPT"):
            save(model, folder / f"stage-{stage}.pt", writes=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
