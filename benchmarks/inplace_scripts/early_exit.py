"""All ranks agree that it is enough, and leave by sys.exit(0) in the middle of the loop."""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.inplace_scripts.case import batch, keep, loss_of, strike

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for iteration in range(100):
    strike(rank, iteration)
    loss = loss_of(model, batch(iteration, rank))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    enough = torch.tensor(float(iteration >= 20 + rank))
    dist.all_reduce(enough)
    if enough.item() == dist.get_world_size():
        keep(rank, model=model.module, iteration=iteration)
        sys.exit(0)
