"""One training function is called twice, the second time with another optimizer and schedule."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.inplace_scripts.case import batch, keep, loss_of, strike


def train(iterations: range, optimizer: torch.optim.Optimizer) -> None:
    """Train with a learning rate that falls."""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    for iteration in iterations:
        strike(rank, iteration)
        loss = loss_of(model, batch(iteration, rank))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
train(range(10), torch.optim.SGD(model.parameters(), lr=0.1))
train(range(10, 30), torch.optim.AdamW(model.parameters(), lr=0.02))
keep(rank, model=model.module)
dist.destroy_process_group()
