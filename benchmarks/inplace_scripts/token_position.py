"""Each rank reads a long text from a place of its own, and remembers where it is in an attribute."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.inplace_scripts.case import batch, keep, loss_of, strike


class Reader:
    """Hands out pieces of a text, every second piece to one rank."""

    def __init__(self, first: int, ranks: int) -> None:
        self.text = batch(7, size=2048)
        self.position, self.ahead = 4 * first, 4 * ranks

    def read(self) -> torch.Tensor:
        """Return the next piece."""
        piece = self.text[self.position : self.position + 4]
        self.position += self.ahead
        return piece


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
reader = Reader(rank, dist.get_world_size())
for iteration in range(30):
    strike(rank, iteration)
    loss = loss_of(model, reader.read())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
keep(rank, model=model.module, position=reader.position)
dist.destroy_process_group()
