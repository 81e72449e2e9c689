"""Training as torchft documents it: a replica group under its own torchrun, DDP or FSDP2 inside, a manager between.

Not for people: `benchmarks.parallel --vs torchft` runs it. With one rank to a group, torchft's DDP averages over the
groups; with more, FSDP2 shards the model inside of each (HSDP), and its all-reduce hook goes through the manager.
"""

import contextlib
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchft
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torchft.process_group import ManagedProcessGroup

from benchmarks.peers.worker import NOBODY, TIMEOUT, Watched, accumulate, batch, join, number, save
from benchmarks.struck import example


def watch(manager: Any, scene: Watched, size: int) -> None:
    """Call back when a quorum's group of the manager has formed; its releases differ in how they form it."""
    quorum, known = manager._async_quorum, 0  # noqa: SLF001 the benchmark looks inside

    def watching(*args: Any, **named: Any) -> None:
        nonlocal known
        quorum(*args, **named)
        if manager._quorum_id != known and manager.errored() is None:  # noqa: SLF001
            known = manager._quorum_id  # noqa: SLF001
            scene.formed(known, manager._pg.size() * size)  # noqa: SLF001

    manager._async_quorum = watching  # noqa: SLF001


def wrapped(model: Any, manager: Any) -> tuple[Any, Any]:
    """Return the model with gradients averaged over the replicas, and the context of a microbatch's backward pass."""
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not sharded:
        averaged = torchft.DistributedDataParallel(manager, model)
        return averaged, lambda last: contextlib.nullcontext() if last else averaged.no_sync()
    group = ManagedProcessGroup(manager)
    group.register("replicate")

    def hook(gradient: torch.Tensor) -> None:
        dist.all_reduce(gradient, group=group, op=dist.ReduceOp.AVG)

    for module in sharded:
        module.set_all_reduce_hook(hook)

    def syncing(last: bool) -> contextlib.AbstractContextManager[object]:
        model.set_requires_gradient_sync(last)
        return contextlib.nullcontext()

    return model, syncing


def managed(model: Any, optimizer: Any, rates: Any, replica: int) -> Any:
    """Return the manager of a replica group, which hands the state to a group that comes back."""
    parts = {"model": model, "optimizer": optimizer, "rates": rates}
    shards = model.state_dict()  # once: amid a forward pass, when the manager asks, FSDP2 has some parameters whole

    def load(state: dict[str, Any]) -> None:
        for name, part in parts.items():
            part.load_state_dict(state[name])

    return torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=lambda: {"model": shards, "optimizer": optimizer.state_dict(), "rates": rates.state_dict()},
        min_replica_size=1,
        replica_id=f"replica_{replica}",
        timeout=TIMEOUT,
        init_sync=False,  # all begin with the same seed
    )


def committed(manager: Any, scene: Watched, began: float, size: int) -> bool:
    """Return whether the manager kept an iteration, and note by how many ranks; if not, it is the next one again."""
    step, whole = manager.current_step(), scene.here.world
    if step <= scene.here.iteration:
        return False
    scene.here.iteration, scene.here.world = step - 1, manager.num_participants() * size
    scene.note("updated", began)
    scene.here.iteration, scene.here.world = step, whole
    return True


def main() -> None:
    """Train until it is ended."""
    join()
    place, size = dist.get_rank(), dist.get_world_size()
    replica, replicas = number("REPLICA_GROUP_ID"), number("NUM_REPLICA_GROUPS")
    scene = Watched(replica, place, number("MICROBATCHES") // replicas)
    train = example(scene)
    args = train.arguments()
    torch.manual_seed(args.seed)
    model = train.Decoder(args.width, args.layers, args.heads, args.context)
    mesh = init_device_mesh("cpu", (1, size, 1), mesh_dim_names=("pipeline", "shard", "tensor"))
    train.spread(model, mesh, args.heads)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(inner, T_max=100)
    manager = managed(model, inner, rates, replica)
    watch(manager, scene, size)
    averaged, syncing = wrapped(model, manager)
    optimizer = torchft.Optimizer(manager, inner)

    def backward(microbatch: int) -> None:
        inputs, targets = batch(args, scene.here.iteration, microbatch, place, size)
        (train.loss_of(averaged(inputs), targets) / scene.share).backward()

    scene.together(replicas * size)
    scene.here.iteration = NOBODY if number("TORCHELASTIC_RESTART_COUNT") else 0
    while manager.current_step() < args.iterations:
        began = time.time()
        optimizer.zero_grad()
        accumulate(scene, replicas, backward, syncing)
        scene.reached("update")
        optimizer.step()
        if committed(manager, scene, began, size):
            rates.step()
            if scene.here.iteration == number("KEPT"):
                save(model, Path(scene.orders.folder) / "stage-0.pt", writes=True)
    manager.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
