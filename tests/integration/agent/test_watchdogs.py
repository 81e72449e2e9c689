"""A worker that leaks is replaced between two iterations; a number in its log that is not finite is an alert."""

import pytest
from helpers.local_cluster import local_cluster
from helpers.training import task, write_script
from unicron_agent import node
from unicron_agent.stimuli import Memory
from unicron_agent.watchdogs import probes, trend

from unicron.contracts.commands import StopWorker
from unicron.contracts.events import Alert, FailureDetected, TaskRecovered, WorkerGrows
from unicron.contracts.watchdogs import AlertKind, LogPattern

LEAKING = """
    import os, time
    import torch
    from unicron.train import Session

    model, hoard, began = torch.nn.Linear(4, 1), [], time.monotonic()
    session = Session()
    session.protect(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for iteration in session.iterations():
        for microbatch in session.microbatches():
            time.sleep(0.005)
            if os.environ["UNICRON_WORKER"] == "gpt-2":
                while len(hoard) < min(1500, 30 * (time.monotonic() - began)):
                    hoard.append(b"x" * (1 << 20))
            session.backward(model(torch.rand(2, 4)).square().mean())
        session.step()
        print("loss:", "nan" if iteration == 5 else session.loss, flush=True)
"""


@pytest.mark.slow
@pytest.mark.exhaustive("the cores are tested without processes; this shows that /proc and log files reach them")
async def test_a_worker_that_leaks_is_replaced_and_the_others_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(trend, "WINDOWS_S", (4.0,))
    monkeypatch.setattr(node, "MEASURE_S", 0.02)
    monkeypatch.setattr(probes, "memory", lambda: Memory(100 << 20, 1 << 30))
    script, watched = write_script(tmp_path, LEAKING), [LogPattern(pattern=r"loss: (\S+)")]
    sizes = {"min_workers": 2, "max_workers": 2, "iterations": 10**6}
    async with local_cluster(tmp_path, nodes=2) as scene:
        await scene.client.submit(task(script, "gpt", watch_log=watched, **sizes))
        await scene.until(lambda: scene.of(WorkerGrows))
        [grows] = scene.of(WorkerGrows)
        await scene.until(lambda: scene.of(TaskRecovered, correlation=grows.id))
        [failure] = scene.of(FailureDetected)
        assert (failure.worker, failure.status, failure.severity) == ("gpt-2", "out_of_memory", 2)
        [stop] = scene.of(StopWorker)
        assert stop.worker == "gpt-2"
        await scene.reached("gpt", grows.iteration + 20)
        told = sorted((alert.kind, alert.text[:40]) for alert in scene.of(Alert))
    assert [kind for kind, _ in told if kind is AlertKind.MEMORY] == [AlertKind.MEMORY]
    assert (AlertKind.LOG, "gpt-1 wrote what is no finite number: lo") in told
    assert scene.done("gpt") == sorted(set(scene.done("gpt"))), "no iteration twice"
