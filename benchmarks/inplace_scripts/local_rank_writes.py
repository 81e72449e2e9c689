"""One rank of each node writes a line an iteration: the one whose LOCAL_RANK is 0."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.inplace_scripts.case import FOLDER, batch, keep, loss_of, strike

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
local_rank, lines = int(os.environ["LOCAL_RANK"]), FOLDER / "lines"
for iteration in range(30):
    strike(rank, iteration)
    loss = loss_of(model, batch(iteration, rank))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if local_rank == 0:
        with lines.open("a") as file:
            file.write(f"{iteration} {rank}\n")
dist.barrier()
keep(rank, model=model.module, local_rank=local_rank, lines=lines.read_text())
dist.destroy_process_group()
