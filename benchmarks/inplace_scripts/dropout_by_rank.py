"""Dropout, drawn from the global generator that each rank has seeded by its number."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.inplace_scripts.case import batch, keep, loss_of, strike

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
layers = [torch.nn.Linear(8, 32), torch.nn.Dropout(0.2), torch.nn.Tanh(), torch.nn.Linear(32, 1)]
model = DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
torch.manual_seed(rank)
for iteration in range(30):
    strike(rank, iteration)
    loss = loss_of(model, batch(iteration, rank))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
keep(rank, model=model.module)
dist.destroy_process_group()
