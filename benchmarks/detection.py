"""How long it takes from a fault to the fact that it was detected, for each kind of fault.

    python -m benchmarks.detection --repeat 20 --json

On a real cluster of this machine, four nodes of two slots, tasks of eight workers train, one after the other; faults
strike, each when the task is whole again. For each there are the median and the 99th percentile of the seconds from
just before the fault to the `FailureDetected` of it, by the clock of this machine:

- `worker_killed`: SIGKILL to a worker's process.
- `exception`: a worker raises what CUDA raises of an illegal memory access; it notes the time just before.
- `node_lost`: SIGKILL to an agent and its workers. There is a grace, within which an agent may be back;
  `node_suspected` is until that begins, `NodeSuspected`.
- `silent_node`: SIGSTOP to an agent, whose connection stays.
- `xid`: the kernel's log says that a GPU is lost. `xid_restart`: it says that a process made an illegal access.
- `hang`: a worker's script sleeps for ever in a microbatch, and its agent is answered. `worker_stopped`: SIGSTOP to its
  process, which then does not even answer. For both also the seconds beyond three microbatches, of 0.7 s each.
- `slow_worker_iterations`: a worker's microbatches take 1.5 times as long; how many iterations later it is named, and
  `slow_worker_named`: how often it was that worker alone.

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
from collections.abc import Awaitable, Callable, Sequence
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
from unicron.contracts.events import FailureDetected, IterationFinished, NodeSuspected, Regrouped, WorkerReady
from unicron.contracts.failures import DetectionMethod
from unicron.contracts.slowdowns import SlowdownDetected, SlowdownEnded
from unicron.contracts.tasks import Member, TaskSpec
from unicron.errors import UnicronError

NODES, SLOTS = 4, 2
WORKERS = NODES * SLOTS

PACES = {"struck": 0.05, "slow": 0.2, "hung": 0.7}
"""Tasks, and the seconds of their microbatches."""

SLOWER = 1.5
USUAL = 25
"""Iterations after which a task has usual times."""

BEYOND = ("hang", "worker_stopped")

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
        time.sleep(float(os.environ["PACE"]))
        if victim.with_suffix(".hangs").exists():
            victim.with_suffix(".hangs").rename(victim.with_suffix(".hung"))
            victim.with_suffix(".hung").write_text(str(time.time()))
            time.sleep(10**6)
        if victim.exists():
            victim.rename(victim.with_suffix(".raised"))
            victim.with_suffix(".raised").write_text(str(time.time()))
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        x = torch.randn(4, 16)
        session.backward((model(x) - x.sum(1, keepdim=True)).square().mean())
    session.step()
"""


Fault = Callable[[Member], Awaitable[float]]


