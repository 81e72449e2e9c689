"""A script whose model `fully_shard` spreads over its ranks begins again where it was, from copies in memory."""

import asyncio
import math

import pytest
from helpers.local_cluster import local_cluster
from helpers.scripts import SPREAD, disturbed
from helpers.training import running_cluster

from unicron.contracts.events import Regrouped

pytestmark = pytest.mark.slow


HYBRID = pytest.param((2, 2), marks=pytest.mark.exhaustive("the node that is lost takes a cluster of processes"))


@pytest.mark.parametrize("mesh", [(3,), HYBRID], ids=["sharded", "hybrid"])
async def test_a_spread_model_goes_on_from_copies_in_memory_whoever_is_lost(tmp_path, mesh):
    ranks, loses_a_node = math.prod(mesh), mesh == (2, 2)  # for which a cluster of processes is needed
    cluster = running_cluster if loses_a_node else local_cluster
    async with (
        cluster(tmp_path, nodes=2, slots=4) as scene,
        disturbed(scene, SPREAD, (0, 5), ranks=ranks, MESH="x".join(map(str, mesh))) as run,
    ):
        await run.at(0, 5, rank=1)  # the others wait for it
        await run.strike(1)
        await run.at(0, 12)
        await run.strike(0, "raise")
        await run.at(1, 3)
        if loses_a_node:
            await asyncio.to_thread(scene.cluster.kill_node, (await scene.view(run.name)).members[2].node)
        else:
            await run.strike(2)
    again = [each for each in scene.of(Regrouped, task=run.name) if each.epoch]
    assert all(each.state_from for each in again)
    assert [each.iteration > 0 for each in again[-ranks:]] == [True] * ranks
    assert len({each.epoch for each in again}) >= 3
