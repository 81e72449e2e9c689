"""Models spread over several workers on a real cluster, in storms: what comes of it is what one process gets.

`STORMS=50 python -m pytest tests/chaos/test_replica_storms.py` plays as many; by default five are.
"""

import os
import random
import textwrap

import pytest
import pytest_asyncio
from helpers.parallel import EXAMPLE, SMALL, differing, parameters, plain_parameters
from helpers.storms import mend, services_killed, strike
from helpers.training import running_cluster, shared, task

from unicron.contracts.tasks import ParallelLayout

pytestmark = [
    pytest.mark.real,
    pytest.mark.exhaustive("storms in virtual time strike denser, and each way of striking is shown on real processes"),
    pytest.mark.asyncio(loop_scope="module"),
]

STORMS = int(os.environ.get("STORMS", "5"))
CHANGING = {
    2: ParallelLayout(tensor=2),
    3: ParallelLayout(),
    4: ParallelLayout(pipeline=2),
    5: ParallelLayout(),
    6: ParallelLayout(shard=2),  # three would get unequal parts of a batch of four, whose mean is another
}
FIXED = [ParallelLayout(tensor=2), ParallelLayout(pipeline=2), ParallelLayout(shard=2), ParallelLayout()]
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

scene = shared(running_cluster, nodes=3, slots=2)


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("script") / "double.py"
    path.write_text(textwrap.dedent(DOUBLE))
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(script, tmp_path_factory):
    """The parameters after a run of one plain process."""
    return await plain_parameters(script, tmp_path_factory.mktemp("expected"), ITERATIONS, MICROBATCHES)


@pytest.mark.parametrize("seed", range(STORMS))
async def test_a_storm_leaves_no_trace_in_the_parameters(expected, scene, script, tmp_path, seed):
    chance, told = random.Random(seed), []
    turn = seed % (len(FIXED) + 1)  # in the first one of each round the layout changes with the number of workers
    layout, layouts = (FIXED[turn - 1], {}) if turn else (ParallelLayout(), CHANGING)
    name, size = f"storm-{seed}", 2 if layouts else layout.replica_workers
    await mend(scene)
    fields = {"min_workers": size, "max_workers": 6, "microbatches": MICROBATCHES, "iterations": ITERATIONS}
    arguments = (*SMALL, "--out", str(tmp_path))
    await scene.client.submit(task(script, name, *arguments, layout=layout, layouts=layouts, **fields))
    async with services_killed(scene.cluster, chance, told):
        await strike(scene, seed, told)
    await mend(scene)
    print(told)  # noqa: T201 pytest shows it where the test fails
    await scene.ends(name)
    assert differing(parameters(tmp_path), expected) == [], told
