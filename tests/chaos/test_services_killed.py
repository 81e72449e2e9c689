"""Tasks go on and heal though a control service, or the bus itself, is killed when it is needed most."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from helpers.training import ITERATIONS, difference, plain_run, running_cluster, shared, task, write_script
from helpers.waiting import PATIENT_S, until
from unicron_deploy.embedded import NATS

from unicron.contracts.events import FailureDetected, WorkerExited, WorkerFinished, WorkerReady

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module")]

scene = shared(running_cluster, slots=2)


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    return write_script(tmp_path_factory.mktemp("script"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(script, tmp_path_factory):
    """What a run without failures saves."""
    out = tmp_path_factory.mktemp("expected") / "plain.pt"
    return await asyncio.to_thread(plain_run, script, out, ITERATIONS=str(ITERATIONS))


async def chosen(scene, name):
    """Return a worker of a task, and its process."""
    victim = (await scene.view(name)).members[1]
    return victim, next(ready.pid for ready in scene.of(WorkerReady, worker=victim.worker))


OFTEN = pytest.mark.exhaustive("storms kill each service at each of its writes; one real one is enough")


@pytest.mark.parametrize(
    "killed", [*(pytest.param(name, marks=OFTEN) for name in ("registry", "detector", "planner")), "transition", NATS]
)
async def test_two_tasks_heal_though_this_is_killed(killed, expected, scene, script, held, tmp_path):
    names = [f"{killed}-{letter}" for letter in "ab"]
    while not all(view.state.ended for view in (await scene.client.status()).tasks):  # none grows at a gate
        await asyncio.sleep(0.05)
    held.close(5)
    for name in names:
        env = {"OUT": str(tmp_path / f"{name}.pt"), **held.env}
        await scene.client.submit(task(script, name, iterations=ITERATIONS, env=env))
    await held.held(6)
    (first, first_pid), (second, _) = [await chosen(scene, name) for name in names]
    process = scene.cluster.processes[killed].pid
    await asyncio.to_thread(scene.cluster.kill, killed)
    killed_at = time.time()
    assert first_pid > 0, "0 would be everybody in this test's process group"
    os.kill(first_pid, signal.SIGKILL)  # somebody is missing who ought to hear of it, or to do something about it
    await until(lambda: not Path(f"/proc/{first_pid}").exists())
    await asyncio.to_thread(scene.cluster.start_process, killed)
    assert scene.cluster.processes[killed].pid != process
    [failure] = await scene.until(lambda: scene.of(FailureDetected, worker=first.worker))
    assert failure.at > killed_at
    await scene.cluster.wait_until_ready(PATIENT_S)
    await scene.client.inject(second.node, "raise", second.worker)
    await scene.until(lambda: scene.of(FailureDetected, worker=second.worker))
    held.open()
    for name in names:
        await scene.ends(name)
        scene.assert_none_twice(name)
        out = tmp_path / f"{name}.pt"
        through = {finished.worker for finished in scene.of(WorkerFinished, task=name)}
        await scene.until(lambda: through <= {each.worker for each in scene.of(WorkerExited, task=name)})  # noqa: B023
        assert difference(torch.load(out, weights_only=True), expected) <= 1e-5
