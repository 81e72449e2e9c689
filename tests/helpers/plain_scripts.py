"""Scripts of DistributedDataParallel, of several shapes; each writes its parameters to the file OUT."""

HEAD = '''"""Trains."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

DATA = torch.randn(96, 8, generator=torch.Generator().manual_seed(3))
'''

EPOCHS = (
    HEAD
    + '''from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = 3


def setup():
    dist.init_process_group("gloo")


def main():
    setup()
    rank, local_rank = dist.get_rank(), int(os.environ.get("LOCAL_RANK", "0"))
    main_process = rank == 0
    device = torch.device(f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(5 + rank)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).to(device)
    if main_process:
        print("parameters", sum(each.numel() for each in net.parameters()))
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    data = TensorDataset(DATA, DATA.sum(1, keepdim=True))
    sampler = DistributedSampler(data, seed=7)
    loader = DataLoader(data, batch_size=10, sampler=sampler, num_workers=0)
    criterion = nn.MSELoss()

    for epoch in range(1, EPOCHS + 1):
        model.train()
        sampler.set_epoch(epoch)
        total = 0.0  # of this epoch
        for place, (x, y) in enumerate(loader):
            x, y = x.to(device), y.to(device)
            # the gradients of the last batch
            optimizer.zero_grad()
            loss = criterion(model(x), y)

            loss.backward()
            optimizer.step()
            total += loss.item()
            if place % 2 == 0 and main_process:
                print(f"""at {place}:
    {loss.item():.4f}""")
        scheduler.step()
        if main_process:
            print(f"epoch {epoch} loss {total / len(loader):.4f}")
    if rank == 0:
        torch.save(model.module.state_dict(), os.environ["OUT"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''
)
