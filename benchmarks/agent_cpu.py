"""What an agent costs that has eight workers: the CPU time of its process, as `benchmarks.overhead` reports it."""

import asyncio
import os
import time
from pathlib import Path

from unicron_deploy.embedded import Cluster
from unicron_deploy.nats_server import free_port

from unicron.bootstrap import connected_client
from unicron.contracts.events import IterationFinished
from unicron.contracts.tasks import TaskSpec

WORKERS = 8
SETTLED = 3
"""Iterations before it is measured."""

SCRIPT = """
import time, torch
from unicron.train import Session

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(64, 64)
session = Session(seed=1, iterations=10**6, microbatches=32)
session.protect(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.001))
for iteration in session.iterations():
    for microbatch in session.microbatches():
        time.sleep(0.25)
        session.backward(model(torch.randn(4, 64)).square().mean())
    session.step()
"""
"""Four microbatches of a quarter of a second on each worker: workers that hardly compute leave the cores to agents."""


def cpu_s(pid: int) -> float:
    """Return the seconds of CPU that a process has used, without its children (proc_pid_stat(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def agent_cpu_percent(root: Path, seconds: float) -> float:
    """Return how much of a core the agent of a node with eight workers uses, over so many seconds of training."""
    (root / "sleepy.py").write_text(SCRIPT, encoding="utf-8")
    cluster = Cluster(root / "one-node", nodes=1, slots=WORKERS, port=free_port())
    await asyncio.to_thread(cluster.start)
    try:
        await cluster.wait_until_ready(120.0)
        async with connected_client(cluster.settings(), "benchmark") as client:
            spec = TaskSpec(
                name="sleepy",
                command=["python", str(root / "sleepy.py")],
                workdir=str(root),
                min_workers=WORKERS,
                max_workers=WORKERS,
                microbatches=32,
                iterations=10**6,
                env={"OMP_NUM_THREADS": "1"},
            )
            await client.submit(spec)
            async for done in client.telemetry(IterationFinished):
                if isinstance(done, IterationFinished) and done.iteration >= SETTLED:
                    break
            pid = cluster.processes[next(iter(cluster.nodes))].pid
            used, began = cpu_s(pid), time.monotonic()
            await asyncio.sleep(seconds)
            return 100 * (cpu_s(pid) - used) / (time.monotonic() - began)
    finally:
        cluster.stop()
