"""One model, one optimizer, one loop."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.inplace_scripts.case import batch, keep, loss_of, strike

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
for iteration in range(30):
    loss = loss_of(model, batch(iteration, rank))
    strike(rank, iteration)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
keep(rank, model=model.module, optimizer=optimizer)
dist.destroy_process_group()
