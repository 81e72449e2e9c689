"""A task without slots: its state goes to its storage, so that memory is free, and it goes on from there."""

import asyncio
import os
import signal

import pytest
from helpers.training import ITERATIONS, difference, running_cluster, task
from unicron_deploy.processes import wait_until_gone

from unicron.contracts.commands import StoreState
from unicron.contracts.events import CheckpointStored, NodeGone, Regrouped, StateKept
from unicron.contracts.tasks import TaskState

pytestmark = pytest.mark.slow


def spec(script, tmp_path):
    env = {"PACE": "0.1", "OUT": str(tmp_path / "out.pt")}
    return task(script, iterations=ITERATIONS, max_workers=2, checkpoints=str(tmp_path), checkpoint_s=1e6, env=env)


async def goes_on(scene, plain, tmp_path, since):
    """Hold that it finishes with the state that it left, and with no iteration computed twice."""
    left = scene.of(StateKept)[-1].state
    view = await scene.until_state("t", TaskState.FINISHED, TaskState.FAILED)
    assert view.state is TaskState.FINISHED, view
    begun = await scene.until(lambda: [each for each in scene.of(Regrouped) if each.epoch > since])
    assert {each.iteration for each in begun if each.state_from.startswith("step-")} == {left.iteration}
    computed = [each.iteration for each in scene.iterations]
    assert len(set(computed)) == len(computed)
    assert difference(await scene.saved(tmp_path / "out.pt"), plain) <= 1e-5


async def test_all_nodes_told_to_leave_hand_over_to_storage_first(script, plain, tmp_path, monkeypatch):
    monkeypatch.setenv("UNICRON_LEAVE_S", "90")  # a busy machine takes long to import torch
    async with running_cluster(tmp_path, nodes=2) as scene:
        await scene.client.submit(spec(script, tmp_path))
        await scene.reached("t", 5)
        since = scene.of(Regrouped)[-1].epoch
        nodes = {node: scene.cluster.processes[node] for node in ("node-1", "node-2")}
        for process in nodes.values():
            os.kill(process.pid, signal.SIGTERM)
        await scene.until(lambda: len(scene.of(NodeGone)) == 2)
        [stored] = scene.of(CheckpointStored)
        assert stored.at < min(each.at for each in scene.of(NodeGone)[1:])
        assert scene.of(StoreState)
        await asyncio.to_thread(wait_until_gone, list(nodes.values()), 20)
        for node in nodes:
            scene.cluster.start_process(node)
        await goes_on(scene, plain, tmp_path, since)
