"""A loader shuffles by a generator of its own, which goes on from epoch to epoch."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.inplace_scripts.case import batch, keep, loss_of, strike

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(100 + rank)
loader = DataLoader(TensorDataset(batch(3, size=32)), batch_size=4, shuffle=True, generator=generator)
for epoch in range(4):
    for step, (inputs,) in enumerate(loader):
        strike(rank, 8 * epoch + step)
        loss = loss_of(model, inputs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
keep(rank, model=model.module, drawn=torch.rand(3, generator=generator))
dist.destroy_process_group()
