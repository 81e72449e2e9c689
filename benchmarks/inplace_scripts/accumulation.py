"""Gradients of three batches are accumulated, the first two of them in no_sync()."""

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
    optimizer.zero_grad()
    with model.no_sync():
        for step in range(2):
            (loss_of(model, batch(3 * iteration + step, rank)) / 3).backward()
            if step == 0:
                strike(rank, iteration)
    (loss_of(model, batch(3 * iteration + 2, rank)) / 3).backward()
    optimizer.step()
keep(rank, model=model.module)
dist.destroy_process_group()
