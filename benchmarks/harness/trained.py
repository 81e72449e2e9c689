"""A small model that trains, for tasks of benchmarks; the environment says how.

- WIDTH, BATCH: of the model's input, and of a microbatch.
- PACE: seconds that a microbatch waits, as long as there is no file HURRY.
- OUT: where the parameters are saved at the end.
- ORDERS: a folder in which WORKER.raises or WORKER.hangs has that worker raise what CUDA raises of an illegal memory
  access, or sleep for ever; the file gets the time just before, and is renamed to WORKER.raised or WORKER.hung.
"""

import os
import time
from pathlib import Path

import torch

from unicron.train import Session

ORDERS = Path(os.environ.get("ORDERS", "/nowhere"), os.environ.get("UNICRON_WORKER", "alone"))


def ordered(order: str, done: str) -> bool:
    """Return whether this worker is to do something, and note that it does."""
    if not ORDERS.with_suffix(order).exists():
        return False
    ORDERS.with_suffix(order).rename(ORDERS.with_suffix(done))
    ORDERS.with_suffix(done).write_text(str(time.time()))
    return True


def run() -> None:
    """Train."""
    width, batch, pace_s = (float(os.environ.get(name, "16")) for name in ("WIDTH", "BATCH", "PACE"))
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = torch.nn.Linear(int(width), 2 * int(width)), torch.nn.Tanh(), torch.nn.Linear(2 * int(width), 1)
    model = torch.nn.Sequential(*layers)
    session = Session(seed=1, accumulate_dtype=torch.float64)
    session.protect(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.001))
    if "OUT" in os.environ:
        session.save(os.environ["OUT"])
    for _ in session.iterations():
        for _ in session.microbatches():
            inputs = torch.randn(int(batch), int(width))
            if not Path(os.environ.get("HURRY", "/nowhere")).exists():
                time.sleep(pace_s)
            if ordered(".hangs", ".hung"):
                time.sleep(10**6)
            if ordered(".raises", ".raised"):
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            session.backward((model(inputs) - inputs.sum(1, keepdim=True)).square().mean())
        session.step()


if __name__ == "__main__":
    run()
