"""How soon the console's page shows what happened, and what it costs.

    python -m benchmarks.console --json

A real NATS server, a real console and a real Chromium. The journal is that of `benchmarks.scale`: what the real
services said, on the bus in memory, while nodes of eight GPUs joined and tasks were started on all of them; it is
written into the server's stream. No other service runs, so nothing happens but what the benchmark says.

On 64 nodes:

- `event_to_page_p50_ms`, `_p99_ms`: from just before a `FailureDetected` is sent to the journal until the open page has
  an element of it in its DOM, by a MutationObserver. `unicron events --follow`, meanwhile, is the baseline: until its
  line of the same message is read.
- `first_paint_ms`: from asking for the page until the nodes' squares are on the screen, in a browser that has nothing
  of it yet; the median of `OPENINGS`.
- `pages_100_cpu_percent`: of a core, what the console uses while 100 websockets look at the cluster's page, ten nodes a
  second change and 40 iterations a second are done; `pages_0_cpu_percent` while nobody looks.

On 16,384 nodes:

- `journal_replay_messages_s`: messages a second that it reads after its start, from its first answer on.
- `memory_mb_16384`: of the console then, with one page open.
- `first_paint_16384_ms`, and `nodes_16384_update_p50_ms`, `_p99_ms`: from just before a node is drained until its
  square is on the screen in another colour. `nodes_16384_256_update_ms`: from the first of 256 nodes to the last.
- `nodes_16384_update_cpu_ms`: what an update takes of the console's CPU, one page open: all from the message to the
  frame sent, and a 1/`EVERY_S` of what it does anyway once a second.
- `metrics_series_16384`: series that a scrape of all processes has: counted of the registry of each service and of one
  agent, with eight workers and eight GPUs that tell all their counters, and scraped of the console.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import logging
import multiprocessing
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from msgspec import structs
from playwright.async_api import Browser, Page
from unicron_agent.measured import Measured

from benchmarks.agent_cpu import cpu_s
from benchmarks.console_world import OBSERVE, Journal, World, chromium, crowd, drawn, journal, opened
from benchmarks.output import as_json
from unicron import codec, subjects
from unicron.contracts.base import Message
from unicron.contracts.events import FailureDetected, IterationFinished, NodeDrained
from unicron.contracts.failures import DetectionMethod, FailureStatus, Severity
from unicron.contracts.hardware import Gpu, GpusSampled
from unicron.contracts.queries import Load, Status
from unicron.families import Sample
from unicron.metrics import Metrics, of_load, of_status
from unicron.services import SERVICES

SMALL, SMALL_TASKS = 64, 4
OPENINGS = 7
READERS = 100
DRAINS_S, ITERATIONS_S = 10.0, 40.0
MANY = 256
EVERY_S = 0.4
"""Mean time between two updates that are timed; each waits for some time between half of that and one and a half."""

SERIAL = itertools.count()


async def say(world: World, fact: Message, source: str) -> tuple[str, float]:
    """Put a fact into the journal; return its id, and the time just before."""
    name = f"bench-{next(SERIAL)}"
    now = time.time()
    fact = structs.replace(fact, id=name, correlation=name, at=now, source=source)
    await world.bus.append(subjects.of(fact), codec.encode(fact), name)
    return name, now


def failed(node: str, number: int) -> FailureDetected:
    """Return a failure of a process."""
    return FailureDetected(
        severity=Severity.SEV2,
        method=DetectionMethod.PROCESS_SUPERVISION,
        status=FailureStatus.EXITED_ABNORMALLY,
        node=node,
        slot=0,
        worker=f"task-0-{number}",
        task="task-0",
        reason="ended by signal 9",
    )


def percentiles(name: str, took_s: Sequence[float]) -> dict[str, float]:
    """Return the median and the 99th percentile in milliseconds."""
    cuts = statistics.quantiles(took_s, n=100, method="inclusive")
    return {f"{name}_p50_ms": round(1e3 * cuts[49], 1), f"{name}_p99_ms": round(1e3 * cuts[98], 1)}


async def pause(draw: random.Random) -> None:
    """Wait until the next update."""
    await asyncio.sleep(EVERY_S * (0.5 + draw.random()))


# --- 64 nodes --------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def followed(url: str) -> AsyncIterator[dict[str, float]]:
    """Yield when `unicron events --follow` has printed each failure of the benchmark."""
    command = [sys.executable, "-u", "-m", "unicron_cli", "events", "--follow", "--json", "--nats", url]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, limit=1 << 24)
    found: dict[str, float] = {}

    async def read() -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            now = time.time()
            for name in re.findall(r"bench-\d+", line.decode()):
                found.setdefault(name, now)

    reading = asyncio.create_task(read())
    try:
        yield found
    finally:
        process.terminate()
        await process.wait()
        await reading


async def until(condition: Any, what: str) -> None:
    """Wait until something is true."""
    deadline = time.monotonic() + 60.0
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"not within a minute: {what}")
        await asyncio.sleep(0.05)


async def reactions(world: World, page: Page, events: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return how soon failures are on the page, and how soon in a terminal."""
    draw = random.Random(1)
    await page.evaluate(OBSERVE)
    async with followed(world.server.url) as printed:
        first, _ = await say(world, failed("node-0", 0), "detector")
        await until(lambda: first in printed, "the first failure in the terminal")
        sent = {}
        for number in range(events):
            await pause(draw)
            name, at = await say(world, failed(f"node-{draw.randrange(SMALL)}", number), "detector")
            sent[name] = at
        await until(lambda: sent.keys() <= printed.keys(), "all failures in the terminal")
    seen = await page.evaluate("window.unicronSeen")
    if missing := sent.keys() - seen.keys():
        raise SystemExit(f"{len(missing)} of {events} failures never came to the page")
    took = percentiles("event_to_page", [seen[name] - at for name, at in sent.items()])
    return took, percentiles("event_to_cli", [printed[name] - at for name, at in sent.items()])


