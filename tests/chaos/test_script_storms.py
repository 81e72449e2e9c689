"""Scripts without a session that are healed in place, in storms: what comes of them is what comes of a calm run.

`STORMS=30 python -m pytest tests/chaos/test_script_storms.py` plays as many; by default five are.
"""

import asyncio
import os
import random

import pytest
from helpers.scripts import ACCELERATED, GATHERS, LIGHTNING, SPREAD, TRAINER, disturbed
from helpers.storms import SERVICES, mend
from helpers.training import running_cluster, shared
from unicron_chaos.storm import Storm
from unicron_chaos.strikes import strike

from unicron.errors import UnicronError

pytestmark = [
    pytest.mark.real,
    pytest.mark.exhaustive("storms in virtual time strike denser, and each way of striking is shown on real processes"),
    pytest.mark.asyncio(loop_scope="module"),
]

STORMS = int(os.environ.get("STORMS", "5"))
SCRIPTS = [GATHERS, TRAINER, ACCELERATED, LIGHTNING, SPREAD]
RANKS, STRIKES = 3, 6

scene = shared(running_cluster, nodes=4, slots=1)  # Lightning wants as many ranks on each node


@pytest.mark.parametrize("seed", range(STORMS))
async def test_a_storm_leaves_no_trace_in_what_a_script_has_trained(scene, seed):
    chance, storm, told, struck = random.Random(seed), Storm(seed, nodes=True), [], []

    async def restart(node):
        await asyncio.to_thread(scene.cluster.start_process, node)

    await mend(scene)
    async with disturbed(scene, SCRIPTS[seed % len(SCRIPTS)], (0,), ranks=RANKS) as run:
        for number in range(STRIKES):
            run.gate.close_after(chance.randrange(RANKS, 12))
            await run.gate.held()
            if number % 3 == 2:  # a service, or the bus
                told.append(chance.choice(SERVICES))
                print(told[-1])  # noqa: T201 whoever plays many wants to know
                await asyncio.to_thread(scene.cluster.kill, told[-1])
                await restart(told[-1])
                continue
            await scene.view(run.name)  # services may be on their way up
            try:
                status = await scene.client.status()
                if (choice := storm.choose(status)) is not None:
                    print(choice)  # noqa: T201
                    await strike(scene.client, choice.fault, choice.target, restart)
                    storm.struck(choice, status)
                    struck.append(choice)
            except UnicronError as error:
                print(error)  # noqa: T201 whom it was for is gone
        run.gate.open()
        for node in storm.down:
            await restart(node)
        await mend(scene)
        await scene.ends(run.name)
    assert struck
    assert run.failures, "no strike hit it"
    print(told, "began", run.begun)  # noqa: T201 whoever plays many wants to know
