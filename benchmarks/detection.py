"""How long it takes from a fault to the fact that it was detected, for each kind of fault.

On a real cluster, four nodes of two slots, tasks of eight workers train, one after the other; faults strike, each when
the task is whole again. For each there are the median and the 99th percentile of the seconds from just before the fault
to the `FailureDetected` of it, by the clock of this machine:

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

import asyncio
import os
import signal
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from benchmarks.harness.cluster import TRAINED, Scene, running, shrinking, task, until
from benchmarks.harness.command import Figures, Options, Result, main, option, say
from benchmarks.harness.stats import percentiles, quantile
from unicron.contracts.events import FailureDetected, NodeSuspected
from unicron.contracts.failures import DetectionMethod
from unicron.contracts.slowdowns import SlowdownDetected, SlowdownEnded
from unicron.contracts.tasks import Member

NODES, SLOTS = 4, 2
WORKERS = NODES * SLOTS

PACES = {"struck": 0.05, "slow": 0.2, "hung": 0.7}  # tasks, and the seconds of their microbatches
SLOWER = 1.5
USUAL = 25  # iterations after which a task has usual times
PAPER = {"worker_killed_s": 1.8, "exception_s": 0.3, "node_lost_s": 5.6, "xid_s": 0.3}

Fault = Callable[[Member], Awaitable[float]]


class Faults:
    """The faults, and the task that they strike."""

    def __init__(self, scene: Scene, folder: Path) -> None:
        self.scene, self.client, self.cluster, self.folder = scene, scene.client, scene.cluster, folder
        self.task, self.pace_s = "", 0.0
        self.suspected: list[float] = []
        self.named: list[bool] = []

    async def whole(self, since: float) -> None:
        """Wait until all workers are in one group, and have done iterations on which stalls are judged."""
        await self.scene.whole(self.task, since, WORKERS)
        await asyncio.sleep(1.0 + 4 * self.pace_s)

    async def members(self) -> list[Member]:
        """Return the workers of the task, once it has all."""
        while len(found := (await self.scene.view(self.task)).members) < WORKERS:
            await asyncio.sleep(0.1)
        return list(found)

    async def detected(self, since: float, matches: Callable[[FailureDetected], bool]) -> float:
        """Return the seconds from `since` to the failure that matches."""
        found = await until(lambda: [f for f in self.scene.said(FailureDetected, "", since) if matches(f)], "detected")
        return float(found[0].at - since)

    async def signalled(self, member: Member, number: signal.Signals) -> float:
        """Send a worker a signal."""
        pid, at = await self.scene.pid(member.worker), time.time()
        os.kill(pid, number)
        return await self.detected(at, lambda failure: failure.worker == member.worker)

    async def worker_killed(self, member: Member) -> float:
        """Kill a worker."""
        return await self.signalled(member, signal.SIGKILL)

    async def worker_stopped(self, member: Member) -> float:
        """Stop a worker."""
        return await self.signalled(member, signal.SIGSTOP)

    async def ordered(self, member: Member, order: str, done: str) -> float:
        """Have a worker's script do something; return the seconds from when it did."""
        asked = time.time()
        (self.folder / f"{member.worker}.{order}").touch()
        took = await self.detected(asked, lambda failure: failure.worker == member.worker)
        return asked + took - float((self.folder / f"{member.worker}.{done}").read_text())

    async def exception(self, member: Member) -> float:
        """Have a worker raise."""
        return await self.ordered(member, "raises", "raised")

    async def hang(self, member: Member) -> float:
        """Have a worker's script sleep; its last sign of progress was one microbatch before."""
        return await self.ordered(member, "hangs", "hung") + self.pace_s

    async def node_lost(self, member: Member) -> float:
        """Kill an agent and its workers, and bring it back once that is known."""
        pids = [await self.scene.pid(each.worker) for each in await self.members() if each.node == member.node]
        at = time.time()
        for pid in (self.cluster.processes[member.node].pid, *pids):
            os.kill(pid, signal.SIGKILL)
        took = await self.detected(at, lambda failure: failure.node == member.node and failure.severity == 1)
        self.suspected.append(self.scene.said(NodeSuspected, "", at)[0].at - at)
        await self.bring_back(member.node)
        return took

    async def slow_worker(self, member: Member) -> float:
        """Slow a worker down, and let it go again once it is named; return how many iterations that took."""
        done = self.scene.iterations
        began = done[-1].iteration
        await until(lambda: done[-1].iteration > began + USUAL, "iteration times are the usual ones")
        at, first = time.time(), done[-1].iteration
        await self.client.inject(member.node, "slow-worker", member.worker, str(SLOWER))
        [found, *_] = await until(lambda: self.scene.said(SlowdownDetected, "", at), "it is named")
        self.named.append([each.worker for each in found.workers] == [member.worker])
        await self.client.inject(member.node, "slow-worker", member.worker, "1")
        await until(lambda: self.scene.said(SlowdownEnded, "", at), "it is over")
        return float(found.iteration - first)

    async def silent_node(self, member: Member) -> float:
        """Stop an agent, and let it go on once that is known."""
        at, agent = time.time(), self.cluster.processes[member.node]
        agent.signal(signal.SIGSTOP)
        lost = (member.node, DetectionMethod.NODE_HEALTH)
        took = await self.detected(at, lambda failure: (failure.node, failure.method) == lost)
        agent.signal(signal.SIGCONT)
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
        at = self.log(member.node, f"31, pid={await self.scene.pid(member.worker)}, name=python, MMU Fault")
        return await self.detected(at, lambda failure: failure.worker == member.worker)

    def log(self, node: str, text: str) -> float:
        """Write a line into the log of a node's kernel; return the time before."""
        at = time.time()
        with (self.cluster.logs / f"{node}.kernel.log").open("a") as file:
            file.write(f"NVRM: Xid (PCI:0000:3b:00): {text}\n")
        return at

    async def bring_back(self, node: str) -> None:
        """Start an agent again."""
        await until(lambda: node not in self.cluster.alive(), f"{node} ends")
        await asyncio.to_thread(self.cluster.start_process, node)

    async def train(self, name: str, pace_s: float) -> None:
        """Begin to train a task, and wait until it does."""
        self.task, self.pace_s, began = name, pace_s, time.time()
        env = {"ORDERS": str(self.folder), "PACE": str(pace_s)}
        await self.client.submit(task(name, TRAINED, WORKERS, microbatches=8, env=env, **shrinking(WORKERS)))
        await self.whole(began)

    async def all(self, repeat: int) -> dict[str, list[float]]:
        """Let each fault strike so often; return the seconds."""
        struck = (self.worker_killed, self.exception, self.xid_restart, self.silent_node, self.node_lost, self.xid)
        faults: dict[str, Sequence[Fault]] = {"struck": struck, "slow": (self.slow_worker,)}
        faults["hung"] = (self.hang, self.worker_stopped)
        found: dict[str, list[float]] = {}
        for name, some in faults.items():
            for number in range(repeat):
                anew = name == "hung"  # one that has slept before may sleep for longer
                if number == 0 or anew:
                    await self.train(f"{name}-{number}", PACES[name])
                for fault in some:
                    members = await self.members()
                    at, kind = time.time(), fault.__name__
                    found.setdefault(kind, []).append(await fault(members[number % WORKERS]))
                    say(f"{kind}: {found[kind][-1]:.3f}")
                    if kind != "slow_worker":
                        await self.whole(at)
                if number == repeat - 1 or anew:
                    await self.client.remove(self.task)
                    await self.scene.until_ended(self.task)
        return found


