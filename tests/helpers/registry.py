"""A service as a process of its own, the registry mostly, and what a test asks of it."""

import contextlib
import subprocess
import sys

from helpers.waiting import until
from unicron.contracts.tasks import TaskSpec
from unicron.service.bootstrap import connected_client

SPEC = TaskSpec(name="gpt", command=["train.py"], max_workers=2, microbatches=4, flops_per_iteration=3e9)


def registry(world, *flags):
    return process_of("registry", world, *flags)


@contextlib.contextmanager
def process_of(name, world, *flags):
    where = ["--nats-url", world.settings.nats_url, "--lease-ttl-s", str(world.settings.lease_ttl_s)]
    command = ["-m", f"unicron_{name}", *where]
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

    async def found():
        last = await ask()
        return [last] if holds(last) else []

    [answer] = await until(found)
    return answer


async def facts(client, kind):
    return [message async for _, message in client.follow(0, await client.tail()) if isinstance(message, kind)]
