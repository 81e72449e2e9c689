"""The best loss so far is a number of NumPy's, as np.mean returns it."""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.inplace_scripts.case import batch, keep, loss_of, strike, validate

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
best: np.floating[Any] = np.float64(np.inf)
for epoch in range(10):
    values = []
    for step in range(3):
        strike(rank, 3 * epoch + step)
        loss = loss_of(model, batch(3 * epoch + step, rank))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(validate(model.module))
    if (value := np.mean(values)) < best:
        best = value
    else:
        optimizer.param_groups[0]["lr"] *= 0.5
keep(rank, model=model.module, best=float(best))
dist.destroy_process_group()
