"""A script that is not computing: it sleeps in a microbatch for ever."""

import pytest
from helpers.gate import gate
from helpers.local_cluster import local_cluster
from helpers.training import task, write_script

from unicron.contracts.events import FailureDetected, WorkerAsleep, WorkerStalled

pytestmark = pytest.mark.slow


async def test_a_script_that_sleeps_in_a_microbatch_is_found_long_before_one_that_may_be_busy(tmp_path, monkeypatch):
    monkeypatch.setenv("UNICRON_ASLEEP_S", "0.5")
    async with local_cluster(tmp_path, nodes=2) as scene, gate() as held:
        held.close(3, worker="gpt-2")  # who is held sleeps
        await scene.client.submit(task(write_script(tmp_path), "gpt", min_workers=2, max_workers=2, env=held.env))
        await scene.ends("gpt")
    [asleep], [stalled] = scene.of(WorkerAsleep), scene.of(WorkerStalled)
    [failure] = scene.of(FailureDetected)
    assert (asleep.worker, stalled.asleep) == ("gpt-2", True)
    assert 0.5 <= stalled.limit_s < 60.0, "more where it has slept before, as on a busy machine"
    assert (failure.worker, failure.status) == ("gpt-2", "task_hang")
    assert "still answers while all its processes sleep" in failure.reason
