"""How soon the console's page shows what happened, and what it costs.

A real NATS server, a real console and a real Chromium (`benchmarks.console_world`). The journal is what the real
services said in `benchmarks.scale` while nodes of eight GPUs joined and tasks were started on all of them. No other
service runs, so nothing happens but what the benchmark says.

On 64 nodes:

- `event_to_page_p50_ms`, `_p99_ms`: from just before a `FailureDetected` is sent to the journal until the open page has
  an element of it. The baseline is `unicron events --follow`, meanwhile: until its line of the same message is read.
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
"""

import asyncio
import contextlib
import itertools
import logging
import multiprocessing
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from msgspec import structs
from playwright.async_api import Browser, Page

from benchmarks.console_world import OBSERVE, World, chromium, crowd, drawn, journal, opened, running
from benchmarks.harness.cluster import background, until
from benchmarks.harness.command import Figures, Options, Result, main, option, say
from benchmarks.harness.processes import cpu_s, memory_mb
from benchmarks.harness.stats import median, percentiles
from unicron import codec, subjects
from unicron.bus.protocol import JournalEntry
from unicron.contracts.base import Message
from unicron.contracts.events import FailureDetected, IterationFinished, NodeDrained
from unicron.contracts.failures import DetectionMethod, FailureStatus, Severity

SMALL, SMALL_TASKS = 64, 4
OPENINGS = 7
READERS = 100
DRAINS_S, ITERATIONS_S = 10.0, 40.0
MANY = 256
EVERY_S = 0.4
"""Mean time between two updates that are timed; each waits for some time between half of that and one and a half."""

SERIAL = itertools.count()


async def append(world: World, fact: Message, source: str) -> tuple[str, float]:
    """Put a fact into the journal; return its id, and the time just before."""
    name, now = f"bench-{next(SERIAL)}", time.time()
    fact = structs.replace(fact, id=name, correlation=name, at=now, source=source)
    await world.bus.append(subjects.for_message(fact), codec.encode(fact), name)
    return name, now


def failed(node: str, number: int) -> FailureDetected:
    """Return a failure of a process."""
    how = {"severity": Severity.SEV2, "method": DetectionMethod.PROCESS_SUPERVISION}
    what = {"status": FailureStatus.EXITED_ABNORMALLY, "reason": "ended by signal 9"}
    where = {"node": node, "slot": 0, "worker": f"task-0-{number}", "task": "task-0"}
    return FailureDetected(**how, **what, **where)  # type: ignore[arg-type]


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

    async with background(read()):
        try:
            yield found
        finally:
            process.terminate()
            await process.wait()


async def reactions(world: World, page: Page, events: int) -> tuple[Figures, Figures]:
    """Return how soon failures are on the page, and how soon in a terminal."""
    draw, sent = random.Random(1), {}
    await page.evaluate(OBSERVE)
    async with followed(world.server.url) as printed:
        first, _ = await append(world, failed("node-0", 0), "detector")
        await until(lambda: first in printed, "the first failure in the terminal")
        for number in range(events):
            await pause(draw)
            name, at = await append(world, failed(f"node-{draw.randrange(SMALL)}", number), "detector")
            sent[name] = at
        await until(lambda: sent.keys() <= printed.keys(), "all failures in the terminal")
    seen = await page.evaluate("window.unicronSeen")
    if missing := sent.keys() - seen.keys():
        raise SystemExit(f"{len(missing)} of {events} failures never came to the page")
    took = percentiles("event_to_page", [seen[name] - at for name, at in sent.items()])
    return took, percentiles("event_to_cli", [printed[name] - at for name, at in sent.items()])


async def paints(browser: Browser, url: str) -> float | None:
    """Return milliseconds until the squares are on the screen."""
    found = []
    for _ in range(OPENINGS):
        page, first = await opened(browser, url)
        found.append(1e3 * first)
        await page.context.close()
    return median(found, 1)


