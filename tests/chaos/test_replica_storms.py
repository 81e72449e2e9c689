"""Models spread over several workers on a real cluster, in storms: what comes of it is what one process gets.

`STORMS=50 python -m pytest tests/chaos/test_replica_storms.py` plays as many; by default a few are.
"""

import asyncio
import contextlib
import os
import random
import textwrap

import pytest
import pytest_asyncio
from helpers.parallel import EXAMPLE, SMALL, differing, parameters, plain_parameters
from helpers.training import running_cluster, task
from msgspec.structs import replace
from unicron_chaos.storm import Storm, rage
from unicron_chaos.strikes import Strike

from unicron.contracts.tasks import NodeState, ParallelLayout, TaskState
from unicron.errors import BusUnavailableError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="module")]

STORMS = int(os.environ.get("STORMS", "1"))
CHANGING = {
    2: ParallelLayout(tensor=2),
    3: ParallelLayout(),
    4: ParallelLayout(pipeline=2),
    5: ParallelLayout(),
    6: ParallelLayout(shard=2),  # three would get unequal parts of a batch of four, whose mean is another
}
FIXED = [ParallelLayout(tensor=2), ParallelLayout(pipeline=2), ParallelLayout(shard=2), ParallelLayout()]
SERVICES = ["registry", "detector", "planner", "transition", "nats"]
ITERATIONS, MICROBATCHES = 60, 6  # who is struck while it saves what came of it has nothing to show
DOUBLE = f"""
    import sys, time
    import torch
    sys.path.insert(0, {str(EXAMPLE)!r})
    import train
    torch.set_default_dtype(torch.float64)  # the order of summation then makes no visible difference
    forward = train.Block.forward
    train.Block.forward = lambda self, x: (time.sleep(0.01), forward(self, x))[1]
    train.main()
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(tmp_path_factory):
    async with running_cluster(tmp_path_factory.mktemp("storms"), nodes=3, slots=2) as found:
        yield found


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("script") / "double.py"
    path.write_text(textwrap.dedent(DOUBLE))
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(script, tmp_path_factory):
    """The parameters after a run of one plain process."""
    return await plain_parameters(script, tmp_path_factory.mktemp("expected"), ITERATIONS, MICROBATCHES)


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
    async with asyncio.timeout(60.0):
        while True:
            with contextlib.suppress(BusUnavailableError):  # services may be on their way up
                nodes = (await scene.client.status()).nodes
                break
            await asyncio.sleep(0.2)
    for each in nodes:
        if each.state is NodeState.LOST:
            await asyncio.to_thread(scene.cluster.kill, each.node)
            await asyncio.to_thread(scene.cluster.start_process, each.node)
    await scene.cluster.wait_until_ready(60.0)


async def strike(scene, seed, told):
    async def restart(node):
        await asyncio.to_thread(scene.cluster.start_process, node)

    async for made in rage(scene.client, Storm(seed, nodes=True), 9.0, 1.5, restart):
        told.append(f"{made.fault} {made.target}" if isinstance(made, Strike) else f"not done: {made}")


@pytest.mark.parametrize("seed", range(STORMS))
async def test_a_storm_leaves_no_trace_in_the_parameters(expected, scene, script, tmp_path, seed):
    chance, told = random.Random(seed), []
    turn = seed % (len(FIXED) + 1)  # in the first one of each round the layout changes with the number of workers
    layout, layouts = (FIXED[turn - 1], {}) if turn else (ParallelLayout(), CHANGING)
    name, size = f"storm-{seed}", 2 if layouts else layout.replica_workers
    await mend(scene)
    spec = task(script, name, min_workers=size, max_workers=6, microbatches=MICROBATCHES, iterations=ITERATIONS)
    command = [*spec.command, *SMALL, "--out", str(tmp_path)]
    await scene.client.submit(replace(spec, command=command, layout=layout, layouts=layouts))
    over = asyncio.Event()
    services = asyncio.create_task(kill_services(scene.cluster, chance, told, over))
    try:
        await strike(scene, seed, told)
    finally:
        over.set()
        await services
    await mend(scene)
    view = await scene.until_state(name, TaskState.FINISHED, TaskState.FAILED, timeout_s=120.0)
    assert view.state is TaskState.FINISHED, (told, view.reason, view.traceback)
    assert differing(parameters(tmp_path), expected) == [], told