def figures(found: dict[str, list[float]], faults: Faults) -> Figures:
    """Return median and 99th percentile of each fault."""
    iterations, usual = found["slow_worker"], 3 * PACES["hung"]
    times = {kind: seconds for kind, seconds in found.items() if kind != "slow_worker"}
    beyond = ("hang", "worker_stopped")
    times |= {f"{kind}_beyond_3_microbatches": [each - usual for each in found[kind]] for kind in beyond}
    named: Figures = {}
    for fault, seconds in (times | {"node_suspected": faults.suspected}).items():
        named |= percentiles(fault, seconds, "s")
    return named | {
        "slow_worker_iterations_p50": statistics.median(iterations),
        "slow_worker_iterations": quantile(iterations, 0.99),
        "slow_worker_named": sum(faults.named) / len(faults.named),
    }


async def measure(options: Options, folder: Path) -> Result:
    """Let all faults strike."""
    os.environ |= {"UNICRON_ATTEMPTS": "100000"}  # on one node more fail than on any that is not to be given up
    async with running(folder / "cluster", NODES, SLOTS) as scene:
        faults = Faults(scene, folder)
        found = await faults.all(options.repeat)
    return Result(figures(found, faults), {"paper": PAPER}, {"seconds": found})


if __name__ == "__main__":
    main(measure, option("--repeat", default=20, help="strikes of each kind"))
