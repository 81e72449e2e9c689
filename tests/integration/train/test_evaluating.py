"""A script that is not computing: it sleeps in a microbatch for ever."""

import pytest
from helpers.training import running_cluster, task, write_script

from unicron.contracts.events import FailureDetected, WorkerAsleep, WorkerStalled
from unicron.contracts.tasks import TaskState

pytestmark = pytest.mark.slow

SLEEPER = """
    import os, time
    import torch
    from unicron.train import Session

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    session = Session(seed=3, iterations=60, microbatches=4)
    session.protect(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
    for iteration in session.iterations():
        for microbatch in session.microbatches():
            if (iteration, os.environ["UNICRON_WORKER"]) == (30, "gpt-2"):
                time.sleep(10_000)
            time.sleep(0.02)
            session.backward(model(torch.randn(4, 8)).square().mean())
        session.step()
"""


async def test_a_script_that_sleeps_in_a_microbatch_is_found_long_before_one_that_may_be_busy(tmp_path):
    async with running_cluster(tmp_path, nodes=2, slots=1) as scene:
        numbers = {"iterations": 60, "microbatches": 4, "min_workers": 2, "max_workers": 2}
        await scene.client.submit(task(write_script(tmp_path, SLEEPER), "gpt", **numbers))
        assert (await scene.until_state("gpt", TaskState.FINISHED, TaskState.FAILED)).state is TaskState.FINISHED
    [asleep], [stalled] = scene.of(WorkerAsleep), scene.of(WorkerStalled)
    [failure] = scene.of(FailureDetected)
    assert (asleep.worker, stalled.asleep) == ("gpt-2", True)
    assert 2.0 <= stalled.limit_s < 10.0, "more where it has slept before, as on a busy machine"
    assert (failure.worker, failure.status) == ("gpt-2", "task_hang")
    assert "still answers while all its processes sleep; MainThread: <module> (" in failure.reason, "where it is"
    assert any("channel.py" in thread for thread in stalled.stacks), "other threads too"
