"""A module counts its forward passes in an attribute, and computes with the count."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.inplace_scripts.case import batch, keep, loss_of, strike


class Annealed(torch.nn.Module):
    """A layer whose output grows to its full size over the first forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.passes = torch.nn.Linear(8, 1), 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the output, and count."""
        self.passes += 1
        result: torch.Tensor = self.layer(inputs) * min(1.0, self.passes / 20)
        return result


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = DistributedDataParallel(Annealed())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for iteration in range(30):
    strike(rank, iteration)
    loss = loss_of(model, batch(iteration, rank))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
keep(rank, model=model.module, passes=model.module.passes)
dist.destroy_process_group()
