"""Takes the pictures of the console's pages: `python docs/console_screenshots.py` writes docs/console/*.webp.

A real cluster of this machine trains two tasks; a worker is killed, and then a node. Each page is taken light and dark,
and cluster and failure also as a phone shows them.
"""

import asyncio
import io
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from PIL import Image
from playwright.async_api import Browser, Page
from unicron_deploy.embedded import Cluster
from unicron_deploy.nats_server import free_port

from benchmarks.console_world import chromium
from unicron.client import Client
from unicron.contracts.base import Message
from unicron.contracts.events import FailureDetected, IterationFinished, TaskRecovered, WorkerReady
from unicron.contracts.failures import Severity
from unicron.contracts.tasks import TaskSpec
from unicron.service.bootstrap import connected_client

FOLDER = Path(__file__).with_name("console")
NODES, SLOTS = 6, 2
TASKS = {"gpt": 6, "llama": 4}
"""Most workers of each."""

SETTLED = 25
"""Iterations before something is struck, and after that."""

MOST_BYTES = 150_000
MOST_PX = 1400
"""Height from which on a page is cut off."""

SCRIPT = """
import time, torch
from unicron.train import Session

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
session = Session(seed=1, iterations=10**6, microbatches=12)
session.protect(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=3e-3))
for iteration in session.iterations():
    for microbatch in session.microbatches():
        time.sleep(0.08)
        x = torch.randn(32, 16)
        session.backward((model(x) - x.sin().sum(1, keepdim=True)).square().mean())
    session.step()
    print(f"iteration {iteration} loss {session.loss:.4f}", flush=True)
"""


class Look(NamedTuple):
    """How a page is looked at."""

    name: str
    width: int
    height: int
    dark: bool = False
    scale: float = 1.0


DESKTOP = (Look("light", 1280, 900), Look("dark", 1280, 900, dark=True))
PHONE = Look("phone", 390, 844, scale=1.5)


class Scene:
    """A cluster that trains, and what was said in it."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.said: list[Message] = []
        self.done = dict.fromkeys(TASKS, -1)

    async def follow(self) -> None:
        """Read the journal."""
        async for _, message in self.client.follow():
            self.said.append(message)

    async def listen(self) -> None:
        """Hear of iterations."""
        async for message in self.client.telemetry(IterationFinished):
            if isinstance(message, IterationFinished):
                self.done[message.task] = message.iteration

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something is true."""
        async with asyncio.timeout(120.0):
            while not condition():
                await asyncio.sleep(0.1)

    async def train(self) -> None:
        """Let all tasks get on for a while."""
        wanted = {name: done + SETTLED for name, done in self.done.items()}
        await self.until(lambda: all(self.done[name] >= most for name, most in wanted.items()))

    async def struck(self, strike: Callable[[], None]) -> str:
        """Let something strike; return the chain of it once all is healed."""
        began = time.time()
        strike()

        def healed() -> bool:
            return any(isinstance(each, TaskRecovered) and each.at > began for each in self.said)

        await self.until(healed)
        found = [each for each in self.said if isinstance(each, FailureDetected) and each.at > began]
        return min(found, key=lambda each: (each.severity is not Severity.SEV1, each.at)).correlation


async def submit(client: Client, folder: Path) -> None:
    """Start the tasks; what their model is said to need is made up."""
    script = folder / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    for weight, (name, most) in zip((1.5, 1.0), TASKS.items(), strict=True):
        spec = TaskSpec(
            name=name,
            command=["python", str(script)],
            workdir=str(folder),
            weight=weight,
            max_workers=most,
            microbatches=12,
            iterations=10**6,
            flops_per_iteration=6e14,
            throughput={size: 6e14 * size**0.9 for size in range(1, most + 1)},
        )
        await client.submit(spec)


async def play(scene: Scene, cluster: Cluster, folder: Path) -> str:
    """Train, kill a worker and a node; return the chain of the node's failure."""
    await submit(scene.client, folder)
    await scene.train()
    for name in TASKS:
        await scene.client.record(name, 1.0)
    ready = next(each for each in scene.said if isinstance(each, WorkerReady) and each.task == "gpt")
    await scene.struck(lambda: os.kill(ready.pid, signal.SIGKILL))
    await scene.train()
    chain = await scene.struck(lambda: cluster.kill_node("node-2"))
    await scene.train()
    return chain


async def take(page: Page, path: Path, look: Look) -> None:
    """Write a picture of the page."""
    whole = await page.evaluate("document.documentElement.scrollHeight")
    size = {"x": 0, "y": 0, "width": look.width, "height": max(look.height, min(whole, MOST_PX))}
    data = await page.screenshot(full_page=True, clip=size, animations="disabled")  # type: ignore[arg-type]
    Image.open(io.BytesIO(data)).convert("RGB").save(path, lossless=True, quality=100, method=6)


async def pictures(browser: Browser, url: str, chain: str) -> None:
    """Write all pictures."""
    pages = {
        "cluster": "/",
        "task": "/tasks/gpt",
        "failures": "/failures",
        "failure": f"/failures/{chain}",
        "node": "/nodes/node-1",
        "plan": "/plan",
        "stragglers": "/stragglers/gpt",
        "goodput": "/goodput",
    }
    FOLDER.mkdir(exist_ok=True)
    for look in (*DESKTOP, PHONE):
        context = await browser.new_context(
            viewport={"width": look.width, "height": look.height},
            color_scheme="dark" if look.dark else "light",
            device_scale_factor=look.scale,
        )
        page = await context.new_page()
        for name, path in pages.items():
            if look is PHONE and name not in {"cluster", "failure"}:
                continue
            await page.goto(url + path)
            await page.locator("body[data-live=live]").wait_for()
            await asyncio.sleep(1.5)  # so that what is asked for besides is there too
            await take(page, FOLDER / f"{name}-{look.name}.webp", look)
        await context.close()


async def run(folder: Path) -> None:
    """Have a cluster that trains and heals, and take the pictures."""
    cluster = Cluster(folder / "cluster", nodes=NODES, slots=SLOTS, port=free_port(), console=free_port())
    await asyncio.to_thread(cluster.start)
    try:
        await cluster.wait_until_ready(120.0)
        async with connected_client(cluster.settings(), "pictures") as client:
            scene = Scene(client)
            jobs = [asyncio.create_task(scene.follow()), asyncio.create_task(scene.listen())]
            chain = await play(scene, cluster, folder)
            async with chromium() as browser:
                await pictures(browser, cluster.console_url, chain)
            for job in jobs:
                job.cancel()
    finally:
        await asyncio.to_thread(cluster.stop)


def main() -> None:
    """Write the pictures."""
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(Path(folder)))
    if large := [path.name for path in FOLDER.glob("*.webp") if path.stat().st_size > MOST_BYTES]:
        raise SystemExit(f"more than {MOST_BYTES} bytes: {', '.join(large)}; cut pages off earlier")


if __name__ == "__main__":
    main()
