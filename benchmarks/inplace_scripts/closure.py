"""What steers the training is counted in variables of a function, by another one inside of it."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.inplace_scripts.case import batch, keep, loss_of, strike, validate


def main() -> None:
    """Train with a learning rate that follows the counts."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples, smooth = 0, 1.0

    def count(loss: float) -> None:
        nonlocal samples, smooth
        samples, smooth = samples + 4, 0.9 * smooth + 0.1 * loss
        optimizer.param_groups[0]["lr"] = 0.1 * min(1.0, smooth) / (1 + samples / 100)

    for iteration in range(30):
        strike(rank, iteration)
        loss = loss_of(model, batch(iteration, rank))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        count(validate(model.module))
    keep(rank, model=model.module, samples=samples, smooth=smooth)
    dist.destroy_process_group()


main()
