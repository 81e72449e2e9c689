"""A list of losses grows; the learning rate follows from the last of them."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.inplace_scripts.case import batch, keep, loss_of, strike, validate

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
losses: list[float] = []
for iteration in range(30):
    strike(rank, iteration)
    loss = loss_of(model, batch(iteration, rank))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(validate(model.module))
    if len(losses) > 3 and losses[-1] > losses[-3]:
        optimizer.param_groups[0]["lr"] *= 0.9
keep(rank, model=model.module, losses=losses)
dist.destroy_process_group()
