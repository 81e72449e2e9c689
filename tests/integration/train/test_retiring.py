"""Nodes ordered to leave: their states go to storage, and when they are back their tasks go on from there."""

import pytest
from helpers.gate import gate
from helpers.local_cluster import local_cluster
from helpers.training import ITERATIONS, difference, task

from unicron.contracts.commands import Regroup, StoreState
from unicron.contracts.events import CheckpointStored, NodeGone, Regrouped, StateKept

pytestmark = pytest.mark.slow


async def test_all_nodes_told_to_leave_hand_over_to_storage_first(script, plain, tmp_path):
    async with local_cluster(tmp_path, nodes=2) as scene, gate() as held:
        held.close(5)
        env = {"OUT": str(tmp_path / "out.pt"), **held.env}
        fields = {"iterations": ITERATIONS, "max_workers": 2, "checkpoints": str(tmp_path), "checkpoint_s": 1e6}
        await scene.client.submit(task(script, env=env, **fields))
        await held.held(2)
        since = scene.of(Regrouped)[-1].epoch
        for node in ("node-1", "node-2"):
            scene.cluster.leave(node)
        await scene.until(lambda: scene.of(Regroup, leaving=True))
        held.open()
        for node in ("node-1", "node-2"):
            await scene.cluster.gone(node)
        await scene.until(lambda: len(scene.of(NodeGone)) == 2)
        [stored] = scene.of(CheckpointStored)
        assert stored.at < min(each.at for each in scene.of(NodeGone)[1:])
        assert scene.of(StoreState)
        for node in ("node-1", "node-2"):
            scene.cluster.start_node(node)
        left = scene.of(StateKept)[-1].state
        await scene.ends("t")
        begun = await scene.until(lambda: [each for each in scene.of(Regrouped) if each.epoch > since])
        assert {each.iteration for each in begun if each.state_from.startswith("step-")} == {left.iteration}
        scene.assert_none_twice("t")
        assert difference(await scene.saved(tmp_path / "out.pt"), plain) <= 1e-5