class Run:
    """A cluster with its task, and what the journal says of it."""

    def __init__(self, cluster: Cluster, bus: NatsBus, folder: Path) -> None:
        self.cluster, self.bus, self.folder = cluster, bus, folder
        self.client = Client(bus)
        self.pace_s = 0.0
        self.said: list[Message] = []
        self.iterations: list[IterationFinished] = []
        self.suspected: list[float] = []
        self.named: list[bool] = []

    async def read(self) -> None:
        """Follow the journal."""
        kinds = (FailureDetected, NodeSuspected, Regrouped, SlowdownDetected, SlowdownEnded, WorkerReady)
        async for entry in self.bus.follow(subjects.events(*kinds), 0):
            with contextlib.suppress(UnicronError):
                self.said.append(codec.decode_message(entry.data))

    async def listen(self) -> None:
        """Hear of iterations."""
        async for done in self.client.telemetry(IterationFinished):
            if isinstance(done, IterationFinished):
                self.iterations.append(done)

    def of(self, kind: type[Message], since: float) -> list[Any]:
        """Return what was said of a kind."""
        return [message for message in self.said if isinstance(message, kind) and message.at > since]

    async def whole(self, since: float) -> None:
        """Wait until all workers are in one group."""
        await until(lambda: whole_s(self.of(Regrouped, since), since, WORKERS), "the task is whole")
        await asyncio.sleep(1.0 + 4 * self.pace_s)  # iterations on which stalls are judged

    async def members(self) -> list[Member]:
        """Return the workers of the task that trains."""
        while True:
            with contextlib.suppress(UnicronError):
                found = [view.members for view in (await self.client.status()).tasks if len(view.members) == WORKERS]
                if found:
                    return found[0]
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
        self.suspected.append(self.of(NodeSuspected, at)[0].at - at)
        await self.bring_back(member.node)
        return took

    async def hang(self, member: Member) -> float:
        """Have a worker's script sleep in the middle of a microbatch."""
        asked, told = time.time(), self.folder / f"{member.worker}.hung"
        (self.folder / f"{member.worker}.hangs").touch()
        took = await self.detected(asked, lambda failure: failure.worker == member.worker)
        # its last sign of progress was one microbatch before
        return asked + took - (float(told.read_text()) - self.pace_s)

    async def slow_worker(self, member: Member) -> float:
        """Slow a worker down, and let it go again once it is named; return how many iterations that took."""
        began = self.iterations[-1].iteration
        await until(lambda: self.iterations[-1].iteration > began + USUAL, "iteration times are the usual ones")
        at, first = time.time(), self.iterations[-1].iteration
        await self.client.inject(member.node, "slow-worker", member.worker, str(SLOWER))
        [found, *_] = await until(lambda: self.of(SlowdownDetected, at), "it is named")
        self.named.append([each.worker for each in found.workers] == [member.worker])
        await self.client.inject(member.node, "slow-worker", member.worker, "1")
        await until(lambda: self.of(SlowdownEnded, at), "it is over")
        return float(found.iteration - first)

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

    async def remove(self, name: str) -> None:
        """Remove a task, and wait until that is done."""
        await self.client.remove(name)
        while any(view.spec.name == name for view in (await self.client.status()).tasks):
            await asyncio.sleep(0.2)

    async def train(self, name: str, pace_s: float) -> None:
        """Begin to train a task, and wait until it does."""
        self.pace_s = pace_s
        spec = TaskSpec(
            name=name,
            command=["python", str(self.folder / "script.py")],
            workdir=str(self.folder),
            min_workers=1,
            max_workers=WORKERS,
            microbatches=8,
            iterations=10**6,
            throughput={count: float(count) for count in range(1, WORKERS + 1)},
            env={"FOLDER": str(self.folder), "PACE": str(pace_s)},
        )
        began = time.time()
        await self.client.submit(spec)
        await self.whole(began)

    async def all(self, repeat: int) -> dict[str, list[float]]:
        """Let each fault strike so often; return the seconds."""
        faults: dict[str, Sequence[Fault]] = {
            "struck": (
                self.worker_killed,
                self.exception,
                self.xid_restart,
                self.silent_node,
                self.node_lost,
                self.xid,
            ),
            "slow": (self.slow_worker,),
            "hung": (self.hang, self.worker_stopped),
        }
        found: dict[str, list[float]] = {}
        for name, some in faults.items():
            for number in range(repeat):
                task = f"{name}-{number if name == 'hung' else 0}"  # one that has slept before may sleep for longer
                if number == 0 or name == "hung":
                    await self.train(task, PACES[name])
                for fault in some:
                    members = await self.members()
                    at, kind = time.time(), fault.__name__
                    found.setdefault(kind, []).append(await fault(members[number % len(members)]))
                    print(f"{kind}: {found[kind][-1]:.3f}", file=sys.stderr, flush=True)
                    if kind != "slow_worker":
                        await self.whole(at)
                if number == repeat - 1 or name == "hung":
                    await self.remove(task)
        return found


async def run(folder: Path, repeat: int) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Run everything in `folder`; return figures, and what they are of."""
    (folder / "script.py").write_text(SCRIPT)
    cluster = LoggedCluster(folder / "cluster", nodes=NODES, slots=SLOTS, port=free_port())
    os.environ |= {"UNICRON_ATTEMPTS": "100000"}  # on one node more fail than on any that is not to be given up
    await asyncio.to_thread(cluster.start)
    try:
        await cluster.wait_until_ready(120.0)
        async with connected(cluster.settings(), "detection") as bus:
            made = Run(cluster, bus, folder)
            jobs = [asyncio.create_task(made.read()), asyncio.create_task(made.listen())]
            try:
                return figures(await made.all(repeat), made)
            finally:
                for job in jobs:
                    job.cancel()
    finally:
        await asyncio.to_thread(cluster.stop)


class LoggedCluster(Cluster):
    """One whose nodes have a kernel's log each, beside its folder."""

    def _environment(self, name: str) -> dict[str, str]:
        log = {"UNICRON_KERNEL_LOG": str(self.root.parent / f"{name}.kern.log")} if name in self.nodes else {}
        return super()._environment(name) | log


def figures(found: dict[str, list[float]], made: Run) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Return median and 99th percentile of each fault, and what they are of."""
    iterations = found.pop("slow_worker")
    usual = 3 * PACES["hung"]
    beyond = {f"{kind}_beyond_3_microbatches": [each - usual for each in found[kind]] for kind in BEYOND}
    found |= {"node_suspected": made.suspected, **beyond}
    named: dict[str, float] = {}
    for fault, seconds in found.items():
        named[f"{fault}_p50_s"] = round(statistics.median(seconds), 3)
        named[f"{fault}_p99_s"] = round(p99(seconds), 3)
    named |= {"slow_worker_iterations_p50": statistics.median(iterations), "slow_worker_iterations": p99(iterations)}
    named["slow_worker_named"] = sum(made.named) / len(made.named)
    return named, {**found, "slow_worker_iterations": iterations}


def p99(values: list[float]) -> float:
    """Return the 99th percentile."""
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


def main() -> None:
    """Let the faults strike, and print how long each took to be detected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=20, help="strikes of each kind")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="unicron-detection-") as folder:
        told, found = asyncio.run(run(Path(folder), options.repeat))
    if options.json:
        print(as_json("detection", told, {"paper": PAPER}, {"seconds": found}))
    else:
        for name, value in told.items():
            print(f"{name:28} {value:8.3f}")


if __name__ == "__main__":
    main()
