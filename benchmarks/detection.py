"""How long it takes from a fault to the fact that it was detected, for each kind of fault.

    python -m benchmarks.detection --repeat 20 --json

On a real cluster of this machine, four nodes of two slots, a task of eight workers trains; faults strike one after the
other, each when the task is whole again. For each there are the median and the 99th percentile of the seconds from just
before the fault to the `FailureDetected` of it, by the clock of this machine:

- `worker_killed`: SIGKILL to a worker's process.
- `exception`: a worker raises what CUDA raises of an illegal memory access; it notes the time just before.
- `worker_stopped`: SIGSTOP to a worker's process, which then does not even answer its agent.
- `node_lost`: SIGKILL to an agent and its workers. There is a grace, within which an agent may be back.
- `silent_node`: SIGSTOP to an agent, whose connection stays.
- `xid`: the kernel's log says that a GPU is lost. `xid_restart`: it says that a process made an illegal access.

The figures of the paper (section 4, figure 6) are the baseline; they were measured on other machines.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unicron_deploy.embedded import Cluster
from unicron_deploy.nats_server import free_port

from benchmarks.ha import until
from benchmarks.healing import whole_s
from benchmarks.output import as_json
from unicron import codec, subjects
from unicron.bootstrap import connected
from unicron.bus.nats import NatsBus
from unicron.client import Client
from unicron.contracts.base import Message
from unicron.contracts.events import FailureDetected, Regrouped, WorkerReady
from unicron.contracts.failures import DetectionMethod
from unicron.contracts.tasks import Member, TaskSpec
from unicron.errors import UnicronError

NODES, SLOTS = 4, 2
WORKERS = NODES * SLOTS

PAPER = {"worker_killed_s": 1.8, "exception_s": 0.3, "node_lost_s": 5.6, "xid_s": 0.3}

SCRIPT = """
import os, time, torch
from pathlib import Path
from unicron.train import Session

