"""The scene of `benchmarks.console`: a console on a real NATS server with a journal, a browser, and many readers."""

import asyncio
import contextlib
import json
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import websockets
from playwright.async_api import Browser, Page, async_playwright
from unicron_deploy.nats_server import NatsServer, free_port

from benchmarks import scale
from benchmarks.harness.cluster import server_only, service
from unicron.bus.nats import NatsBus
from unicron.bus.protocol import JournalEntry

HOST = "127.0.0.1"
START_S = 600.0
BATCH = 500  # messages that are sent to the journal before it must have acknowledged the last of them
AGO_S = 3600.0  # how long ago the journal begins
OBSERVE = """() => {
    window.unicronSeen = {};
    const look = (node) => {
        const chain = node.dataset?.failure;
        if (chain) window.unicronSeen[chain] ??= Date.now() / 1000;
        node.querySelectorAll?.("[data-failure]").forEach(look);
    };
    new MutationObserver((found) => found.forEach((each) => {
        look(each.target);
        each.addedNodes.forEach(look);
    })).observe(document.body, {childList: true, subtree: true, attributes: true, attributeFilter: ["data-failure"]});
}"""
"""Notes when the first element of each failure is there."""

PAINTS = """
    const clear = CanvasRenderingContext2D.prototype.clearRect;
    window.unicronDrawn = [];
    let planned = null;
    CanvasRenderingContext2D.prototype.clearRect = function (...where) {
        clear.apply(this, where);
        if (planned) return planned.squares++;
        planned = {squares: 1};
        const mine = planned;
        requestAnimationFrame(() => setTimeout(() => {
            planned = null;
            window.unicronDrawn.push([Date.now() / 1000, performance.now() / 1000, mine.squares]);
        }));
    };
    window.unicronWhen = (since, wanted) => new Promise((tell) => {
        const look = () => {
            const found = window.unicronDrawn.filter(([at]) => at >= since);
            if (found.reduce((sum, [, , squares]) => sum + squares, 0) >= wanted) tell(found.at(-1));
            else setTimeout(look, 5);
        };
        look();
    });
"""
"""Notes when squares that were drawn are on the screen, by the wall and since the page was asked for, and how many."""


def journal(nodes: int, tasks: int) -> Sequence[JournalEntry]:
    """Return what real services and simulated agents say while a cluster is filled, as if just now."""
    stage = scale.Stage(nodes, tasks, time.time() - AGO_S)

    async def fill() -> None:
        async with stage.running():
            await scale.fill(stage)

    stage.clock.run(fill())
    return stage.memory.journal


@dataclass
class World:
    """A NATS server with a journal, and a console that has read it; nobody else."""

    server: NatsServer
    bus: NatsBus
    url: str  # of the console
    pid: int  # of the console
    replay_s: float = 0.0  # from the console's first answer until it had read the journal

    async def catch_up(self) -> None:
        """Wait until the console has read all of the journal."""
        tail, answered, deadline = await self.bus.tail(), 0.0, time.monotonic() + START_S
        while time.monotonic() < deadline:
            with contextlib.suppress(urllib.error.URLError, TimeoutError):
                page = json.loads(await asyncio.to_thread(_read, f"{self.url}/api/cluster"))
                answered = answered or time.time()
                if page["position"] >= tail and not page["behind"]:
                    self.replay_s = time.time() - answered
                    return
            await asyncio.sleep(0.02 if not answered else 0.2)
        raise SystemExit(f"the console has not read its journal within {START_S:g} s")


@contextlib.asynccontextmanager
async def running(folder: Path, entries: Sequence[JournalEntry]) -> AsyncIterator[World]:
    """Have a console that has read these entries."""
    folder.mkdir()
    async with server_only(folder) as (server, bus):
        await write(bus, entries)
        port = free_port()
        with service("console", server.url, UNICRON_CONSOLE_PORT=str(port)) as process:
            world = World(server, bus, f"http://{HOST}:{port}", process.pid)
            await world.catch_up()
            yield world


async def write(bus: NatsBus, entries: Sequence[JournalEntry]) -> None:
    """Put entries into the journal."""
    for number, entry in enumerate(entries, 1):
        if number % BATCH and number < len(entries):  # to wait for each of them would take minutes
            await bus.client.publish(entry.subject, entry.data)
        else:
            await bus.jetstream.publish(entry.subject, entry.data, timeout=60.0)
    if (tail := await bus.tail()) != len(entries):
        raise SystemExit(f"{tail} of {len(entries)} messages are in the journal")


def _read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=30.0) as answer:
        return bytes(answer.read())


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """Start the browser of this machine."""
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        raise SystemExit("no chromium, chromium-browser or google-chrome in PATH")
    async with async_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        browser = await playwright.chromium.launch(executable_path=path, args=flags)
        yield browser
        await browser.close()


async def opened(browser: Browser, url: str) -> tuple[Page, float]:
    """Open the cluster's page in a fresh browser; return it, and the seconds until its squares were on the screen."""
    context = await browser.new_context()
    page = await context.new_page()
    await page.add_init_script(PAINTS)
    await page.goto(url)
    return page, (await drawn(page))[1]


async def drawn(page: Page, since: float = 0.0, squares: int = 1) -> tuple[float, float]:
    """Wait for so many squares since then; return when the last was there, in Unix seconds and since the request."""
    async with asyncio.timeout(120.0):
        at, after, _ = await page.evaluate(f"window.unicronWhen({since!r}, {squares})")
    return at, after


def crowd(pipe: "Connection[Any, Any]", url: str, readers: int) -> None:
    """Open so many websockets of the cluster's page; when something comes from the pipe, send what frames each got."""

    async def look(frames: list[int], number: int) -> None:
        async with websockets.connect(f"{url.replace('http', 'ws', 1)}/api/live/cluster", max_size=None) as socket:
            async for _ in socket:
                frames[number] += 1

    async def look_all() -> list[int]:
        frames = [0] * readers
        jobs = [asyncio.create_task(look(frames, number)) for number in range(readers)]
        while not all(frames):
            await asyncio.sleep(0.05)
            if ended := [job for job in jobs if job.done()]:
                await ended[0]
        pipe.send("all look")
        began = list(frames)
        await asyncio.to_thread(pipe.recv)
        for job in jobs:
            job.cancel()
        return [after - before for after, before in zip(frames, began, strict=True)]

    pipe.send(asyncio.run(look_all()))
