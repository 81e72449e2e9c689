"""Scripts without a session that are healed in place, in storms: what comes of them is what comes of a calm run.

`STORMS=30 python -m pytest tests/chaos/test_script_storms.py` plays as many; by default five are.
"""

import os
import random

import pytest
import pytest_asyncio
from helpers.scripts import ACCELERATED, GATHERS, LIGHTNING, SPREAD, TRAINER, begun, program, same
from helpers.storms import mend, services_killed, strike
from helpers.training import running_cluster

from unicron.contracts.tasks import TaskState

pytestmark = [
    pytest.mark.real,
    pytest.mark.exhaustive("storms in virtual time strike denser, and each way of striking is shown on real processes"),
    pytest.mark.asyncio(loop_scope="module"),
]

STORMS = int(os.environ.get("STORMS", "5"))
SCRIPTS = {
    "plain": (GATHERS, 0.15),
    "transformers": (TRAINER, 0.3),
    "accelerate": (ACCELERATED, 0.15),
    "lightning": (LIGHTNING, 0.15),
    "spread": (SPREAD, 0.15),
}
RANKS = 3


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(tmp_path_factory):
    async with running_cluster(tmp_path_factory.mktemp("storms"), nodes=3, slots=2) as found:
        found.folder, found.calm = found.cluster.root.parent, set()
        yield found


async def ends(scene, name, told=()):
    view = await scene.until_state(name, TaskState.FINISHED, TaskState.FAILED)
    assert view.state is TaskState.FINISHED, (told, view.reason, view.traceback)


@pytest.mark.parametrize("seed", range(STORMS))
async def test_a_storm_leaves_no_trace_in_what_a_script_has_trained(scene, seed):
    kind = list(SCRIPTS)[seed % len(SCRIPTS)]
    (text, pace), name, told = SCRIPTS[kind], f"storm-{seed}", []
    if kind not in scene.calm:
        await mend(scene)
        await scene.client.submit(program(scene.folder, kind, text, 0.0, RANKS))
        await ends(scene, kind)
        scene.calm.add(kind)
    await mend(scene)
    await scene.client.submit(program(scene.folder, name, text, pace, RANKS))
    async with services_killed(scene.cluster, random.Random(seed), told):
        await strike(scene, seed, told)
    await mend(scene)
    await ends(scene, name, told)
    print(kind, told, "began", begun(scene.folder, name))  # noqa: T201 whoever plays many wants to know
    same(scene.folder, name, kind)
