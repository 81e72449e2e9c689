"""Each rank adds noise to its data that a generator of NumPy's draws, which it has made for itself."""

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.inplace_scripts.case import batch, keep, loss_of, strike

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
generator = np.random.default_rng(rank)
for iteration in range(30):
    strike(rank, iteration)
    noise = torch.from_numpy(generator.normal(0, 0.1, (4, 8))).float()
    loss = loss_of(model, batch(iteration, rank) + noise)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
keep(rank, model=model.module, drawn=generator.random())
dist.destroy_process_group()
