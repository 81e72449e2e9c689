"""Parameters of bfloat16, and an optimizer that keeps its moments in float32."""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.inplace_scripts.case import batch, keep, loss_of, strike


class Momentum(torch.optim.Optimizer):
    """Steps along a moving average of the gradient, which has more digits than the parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # noqa: ARG002
        """Make an update."""
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            mean = state.setdefault("mean", torch.zeros_like(parameter, dtype=torch.float32))
            mean.mul_(0.9).add_(parameter.grad.float(), alpha=0.1)
            parameter.copy_(parameter.float() - 0.05 * mean)


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = DistributedDataParallel(torch.nn.Linear(8, 1).bfloat16())
optimizer = Momentum(model.parameters(), {})
for iteration in range(30):
    strike(rank, iteration)
    loss = loss_of(model, batch(iteration, rank).bfloat16())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
keep(rank, model=model.module, moments=[state["mean"] for state in optimizer.state.values()])
dist.destroy_process_group()
