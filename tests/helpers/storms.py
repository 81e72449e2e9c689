"""Storms on a real cluster whose services are killed meanwhile, in tests."""

import asyncio
import contextlib

from unicron_chaos.injection import Injection
from unicron_chaos.storm import Storm, rage

from helpers.waiting import insist
from unicron.contracts.tasks import NodeState

SERVICES = ["registry", "detector", "planner", "transition", "nats"]


@contextlib.asynccontextmanager
async def services_killed(cluster, chance, told):
    """Kill a service, or the bus, now and then meanwhile."""
    over = asyncio.Event()
    services = asyncio.create_task(kill_services(cluster, chance, told, over))
    try:
        yield
    finally:
        over.set()
        await services


async def kill_services(cluster, chance, told, over):
    """Kill a service, or the bus, now and then until it is `over`, and start each again."""
    while not over.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), chance.uniform(2.0, 5.0))
        name = chance.choice(SERVICES)
        told.append(f"kill {name}")
        await asyncio.to_thread(cluster.kill, name)
        await asyncio.sleep(chance.uniform(0.0, 1.0))
        await asyncio.to_thread(cluster.start_process, name)


async def mend(scene):
    """Do what an operator does with nodes that were given up because their workers failed again and again."""
    nodes = (await insist(scene.client.status)).nodes  # services may be on their way up
    for each in nodes:
        if each.state is NodeState.LOST:
            await asyncio.to_thread(scene.cluster.kill, each.node)
            await asyncio.to_thread(scene.cluster.start_process, each.node)
    await scene.cluster.wait_until_ready(60.0)


async def strike(scene, seed, told):
    async def restart(node):
        await asyncio.to_thread(scene.cluster.start_process, node)

    async for made in rage(scene.client, Storm(seed, nodes=True), 9.0, 1.5, restart):
        told.append(f"{made.fault} {made.target}" if isinstance(made, Injection) else f"not done: {made}")
