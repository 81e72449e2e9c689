"""Epochs around batches; the learning rate falls where a validation loss, the same on all ranks, does not."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.inplace_scripts.case import batch, keep, loss_of, strike, validate

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1, threshold=0.03)
for epoch in range(12):
    for step in range(3):
        iteration = 3 * epoch + step
        strike(rank, iteration)
        loss = loss_of(model, batch(iteration, rank))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    scheduler.step(validate(model.module))
keep(rank, model=model.module, scheduler=scheduler, rate=optimizer.param_groups[0]["lr"])
dist.destroy_process_group()
