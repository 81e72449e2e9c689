"""Only the first rank validates, and keeps the best weights in its memory. It is the one that is killed."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.inplace_scripts.case import batch, keep, loss_of, strike, validate

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
best, best_state = float("inf"), None
for iteration in range(30):
    strike(rank, iteration)
    loss = loss_of(model, batch(iteration, rank))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0 and (value := validate(model.module)) < best:
        best, best_state = value, {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
keep(rank, model=model.module, best=best, best_state=best_state)
dist.destroy_process_group()
