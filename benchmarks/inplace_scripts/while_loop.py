"""A `while` loop whose condition takes the next batch from an iterator."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.inplace_scripts.case import batch, keep, loss_of, strike

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches, iteration = iter([batch(number, rank) for number in range(30)]), 0
while (inputs := next(batches, None)) is not None:
    strike(rank, iteration)
    loss = loss_of(model, inputs)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    iteration += 1
keep(rank, model=model.module, iteration=iteration)
dist.destroy_process_group()
