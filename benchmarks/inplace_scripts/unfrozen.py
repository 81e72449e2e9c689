"""Only the head is trained at first, then all of the model: wrapped anew, with a new optimizer."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.inplace_scripts.case import batch, keep, loss_of, strike

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
layers[0].requires_grad_(requires_grad=False)
model = DistributedDataParallel(layers)
optimizer = torch.optim.AdamW(layers[2].parameters(), lr=0.05)
for epoch in range(6):
    if epoch == 2:
        layers[0].requires_grad_(requires_grad=True)
        model = DistributedDataParallel(layers)
        optimizer = torch.optim.AdamW(layers.parameters(), lr=0.01)
    for step in range(5):
        strike(rank, 5 * epoch + step)
        loss = loss_of(model, batch(5 * epoch + step, rank))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
keep(rank, model=layers)
dist.destroy_process_group()
