"""Half precision with a scaled loss; the scale is too large at first, so that updates are left out."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.inplace_scripts.case import batch, keep, loss_of, strike

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=5)
for iteration in range(30):
    strike(rank, iteration)
    with torch.autocast("cpu", torch.float16):
        loss = loss_of(model, batch(iteration, rank))
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
keep(rank, model=model.module, scale=scaler.get_scale())
dist.destroy_process_group()
