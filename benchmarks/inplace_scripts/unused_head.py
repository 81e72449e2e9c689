"""Two heads, of which an iteration uses one: the other gets no gradient, so weight decay leaves it alone."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.inplace_scripts.case import batch, keep, strike


class Heads(torch.nn.Module):
    """Two heads on one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = torch.nn.Linear(8, 8)
        self.heads = torch.nn.ModuleList(torch.nn.Linear(8, 1) for _ in range(2))

    def forward(self, inputs: torch.Tensor, use: int) -> torch.Tensor:
        """Return the output of one of the heads."""
        result: torch.Tensor = self.heads[use](self.trunk(inputs).tanh())
        return result


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = DistributedDataParallel(Heads(), find_unused_parameters=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.2)
for iteration in range(30):
    strike(rank, iteration)
    inputs = batch(iteration, rank)
    loss = (model(inputs, iteration // 10 % 2) - inputs.sum(1, keepdim=True).sin()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
keep(rank, model=model.module)
dist.destroy_process_group()