async def busy(world: World, seconds: float) -> tuple[float, int]:
    """Have nodes change and tasks get on; return the percent of a core that the console uses, and how much was said."""
    appended = itertools.count()

    async def drain() -> None:
        for number in itertools.count():
            fact = NodeDrained(node=f"node-{number // 2 % SMALL}", drain=number % 2 == 0)
            await append(world, fact, "registry")
            next(appended)
            await asyncio.sleep(1 / DRAINS_S)

    async def iterate() -> None:
        place = {"node": "node-0", "source": "node-0", "worker": "w", "slot": 0, "epoch": 0}
        place |= {"world_size": SMALL * 8 // SMALL_TASKS, "seconds": 0.1, "loss": 1.0}
        for number in itertools.count():
            task = f"task-{number % SMALL_TASKS}"
            done = IterationFinished(task=task, iteration=number, at=time.time(), **place)  # type: ignore[arg-type]
            await world.bus.publish_telemetry(subjects.for_message(done), codec.encode(done))
            next(appended)
            await asyncio.sleep(1 / ITERATIONS_S)

    before, began = cpu_s(world.pid), time.monotonic()
    async with background(drain(), iterate()):
        await asyncio.sleep(seconds)
    return round(100 * (cpu_s(world.pid) - before) / (time.monotonic() - began), 1), next(appended)


async def crowded(world: World, seconds: float) -> tuple[Figures, Figures]:
    """Return what the console uses while nobody looks, and while many do."""
    alone, _ = await busy(world, seconds)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    looking = context.Process(target=crowd, args=(theirs, world.url, READERS), daemon=True)
    looking.start()
    try:
        await asyncio.to_thread(ours.recv)
        together, said = await busy(world, seconds)
        ours.send("enough")
        frames = await asyncio.to_thread(ours.recv)
    finally:
        looking.terminate()
    figures = {f"pages_{READERS}_cpu_percent": together, "pages_0_cpu_percent": alone}
    return figures, {"messages_per_s": said / seconds, "frames_per_s": statistics.mean(frames) / seconds}


async def small(folder: Path, options: Options, known: Sequence[JournalEntry]) -> Result:
    """Return the figures of a small cluster."""
    async with running(folder / "small", known) as world, chromium() as browser:
        first = {"first_paint_ms": await paints(browser, world.url)}
        page, _ = await opened(browser, world.url)
        reacted, baseline = await reactions(world, page, options.events)
        await page.context.close()
        shares, details = await crowded(world, options.seconds)
    return Result(reacted | first | shares, {"cli": baseline}, details)


# --- 16,384 nodes ----------------------------------------------------------------------------------------------------


async def large(folder: Path, options: Options, known: Sequence[JournalEntry]) -> Figures:
    """Return the figures of a very large cluster."""
    name, draw = str(options.nodes), random.Random(2)
    async with running(folder / "large", known) as world, chromium() as browser:
        page, first = await opened(browser, world.url)
        await asyncio.sleep(3.0)
        before, took = cpu_s(world.pid), []
        for _ in range(options.updates):
            await pause(draw)
            _, at = await append(world, NodeDrained(node=f"node-{draw.randrange(options.nodes)}"), "registry")
            took.append((await drawn(page, at))[0] - at)
        spent = cpu_s(world.pid) - before
        await asyncio.sleep(1.0)
        few, began = min(MANY, options.nodes), time.time()
        every = [NodeDrained(node=f"node-{number}", drain=False) for number in range(few)]
        await asyncio.gather(*(append(world, each, "registry") for each in every))
        many = (await drawn(page, began, few))[0] - began
        return {
            "journal_replay_messages_s": round(len(known) / world.replay_s),
            f"memory_mb_{name}": round(memory_mb(world.pid), 1),
            f"first_paint_{name}_ms": round(1e3 * first, 1),
            **percentiles(f"nodes_{name}_update", took),
            f"nodes_{name}_{few}_update_ms": round(1e3 * many, 1),
            f"nodes_{name}_update_cpu_ms": round(1e3 * spent / options.updates, 1),
        }


def measure(options: Options, folder: Path) -> Result:
    """Measure the small cluster, and the large one."""
    logging.disable(logging.CRITICAL)
    result = asyncio.run(small(folder, options, journal(SMALL, SMALL_TASKS)))
    say("the small cluster is through")
    result.figures |= asyncio.run(large(folder, options, journal(options.nodes, options.tasks)))
    return result


if __name__ == "__main__":
    main(
        measure,
        option("--events", default=200, help="failures that are timed"),
        option("--seconds", default=20.0, help="for which the console's CPU is measured"),
        option("--nodes", default=16384, help="of the large cluster, of eight GPUs each"),
        option("--tasks", default=64, help="of the large cluster"),
        option("--updates", default=50, help="of single nodes that are timed there"),
    )