torch.manual_seed(0)
model = torch.nn.Linear(16, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
session = Session(seed=1, iterations=10**6, microbatches=8)
session.protect(model=model, optimizer=optimizer)
victim = Path(os.environ["FOLDER"]) / os.environ["UNICRON_WORKER"]
for iteration in session.iterations():
    for microbatch in session.microbatches():
        time.sleep(0.05)
        if victim.exists():
            victim.rename(victim.with_suffix(".raised"))
            victim.with_suffix(".raised").write_text(str(time.time()))
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        x = torch.randn(4, 16)
        session.backward((model(x) - x.sum(1, keepdim=True)).square().mean())
    session.step()
"""


class Run:
    """A cluster with its task, and what the journal says of it."""

    def __init__(self, cluster: Cluster, bus: NatsBus, folder: Path) -> None:
        self.cluster, self.bus, self.folder = cluster, bus, folder
        self.client = Client(bus)
        self.said: list[Message] = []

    async def read(self) -> None:
        """Follow the journal."""
        async for entry in self.bus.follow(subjects.events(FailureDetected, Regrouped, WorkerReady), 0):
            with contextlib.suppress(UnicronError):
                self.said.append(codec.decode_message(entry.data))

    def of(self, kind: type[Message], since: float) -> list[Any]:
        """Return what was said of a kind."""
        return [message for message in self.said if isinstance(message, kind) and message.at > since]

    async def whole(self, since: float) -> None:
        """Wait until all workers are in one group."""
        await until(lambda: whole_s(self.of(Regrouped, since), since, WORKERS), "the task is whole")
        await asyncio.sleep(1.0)  # iterations on which stalls are judged

    async def members(self) -> list[Member]:
        """Return the task's workers."""
        while True:
            with contextlib.suppress(UnicronError):
                found = (await self.client.status()).tasks[0].members
                if len(found) == WORKERS:
                    return found
            await asyncio.sleep(0.1)

    async def pid(self, worker: str) -> int:
        """Return the process of a worker."""
        ready = lambda: [m.pid for m in self.of(WorkerReady, 0.0) if m.worker == worker]  # noqa: E731
        return int((await until(ready, f"{worker} is ready"))[-1])

    async def detected(self, since: float, matches: Callable[[FailureDetected], bool]) -> float:
        """Return the seconds from `since` to the failure that matches."""
        found = await until(lambda: [f for f in self.of(FailureDetected, since) if matches(f)], "detected")
        return float(found[0].at - since)

    # --- faults ------------------------------------------------------------------------------------------------------

    async def worker_killed(self, member: Member) -> float:
        """Kill a worker."""
        pid, at = await self.pid(member.worker), time.time()
        os.kill(pid, signal.SIGKILL)
        return await self.detected(at, lambda failure: failure.worker == member.worker)

    async def worker_stopped(self, member: Member) -> float:
        """Stop a worker."""
        pid, at = await self.pid(member.worker), time.time()
        os.kill(pid, signal.SIGSTOP)
        return await self.detected(at, lambda failure: failure.worker == member.worker)

    async def exception(self, member: Member) -> float:
        """Have a worker raise."""
        asked = time.time()
        told = self.folder / f"{member.worker}.raised"
        (self.folder / member.worker).touch()
        took = await self.detected(asked, lambda failure: failure.worker == member.worker)
        return asked + took - float(told.read_text())

    async def node_lost(self, member: Member) -> float:
        """Kill an agent and its workers, and bring it back once that is known."""
        pids = [await self.pid(each.worker) for each in await self.members() if each.node == member.node]
        at = time.time()
        for pid in (self.cluster.processes[member.node].pid, *pids):
            os.kill(pid, signal.SIGKILL)
        took = await self.detected(at, lambda failure: failure.node == member.node and failure.severity == 1)
        await self.bring_back(member.node)
        return took

    async def silent_node(self, member: Member) -> float:
        """Stop an agent, and let it go on once that is known."""
        at = time.time()
        self.cluster.processes[member.node].signal(signal.SIGSTOP)
        lost = lambda f: (f.node, f.method) == (member.node, DetectionMethod.NODE_HEALTH)  # noqa: E731
        took = await self.detected(at, lost)
        self.cluster.processes[member.node].signal(signal.SIGCONT)
        return took

    async def xid(self, member: Member) -> float:
        """Have a node's kernel say that a GPU is lost; its agent is started again once that is known."""
        at = self.log(member.node, "79, GPU has fallen off the bus.")
        took = await self.detected(at, lambda failure: failure.node == member.node and failure.severity == 1)
        await asyncio.to_thread(self.cluster.kill, member.node)
        await self.bring_back(member.node)
        return took

    async def xid_restart(self, member: Member) -> float:
        """Have a node's kernel say that a worker's process made an illegal access."""
        at = self.log(member.node, f"31, pid={await self.pid(member.worker)}, name=python, MMU Fault")
        return await self.detected(at, lambda failure: failure.worker == member.worker)

    def log(self, node: str, text: str) -> float:
        """Write a line into the log of a node's kernel; return the time before."""
        at = time.time()
        with (self.folder / f"{node}.kern.log").open("a") as file:
            file.write(f"NVRM: Xid (PCI:0000:3b:00): {text}\n")
        return at

    async def bring_back(self, node: str) -> None:
        """Start an agent again."""
        await until(lambda: node not in self.cluster.alive(), f"{node} ends")
        await asyncio.to_thread(self.cluster.start_process, node)

    async def all(self, repeat: int) -> dict[str, list[float]]:
        """Let each fault strike so often; return the seconds."""
        spec = TaskSpec(
            name="struck",
            command=["python", str(self.folder / "script.py")],
            workdir=str(self.folder),
            min_workers=1,
            max_workers=WORKERS,
            microbatches=8,
            iterations=10**6,
            throughput={count: float(count) for count in range(1, WORKERS + 1)},
            env={"FOLDER": str(self.folder)},
        )
        began = time.time()
        await self.client.submit(spec)
        await self.whole(began)
        faults = (
            self.worker_killed,
            self.exception,
            self.worker_stopped,
            self.xid_restart,
            self.silent_node,
            self.node_lost,
            self.xid,
        )
        found: dict[str, list[float]] = {fault.__name__: [] for fault in faults}
        for number in range(repeat):
            for fault in faults:
                members = await self.members()
                at = time.time()
                found[fault.__name__].append(await fault(members[number % len(members)]))
                print(f"{fault.__name__}: {found[fault.__name__][-1]:.3f} s", file=sys.stderr, flush=True)
                await self.whole(at)
        return found


async def run(folder: Path, repeat: int) -> dict[str, list[float]]:
    """Run everything in `folder`."""
    (folder / "script.py").write_text(SCRIPT)
    cluster = LoggedCluster(folder / "cluster", nodes=NODES, slots=SLOTS, port=free_port())
    os.environ |= {"UNICRON_ATTEMPTS": "100000"}  # on one node more fail than on any that is not to be given up
    await asyncio.to_thread(cluster.start)
    try:
        await cluster.wait_until_ready(120.0)
        async with connected(cluster.settings(), "detection") as bus:
            made = Run(cluster, bus, folder)
            reading = asyncio.create_task(made.read())
            try:
                return await made.all(repeat)
            finally:
                reading.cancel()
    finally:
        await asyncio.to_thread(cluster.stop)


class LoggedCluster(Cluster):
    """One whose nodes have a kernel's log each, beside its folder."""

    def _environment(self, name: str) -> dict[str, str]:
        log = {"UNICRON_KERNEL_LOG": str(self.root.parent / f"{name}.kern.log")} if name in self.nodes else {}
        return super()._environment(name) | log


def figures(found: dict[str, list[float]]) -> dict[str, float]:
    """Return median and 99th percentile of each fault."""
    named: dict[str, float] = {}
    for fault, seconds in found.items():
        ordered = sorted(seconds)
        named[f"{fault}_p50_s"] = round(statistics.median(ordered), 3)
        named[f"{fault}_p99_s"] = round(ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 3)
    return named


def main() -> None:
    """Let the faults strike, and print how long each took to be detected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=20, help="strikes of each kind")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="unicron-detection-") as folder:
        found = asyncio.run(run(Path(folder), options.repeat))
    told = figures(found)
    if options.json:
        print(as_json("detection", told, {"paper": PAPER}, {"seconds": found}))
    else:
        for name, value in told.items():
            print(f"{name:28} {value:8.3f}")


if __name__ == "__main__":
    main()
