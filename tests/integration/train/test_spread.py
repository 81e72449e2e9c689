"""A script whose model `fully_shard` spreads over its ranks begins again where it was, from copies in memory."""

import asyncio
import math

import pytest
from helpers.scripts import SPREAD, ends, past, program, same, strike
from helpers.training import running_cluster
from msgspec.structs import replace

from unicron.contracts.events import Regrouped

pytestmark = pytest.mark.slow


def spread(folder, name, mesh, pace):
    spec = program(folder, name, SPREAD, pace=pace, ranks=math.prod(mesh))
    return replace(spec, env=spec.env | {"MESH": "x".join(map(str, mesh))})


@pytest.mark.parametrize("mesh", [(3,), (2, 2)], ids=["sharded", "hybrid"])
async def test_a_spread_model_goes_on_from_copies_in_memory_whoever_is_lost(tmp_path, mesh):
    async with running_cluster(tmp_path, nodes=2, slots=4) as scene:
        scene.folder = tmp_path
        await scene.client.submit(spread(tmp_path, "calm", mesh, pace=0.0))
        await ends(scene, "calm")
        await scene.client.submit(spread(tmp_path, "t", mesh, pace=0.25))
        again = []
        for count, rank, fault in [(3, 1, "kill-worker"), (6, 0, "raise"), (9, 2, "node")]:
            await past(scene, "t", count)
            before = max(each.epoch for each in scene.of(Regrouped, task="t"))
            if fault == "node":
                await asyncio.to_thread(scene.cluster.kill_node, (await scene.view("t")).members[rank].node)
            else:
                await strike(scene, "t", rank, fault)
            again += await scene.until(lambda before=before: met(scene, before, math.prod(mesh)))
        await ends(scene, "t")
    same(tmp_path, "t", "calm")
    assert all(each.state_from for each in again)
    assert again[-1].iteration > 0


def met(scene, before, size):
    """Return what the ranks of a membership newer than epoch `before` have reported, once all have."""
    newer = scene.of(Regrouped, task="t", epoch=max(each.epoch for each in scene.of(Regrouped, task="t")))
    return newer if len(newer) == size and newer[0].epoch > before else []
