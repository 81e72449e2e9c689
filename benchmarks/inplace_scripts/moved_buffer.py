"""Batch normalization, and a buffer that each forward pass moves by what it sees."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.inplace_scripts.case import batch, keep, loss_of, strike


class Scaled(torch.nn.Module):
    """Scales its inputs by a moving mean of them, which batch normalization behind it does not undo."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(8))
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the output, and move the mean."""
        with torch.no_grad():
            self.mean.mul_(0.9).add_(inputs.mean(0), alpha=0.1)
        result: torch.Tensor = self.layers(inputs * (1 + self.mean))
        return result


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = DistributedDataParallel(Scaled())
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for iteration in range(30):
    strike(rank, iteration)
    loss = loss_of(model, batch(iteration, rank, size=8))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
parameters = dict(model.module.named_parameters())
# the other ranks' buffers are those of the first from the next forward pass on
buffers = dict(model.module.named_buffers()) if rank == 0 else {}
keep(rank, parameters=parameters, buffers=buffers)
dist.destroy_process_group()
