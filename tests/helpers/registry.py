"""The registry as a process of its own, and what a test asks of it."""

import asyncio
import contextlib
import subprocess
import sys
import time

import pytest

from unicron.bootstrap import connected_client
from unicron.contracts.tasks import TaskSpec
from unicron.errors import BusUnavailableError

WAIT_S = 30.0
SPEC = TaskSpec(name="gpt", command=["train.py"], max_workers=2, microbatches=4, flops_per_iteration=3e9)


@contextlib.contextmanager
def registry(world, *flags):
    where = ["--nats-url", world.settings.nats_url, "--lease-ttl-s", str(world.settings.lease_ttl_s)]
    command = ["-m", "unicron_registry", *where]
    process = subprocess.Popen([sys.executable, *command, *flags], stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        sys.stdout.write(process.communicate()[1])  # pytest shows it where the test fails


@contextlib.asynccontextmanager
async def connected(world):
    async with connected_client(world.settings, "test") as client:
        yield client


async def eventually(ask, holds):
    """Return what `ask` answers as soon as `holds` is true of it."""
    last = None
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(BusUnavailableError):
            last = await ask()
            if holds(last):
                return last
        await asyncio.sleep(0.05)
    pytest.fail(f"not within {WAIT_S:g} s; last seen: {last}")


async def facts(client, kind):
    return [message async for _, message in client.follow(0, await client.tail()) if isinstance(message, kind)]
