"""The next batch is fetched while the one at hand is computed, as language models' scripts do."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.inplace_scripts.case import batch, keep, loss_of, strike

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
inputs = batch(0, rank)
for iteration in range(30):
    strike(rank, iteration)
    loss = loss_of(model, inputs)
    inputs = batch(iteration + 1, rank)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
keep(rank, model=model.module)
dist.destroy_process_group()