async def paints(browser: Browser, url: str) -> float:
    """Return milliseconds until the squares are on the screen."""
    found = []
    for _ in range(OPENINGS):
        page, first = await opened(browser, url)
        found.append(first)
        await page.context.close()
    return round(1e3 * statistics.median(found), 1)


async def busy(world: World, until_s: float) -> int:
    """Have nodes change and tasks get on; return how many messages that were."""
    said, drained = 0, itertools.cycle((True, False))

    async def drain() -> None:
        nonlocal said
        for number in itertools.count():
            await say(world, NodeDrained(node=f"node-{number // 2 % SMALL}", drain=next(drained)), "registry")
            said += 1
            await asyncio.sleep(1 / DRAINS_S)

    async def iterate() -> None:
        nonlocal said
        for number in itertools.count():
            done = IterationFinished(
                node="node-0", task=f"task-{number % SMALL_TASKS}", worker="w", slot=0, epoch=0,
                iteration=number, world_size=SMALL * 8 // SMALL_TASKS, seconds=0.1, loss=1.0,
            )  # fmt: skip
            done = structs.replace(done, at=time.time(), source="node-0")
            await world.bus.tell(subjects.of(done), codec.encode(done))
            said += 1
            await asyncio.sleep(1 / ITERATIONS_S)

    jobs = [asyncio.create_task(drain()), asyncio.create_task(iterate())]
    await asyncio.wait(jobs, timeout=until_s)
    for job in jobs:
        if job.done():
            await job
        job.cancel()
    return said


async def share(world: World, seconds: float) -> tuple[float, int]:
    """Return the percent of a core that the console uses, and how many messages there were."""
    before, began = cpu_s(world.pid), time.monotonic()
    said = await busy(world, seconds)
    return round(100 * (cpu_s(world.pid) - before) / (time.monotonic() - began), 1), said


async def crowded(world: World, seconds: float) -> tuple[dict[str, float], dict[str, Any]]:
    """Return what the console uses while nobody looks, and while many do."""
    alone, _ = await share(world, seconds)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    looking = context.Process(target=crowd, args=(theirs, world.url, READERS), daemon=True)
    looking.start()
    try:
        await asyncio.to_thread(ours.recv)
        together, said = await share(world, seconds)
        ours.send("enough")
        frames = await asyncio.to_thread(ours.recv)
    finally:
        looking.terminate()
    figures = {f"pages_{READERS}_cpu_percent": together, "pages_0_cpu_percent": alone}
    return figures, {"messages_per_s": said / seconds, "frames_per_s": statistics.mean(frames) / seconds}


async def small(folder: Path, options: argparse.Namespace, told: Journal) -> list[dict[str, Any]]:
    """Return the figures of a small cluster, the baseline, and details."""
    async with World.running(folder / "small") as world, chromium() as browser:
        await world.write(told.entries)
        world.start()
        await world.caught_up()
        found: dict[str, Any] = {"first_paint_ms": await paints(browser, world.url)}
        page, _ = await opened(browser, world.url)
        reacted, baseline = await reactions(world, page, options.events)
        await page.context.close()
        shares, details = await crowded(world, options.seconds)
    return [reacted | found | shares, baseline, details]


# --- 16,384 nodes ----------------------------------------------------------------------------------------------------


