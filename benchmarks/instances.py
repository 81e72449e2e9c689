"""The gain and the cost of a second instance of each service.

The services of a real cluster are killed one after the other, some times each. With one instance (the baseline) it is
started again at once, as a container engine does that restarts what died; with two the other one takes the lease. The
figures are seconds for which nobody held the lease, and the memory and processor that the waiting instances take.
"""

import asyncio
import subprocess
import time
from pathlib import Path

from benchmarks.harness.cluster import Scene, running
from benchmarks.harness.command import Figures, Options, Result, main, option
from benchmarks.harness.processes import cpu_s, ended, start
from benchmarks.harness.stats import median, worst
from unicron.bus.lease import token_in_force
from unicron.bus.nats import NatsBus
from unicron.service.bootstrap import connected
from unicron.services import SERVICES

POLL_S = 0.02
SETTLE_S = 3.0  # from an instance's start until it waits for the lease, on a busy machine
LOST_S = 60.0


class Instances:
    """The instances of one service; the first of them is active."""

    def __init__(self, scene: Scene, bus: NatsBus, name: str) -> None:
        self._scene, self._lease, self.name = scene, bus.bucket("lease"), name
        self.all: list[subprocess.Popen[bytes]] = []
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start one more."""
        settings, log = self._scene.cluster.settings(self.name), self._scene.cluster.logs / f"{self.name}-more.log"
        environment = {"UNICRON_NATS_URL": settings.nats_url, "UNICRON_NATS_NKEY": settings.nats_nkey}
        self.running.append(start(["-m", f"unicron_{self.name}"], log, **environment))
        self.all.append(self.running[-1])

    async def until_held(self, before: int | None = None) -> None:
        """Wait until a term of the lease has begun after the one of that token."""
        async with asyncio.timeout(LOST_S):
            while await token_in_force(self._lease, self.name) in {before, None}:
                await asyncio.sleep(POLL_S)

    async def lose(self, *, again: bool) -> float:
        """Kill the active one, start one more at once or later; return the seconds until the lease was held again."""
        before = await token_in_force(self._lease, self.name)
        victim, began = self.running.pop(0), time.perf_counter()
        victim.kill()
        victim.wait()
        if again:
            self.start()
        await self.until_held(before)
        took = time.perf_counter() - began
        if not again:
            self.start()
            await asyncio.sleep(SETTLE_S)
        return took


def resident_mb(pid: int) -> float:
    """Return the memory that a process holds: its own and its part of what it shares."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:"))


async def waiting_costs(services: list[Instances], idle_s: float) -> Figures:
    """Return what the second instances use while they wait."""
    pids = [service.running[-1].pid for service in services]
    memory, busy = sum(map(resident_mb, pids)), sum(map(cpu_s, pids))
    await asyncio.sleep(idle_s)
    return {"more_memory_mb": round(memory), "more_cores": round((sum(map(cpu_s, pids)) - busy) / idle_s, 4)}


def gaps(found: dict[str, list[float]]) -> Figures:
    """Return how long nobody held a lease."""
    times = [each for name in found for each in found[name]]
    return {"without_lease_p50_s": median(times, 2), "without_lease_max_s": worst(times, 2)}


async def measure(options: Options, folder: Path) -> Result:
    """Kill each service, first one instance and then one of two."""
    async with running(folder / "cluster", 1) as scene, connected(scene.cluster.settings("registry"), "lease") as bus:
        services = [Instances(scene, bus, name) for name in options.services]
        try:
            for service in services:  # from here on they are ours to kill
                scene.cluster.kill(service.name)
                service.start()
            await asyncio.sleep(SETTLE_S)
            for service in services:
                await service.until_held()
            strikes = range(options.strikes)
            one = {each.name: [await each.lose(again=True) for _ in strikes] for each in services}
            for service in services:
                service.start()
            await asyncio.sleep(SETTLE_S)
            costs = await waiting_costs(services, options.idle_s)
            two = {each.name: [await each.lose(again=False) for _ in strikes] for each in services}
        finally:
            with ended([process for service in services for process in service.all]):
                pass
    return Result(gaps(two) | costs, {"one_instance": gaps(one)}, {"without_lease_s": {"one": one, "two": two}})


if __name__ == "__main__":
    main(
        measure,
        option("--strikes", default=5, help="how often each service is killed, in each way"),
        option("--services", nargs="+", choices=SERVICES, default=SERVICES, metavar="NAME", help="which"),
        option("--idle-s", default=20.0, help="seconds in which waiting instances are watched"),
    )
