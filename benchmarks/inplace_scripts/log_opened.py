"""The first rank opens its log for writing, which empties it. It is the one that is killed."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.inplace_scripts.case import FOLDER, batch, keep, loss_of, strike, validate

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
log = (FOLDER / f"log-{rank}").open("w", buffering=1)
for iteration in range(30):
    strike(rank, iteration)
    loss = loss_of(model, batch(iteration, rank))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log.write(f"{iteration} {validate(model.module)}\n")
log.close()
keep(rank, model=model.module, log=(FOLDER / f"log-{rank}").read_text())
dist.destroy_process_group()