async def large(folder: Path, options: argparse.Namespace, told: Journal) -> tuple[dict[str, Any], int]:
    """Return the figures of a very large cluster, and the series of the console."""
    name, draw = str(options.nodes), random.Random(2)
    async with World.running(folder / "large") as world, chromium() as browser:
        await world.write(told.entries)
        print(f"{len(told.entries)} messages are in the journal", file=sys.stderr)
        world.start()
        answered, read = await world.caught_up()
        page, first = await opened(browser, world.url)
        await asyncio.sleep(3.0)
        before, took = cpu_s(world.pid), []
        for _ in range(options.updates):
            await pause(draw)
            _, at = await say(world, NodeDrained(node=f"node-{draw.randrange(options.nodes)}"), "registry")
            took.append((await drawn(page, at))[0] - at)
        spent = cpu_s(world.pid) - before
        await asyncio.sleep(1.0)
        few = min(MANY, options.nodes)
        every = [say(world, NodeDrained(node=f"node-{number}", drain=False), "registry") for number in range(few)]
        began = time.time()
        await asyncio.gather(*every)
        many = (await drawn(page, began, few))[0] - began
        figures = {
            "journal_replay_messages_s": round(len(told.entries) / (read - answered)),
            f"memory_mb_{name}": round(world.memory_mb, 1),
            f"first_paint_{name}_ms": round(1e3 * first, 1),
            **percentiles(f"nodes_{name}_update", took),
            f"nodes_{name}_{few}_update_ms": round(1e3 * many, 1),
            f"nodes_{name}_update_cpu_ms": round(1e3 * spent / options.updates, 1),
        }
        lines = (await world.get(world.metrics)).decode().splitlines()
    return figures, sum(not line.startswith("#") for line in lines)


def series(told: Journal, console: int, failures: int) -> dict[str, int]:
    """Return how many series each kind of process has, after so many failures, each of another node."""
    said = [codec.decode_message(entry.data) for entry in told.entries]
    nodes = len(told.status.nodes)
    said += [
        structs.replace(
            failed(f"node-{number}", number), id=f"f-{number}", correlation=f"f-{number}", source="detector"
        )
        for number in range(min(failures, nodes))
    ]
    found = {"console": console}
    for name in SERVICES:
        metrics = Metrics(name, partial(service, name, told.status))
        for message in said:
            metrics.hear(message, 0.0)
            if message.source == name:
                metrics.tell(message, message)
        found[name] = count(metrics)
    found["agents"] = nodes * count(agent().metrics)
    return found


def service(name: str, status: Status) -> list[Sample]:
    """Return what is read of a service whenever it is scraped."""
    load = of_load(name, Load(waiting=0, position=1, dropped=0))
    return [*load, *(of_status(status) if name == "registry" else ())]


def agent() -> Measured:
    """Return the metrics of an agent whose workers compute, and whose GPUs tell all that can be told."""
    workers = {number: SimpleNamespace(task="task-0", iteration=1) for number in range(8)}
    measured = Measured(
        cast(Any, SimpleNamespace(node="node-0", workers=workers)), cast(Any, SimpleNamespace(unpublished=0)), time.time
    )
    every = {field.name: 1 for field in structs.fields(Gpu)}
    gpus = [structs.replace(Gpu(**cast(Any, every)), slot=slot) for slot in range(8)]
    measured.observe(GpusSampled(node="node-0", gpus=gpus))
    return measured


def count(metrics: Metrics) -> int:
    """Return how many series a scrape has."""
    return sum(1 for family in metrics.registry.collect() for _ in family.samples)


# --- all -------------------------------------------------------------------------------------------------------------


def figures(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield figures, baselines and details."""
    found, baseline, details = asyncio.run(small(folder, options, journal(SMALL, SMALL_TASKS)))
    print("the small cluster is through", file=sys.stderr)
    told = journal(options.nodes, options.tasks)
    more, console = asyncio.run(large(folder, options, told))
    by_process = series(told, console, options.failures)
    yield found | more | {f"metrics_series_{options.nodes}": sum(by_process.values())}
    yield {"cli": baseline}
    kinds = Counter(entry.subject.split(".")[4] for entry in told.entries)
    yield details | {"series": by_process, "journal": dict(kinds.most_common()), "messages": len(told.entries)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--events", type=int, default=200, help="failures that are timed")
    parser.add_argument("--seconds", type=float, default=20.0, help="for which the console's CPU is measured")
    parser.add_argument("--nodes", type=int, default=16384, help="of the large cluster, of eight GPUs each")
    parser.add_argument("--tasks", type=int, default=64, help="of the large cluster")
    parser.add_argument("--updates", type=int, default=50, help="of single nodes that are timed there")
    parser.add_argument("--failures", type=int, default=1000, help="after which series are counted")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        shown, baselines, details = figures(options, Path(folder))
    text = "\n".join(f"{name:32} {value}" for name, value in shown.items())
    print(as_json("console", shown, baselines, details) if options.json else f"{text}\n{json.dumps(baselines)}")


if __name__ == "__main__":
    main()
