"""The first rank has more batches than the others: whoever runs this has to be told."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.inplace_scripts.case import batch, keep, loss_of

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for iteration in range(12 - 2 * rank):
    loss = loss_of(model, batch(iteration, rank))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
keep(rank, model=model.module)
dist.destroy_process_group()
