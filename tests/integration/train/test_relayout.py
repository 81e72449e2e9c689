"""Tasks whose layout changes while they train, as nodes come and go: what comes of it is what one process gets."""

import pytest
import pytest_asyncio
from helpers.gate import gate, write_gate
from helpers.local_cluster import local_cluster
from helpers.parallel import EXAMPLE, SMALL, differing, parameters, plain_parameters
from helpers.training import shared, task

from unicron.contracts.commands import Regroup
from unicron.contracts.events import Regrouped, StateKept, TaskRecovered
from unicron.contracts.tasks import ParallelLayout

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

ITERATIONS, MICROBATCHES = 8, 4

DOUBLE = f"""
import sys
import gate
import torch
sys.path.insert(0, {str(EXAMPLE)!r})
import train

class Session(train.Session):
    def microbatches(self):
        for each in super().microbatches():
            gate.at(self.iteration, each, f"{{self.world_size}} workers", self.rank)
            yield each

train.Session = Session
torch.set_default_dtype(torch.float64)  # the order of summation then makes no visible difference
train.main()
"""

scene = shared(local_cluster, nodes=2, slots=2)


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("script") / "double.py"
    path.write_text(DOUBLE)
    write_gate(path.parent)
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(script, tmp_path_factory):
    """The parameters after a run of one plain process."""
    return await plain_parameters(script, tmp_path_factory.mktemp("expected"), ITERATIONS, MICROBATCHES)


def layouts(**degrees):
    """Return layouts by number of workers: w4="122" is four workers in stages 2, shards 2, tensor 1 and so on."""
    found = {}
    for size, (tensor, pipeline, shard) in degrees.items():
        found[int(size[1:])] = ParallelLayout(tensor=int(tensor), pipeline=int(pipeline), shard=int(shard))
    return found


async def changed(scene, held, name, *, drain):
    """Have a node go, or come back, and let workers go on when they are told to hand over."""
    told = len(scene.of(Regroup, task=name, leaving=True))
    await scene.client.drain("node-2", drain=drain)
    await scene.until(lambda: len(scene.of(Regroup, task=name, leaving=True)) > told)
    held.close(phase="2 workers") if drain else held.open()


@pytest.mark.parametrize(
    "shapes",
    [
        layouts(w4="211", w2="121"),
        pytest.param(
            layouts(w4="221", w2="112"), marks=pytest.mark.exhaustive("tests/unit/train has all pairs of layouts")
        ),
    ],
    ids=["tensor", "pipeline"],
)
async def test_a_drained_node_changes_the_layout_and_one_that_is_back_changes_it_again(
    expected, scene, script, tmp_path, shapes
):
    name = "a-" + "-".join(f"{each.tensor}{each.pipeline}{each.shard}" for each in shapes.values())
    fields = {"min_workers": 2, "max_workers": 4, "microbatches": MICROBATCHES, "iterations": ITERATIONS}
    async with gate() as held:
        fields |= {"layouts": shapes, "throughput": {2: 2e9, 4: 4e9}, "env": held.env}
        held.close(2, MICROBATCHES // 2, phase="4 workers")
        await scene.client.submit(task(script, name, *SMALL, "--out", str(tmp_path), **fields))
        await held.held(4)
        await changed(scene, held, name, drain=True)
        await held.held(2)
        await scene.until(lambda: scene.of(TaskRecovered, task=name, workers=2))
        await changed(scene, held, name, drain=False)
        await scene.ends(name)
    assert len(scene.of(TaskRecovered, task=name, workers=4)) == 2
    assert differing(parameters(tmp_path), expected) == []
    scene.assert_none_twice(name)
    assert len(scene.of(StateKept, task=name)) >= 4
    assert all(each.iteration > 0 for each in scene.of(Regrouped, task=name) if each.epoch > 0)
