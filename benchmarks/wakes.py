"""How long a rank needs to get out of the groups inside of its replica, when it is told to leave them.

    python -m benchmarks.wakes --json

Four ranks (tensor 2 x shard 2, gloo; or as many as told) run collectives of all kinds in a tight loop, and are
interrupted over and over at times that differ by up to 4 ms; each time they form the groups anew. Measured is from the
interruption until the call that a rank was in has returned, and how long it then takes until all ranks have groups
again. Also what a collective costs through the groups, beside torch's own group inside.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

from msgspec.structs import replace
from unicron_agent.fabric import Fabric
from unicron_agent.rendezvous import RendezvousServer

from benchmarks.output import as_json
from unicron.contracts.tasks import ParallelLayout
from unicron.contracts.worker import NOWHERE

LAYOUTS = {
    4: ParallelLayout(tensor=2, shard=2),
    8: ParallelLayout(tensor=4, shard=2),
    16: ParallelLayout(tensor=4, shard=4),
}
SLOW_S = 0.3
"""Longer than that, a wake counts as slow."""


class Rank:
    """One of the ranks."""

    def __init__(self, address: str, layout: ParallelLayout, place: int, epochs: int) -> None:
        import torch  # noqa: PLC0415 the parent needs none of it
        import torch.distributed as dist  # noqa: PLC0415

        from unicron.train.inner import InnerGroups  # noqa: PLC0415

        self.torch, self.dist = torch, dist
        self.address, self.place, self.epochs = address, place, epochs
        self.inner = InnerGroups(layout, place, torch.device("cpu"))
        self.interrupted = self.newest = 0.0
        self.waits: list[float] = []
        self.forms: list[float] = []

    def form(self, epoch: int) -> None:
        """Meet the other ranks."""
        from unicron.train.rendezvous import Rendezvous  # noqa: PLC0415

        where = replace(NOWHERE, rendezvous=self.address, rendezvous_id="wakes", epoch=epoch)
        self.inner.form(epoch, lambda: Rendezvous(where))

    def collectives(self, count: int) -> None:
        """Do a collective of the next kind."""
        torch, dist, mesh = self.torch, self.dist, self.inner.mesh
        size = (1, 1000, 300_000)[count % 3]
        tensor = torch.ones(size)
        group = (None, mesh["tensor"].get_group(), mesh["shard"].get_group())[count // 3 % 3]
        match count % 5:
            case 0 | 1:
                dist.all_reduce(tensor, group=group)
            case 2:
                dist.all_gather(
                    [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))], tensor, group=group
                )
            case 3:
                works = [dist.all_reduce(torch.ones(size), group=group, async_op=True) for _ in range(3)]
                for work in works:
                    work.wait()
            case 4:
                other = self.place ^ 1
                sent, got = dist.isend(tensor, other), dist.irecv(torch.empty_like(tensor), other)
                sent.wait()
                got.wait()

    def run(self) -> None:
        """Be interrupted `epochs` times."""
        jitter, gaps = random.Random(self.place), random.Random(5)
        self.form(0)
        told = self.inner.gather([time.time()])
        when = max(clock for (clock,) in told) + 0.2
        for epoch in range(1, self.epochs + 1):
            clocks = [clock for (clock,) in self.inner.gather([time.time()])]
            when = max(when, *clocks) + gaps.uniform(0.01, 0.04)
            threading.Thread(target=self.interrupt, args=(epoch, when + jitter.uniform(0, 0.004)), daemon=True).start()
            count = 0
            while self.inner.epoch >= 0:
                self.collectives(count)
                count += 1
            self.waits.append(time.time() - self.interrupted)
            while self.interrupted < when:  # another rank was interrupted first, which broke the groups here too
                time.sleep(0.0005)
            began = time.time()
            self.form(epoch)
            self.forms.append(time.time() - began)

    def interrupt(self, epoch: int, when: float) -> None:
        """Interrupt this rank at a time."""
        time.sleep(max(0.0, when - time.time()))
        self.interrupted = time.time()
        self.inner.interrupt(epoch)

    def cost_us(self, rounds: int = 300) -> dict[str, float]:
        """Return microseconds of a small all-reduce, through the groups and inside of them."""
        tensor = self.torch.ones(1000)
        inside = self.inner.world.inside
        found: dict[str, float] = {}
        calls: dict[str, Callable[[], object]] = {
            "wrapped_us": lambda: self.dist.all_reduce(tensor),
            "raw_us": lambda: inside.allreduce([tensor]).wait(),
        }
        for name, call in calls.items():
            times = []
            for _ in range(rounds):
                began = time.perf_counter()
                call()
                times.append(time.perf_counter() - began)
            found[name] = 1e6 * statistics.median(times)
        return found


async def measure(epochs: int, layout: ParallelLayout) -> dict[str, object]:
    """Run the ranks; return the figures."""
    server, address = await RendezvousServer(Fabric("", "here")).serve("127.0.0.1")
    ranks = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.wakes", "--rank", str(place), address, "--wakes", str(epochs),
            "--ranks", str(layout.replica_workers), stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for place in range(layout.replica_workers)
    ]  # fmt: skip
    try:
        found = [json.loads((await rank.communicate())[0]) for rank in ranks]
    finally:
        for rank in ranks:
            if rank.returncode is None:
                rank.kill()
        server.close()
    waits = sorted(wait for each in found for wait in each["waits"])
    return {
        "wakes": len(waits),
        "median_ms": round(1e3 * statistics.median(waits), 2),
        "p99_ms": round(1e3 * waits[int(0.99 * len(waits))], 1),
        "worst_ms": round(1e3 * waits[-1], 1),
        "form_median_ms": round(1e3 * statistics.median(form for each in found for form in each["forms"]), 1),
        "slow": sum(wait > SLOW_S for wait in waits),
        **{name: round(statistics.median(each[name] for each in found), 1) for name in ("wrapped_us", "raw_us")},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--wakes", type=int, default=250, help="of each rank")
    parser.add_argument("--ranks", type=int, default=4, choices=sorted(LAYOUTS))
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank:
        place, address = options.rank
        rank = Rank(address, LAYOUTS[options.ranks], int(place), options.wakes)
        rank.run()
        print(json.dumps({"waits": rank.waits, "forms": rank.forms, **rank.cost_us()}), flush=True)
        rank.inner.gather([0.0])
        os._exit(0)  # as forked workers do: an abandoned group has a thread that never ends
    shown = asyncio.run(measure(options.wakes, LAYOUTS[options.ranks]))
    text = "\n".join(f"{name:12} {value}" for name, value in shown.items())
    print(as_json("wakes", shown) if options.json else text)


if __name__ == "__main__":
    main()
