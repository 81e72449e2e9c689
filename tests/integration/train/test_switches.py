"""The save switch and the kill switch: files that somebody makes who has no other access to the cluster."""

import pytest
from helpers.training import running_cluster, task, write_script

from unicron.contracts.events import CheckpointStored, TaskRemoved

pytestmark = pytest.mark.slow


async def test_a_running_task_is_saved_and_stopped_by_files(tmp_path, monkeypatch):
    switches = tmp_path / "switches"
    switches.mkdir()
    monkeypatch.setenv("UNICRON_SWITCHES", str(switches))
    async with running_cluster(tmp_path, nodes=1) as scene:
        env = {"PACE": "0.05"}
        spec = task(write_script(tmp_path), iterations=10_000, checkpoints=str(tmp_path), checkpoint_s=1e6, env=env)
        await scene.client.submit(spec)
        await scene.reached("t", 3)
        (switches / "t.save").touch()
        [first] = await scene.until(lambda: scene.of(CheckpointStored))
        await scene.reached("t", first.iteration + 1)
        (switches / "t.stop-save").touch()
        await scene.until(lambda: scene.of(TaskRemoved))
        [_, last] = scene.of(CheckpointStored)
        assert last.iteration > first.iteration
        await scene.until(lambda: not any(switches.iterdir()))
