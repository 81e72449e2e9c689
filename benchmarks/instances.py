"""What a second instance of each service brings, and what it costs: `python -m benchmarks.instances --json`.

The services of a real cluster on this machine are killed one after the other, some times each. With one instance it is
started again at once, as a container engine does that restarts what died; with two the other one takes the lease. Shown
is how long nobody held it, and what the waiting instances take of memory and processor.
"""

import argparse
import asyncio
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unicron_deploy.embedded import Cluster
from unicron_deploy.nats_server import free_port

from benchmarks.output import as_json
from unicron.bootstrap import connected
from unicron.bus.lease import token_in_force
from unicron.bus.nats import NatsBus
from unicron.services import SERVICES

Figures = dict[str, float]

POLL_S = 0.02
SETTLE_S = 3.0
"""From an instance's start until it waits for the lease, on a busy machine."""

LOST_S = 60.0


class Instances:
    """The instances of one service; the first of them is active."""

    def __init__(self, cluster: Cluster, bus: NatsBus, name: str) -> None:
        self._cluster, self._lease, self.name = cluster, bus.bucket("lease"), name
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start one more."""
        settings = self._cluster.settings(self.name)
        environment = {"UNICRON_NATS_URL": settings.nats_url, "UNICRON_NATS_NKEY": settings.nats_nkey}
        with (self._cluster.logs / f"{self.name}-more.log").open("ab") as log:
            command = [sys.executable, "-m", f"unicron_{self.name}"]
            self.running.append(subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | environment))

    async def lose(self, *, again: bool) -> float:
        """Kill the active one; return the seconds until another term of the lease began.

        Args:
            again: whether one more is started at once.
        """
        before = await token_in_force(self._lease, self.name)
        victim = self.running.pop(0)
        began = time.perf_counter()
        victim.kill()
        victim.wait()
        if again:
            self.start()
        async with asyncio.timeout(LOST_S):
            while await token_in_force(self._lease, self.name) in {before, None}:
                await asyncio.sleep(POLL_S)
        return time.perf_counter() - began

    def end(self) -> None:
        """Stop them all."""
        for process in self.running:
            process.send_signal(signal.SIGTERM)
        for process in self.running:
            process.wait()


def resident_mb(process: subprocess.Popen[bytes]) -> float:
    """Return the memory that a process holds: its own and its part of what it shares."""
    lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:"))


def busy_s(process: subprocess.Popen[bytes]) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(
    root: Path, names: Sequence[str], strikes: int, idle_s: float
) -> tuple[Figures, Figures, dict[str, Any]]:
    """Return the figures with two instances, those with one, and the times of each service."""
    cluster = Cluster(root, nodes=1, slots=1, port=free_port())
    cluster.start()
    services: list[Instances] = []
    try:
        await cluster.wait_until_ready()
        async with connected(cluster.settings("registry"), "benchmark") as bus:
            services = [Instances(cluster, bus, name) for name in names]
            for service in services:  # from here on they are ours to kill
                cluster.kill(service.name)
                service.start()
            await asyncio.sleep(SETTLE_S)
            await cluster_ready(services, bus)
            one = {each.name: [await each.lose(again=True) for _ in range(strikes)] for each in services}
            for service in services:
                service.start()
            await asyncio.sleep(SETTLE_S)
            waiting = [service.running[-1] for service in services]
            memory, busy = [resident_mb(process) for process in waiting], [busy_s(process) for process in waiting]
            await asyncio.sleep(idle_s)
            busy = [busy_s(process) - before for process, before in zip(waiting, busy, strict=True)]
            two: dict[str, list[float]] = {each.name: [] for each in services}
            for service in services:
                for _ in range(strikes):
                    two[service.name].append(await service.lose(again=False))
                    service.start()
                    await asyncio.sleep(SETTLE_S)
    finally:
        for service in services:
            service.end()
        cluster.stop()
    figures = told(two) | {"more_memory_mb": round(sum(memory)), "more_cores": round(sum(busy) / idle_s, 4)}
    rounded = {
        way: {name: [round(s, 2) for s in each] for name, each in found.items()}
        for way, found in (("one", one), ("two", two))
    }
    return figures, told(one), {"without_lease_s": rounded}


async def cluster_ready(services: list[Instances], bus: NatsBus) -> None:
    """Wait until each service is active."""
    async with asyncio.timeout(LOST_S):
        for service in services:
            while await token_in_force(bus.bucket("lease"), service.name) is None:
                await asyncio.sleep(POLL_S)


def told(found: dict[str, list[float]]) -> Figures:
    """Return how long nobody held a lease."""
    times = [each for name in found for each in found[name]]
    return {"without_lease_p50_s": round(statistics.median(times), 2), "without_lease_max_s": round(max(times), 2)}


def main() -> int:
    """Measure and print; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strikes", type=int, default=5, help="how often each service is killed, in each way")
    parser.add_argument("--services", nargs="+", choices=SERVICES, default=SERVICES, metavar="NAME", help="which")
    parser.add_argument("--idle-s", type=float, default=20.0, help="seconds in which waiting instances are watched")
    parser.add_argument("--json", action="store_true", help="ignored: this always prints JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures, one, details = asyncio.run(measure(Path(folder), options.services, options.strikes, options.idle_s))
    print(as_json("instances", figures, {"one_instance": one}, details))
    return 0


if __name__ == "__main__":
    sys.exit(main())
