"""Four ranks train two models: those with even numbers one, the others another."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.inplace_scripts.case import batch, keep, loss_of, strike

dist.init_process_group("gloo")
rank = dist.get_rank()
halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
torch.manual_seed(rank % 2)
model = DistributedDataParallel(torch.nn.Linear(8, 1), process_group=halves[rank % 2])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for iteration in range(30):
    strike(rank, iteration)
    loss = loss_of(model, batch(iteration, rank))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
keep(rank, model=model.module)
dist.destroy_process_group()
