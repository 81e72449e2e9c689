"""`session.save` on real workers: when the task is finished the file is there, whole, after any death meanwhile."""

import os
import signal

import pytest
import torch
from helpers.local_cluster import local_cluster
from helpers.training import difference, plain_run, shared, task, write_script

from unicron.contracts.events import Alert, Regrouped, StateSecured, WorkerFinished, WorkerRaised, WorkerReady
from unicron.contracts.tasks import ParallelLayout

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

ITERATIONS = 6

SCRIPT = """
    import os
    import gate
    import torch
    from unicron.train import Session
    from unicron.train.snapshots import whole

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 1024), torch.nn.Tanh(), torch.nn.Linear(1024, 1))
    session = Session(seed=3, accumulate_dtype=torch.float64, iterations=6, microbatches=6)
    if session.mesh.size() > 1:
        from torch.distributed.fsdp import fully_shard
        fully_shard(model, mesh=session.mesh["shard"])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    session.protect(model=model, optimizer=optimizer)
    session.save(os.environ["OUT"])
    ranks = session.mesh["shard"]

    class Watched(whole._Summed):
        def write(self, data):
            wrote = super().write(data)
            self.flush()
            gate.at(session.iteration, phase="writing")
            return wrote
    whole._Summed = Watched

    for iteration in session.iterations():
        for microbatch in session.microbatches():
            gate.at(iteration, microbatch)
            x = torch.randn(16, 32)[ranks.get_local_rank() :: ranks.size()]
            session.backward((model(x) - x.sum(1, keepdim=True)).square().mean())
        session.step()
"""

scene = shared(local_cluster, nodes=2, slots=2)


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    return write_script(tmp_path_factory.mktemp("script"), SCRIPT)


@pytest.fixture(scope="module")
def plain(script):
    return {"model": plain_run(script, script.parent / "plain.pt")}


class Writers:
    """Workers that are held while they write, one after the other."""

    def __init__(self, scene, script, tmp_path, name, held, layout=ParallelLayout(), **fields):  # noqa: B008
        self.scene, self.name, self.out = scene, name, tmp_path / "model.pt"
        self.held, self._struck = held, []
        held.close(phase="writing")
        fields = {"max_workers": 4, "min_workers": layout.replica_workers, "env": {**held.env}, **fields}
        fields["env"]["OUT"] = str(self.out)
        self.spec = task(script, name, iterations=ITERATIONS, layout=layout, **fields)

    async def strike(self, number):
        """Strike the next one that writes with a signal."""
        new = lambda: [at["worker"] for at in self.held.waiting if at["worker"] not in self._struck]  # noqa: E731
        [worker] = await self.scene.until(new)
        assert not self.out.exists(), "half of it is there under its name"
        assert not self.scene.of(WorkerFinished, task=self.name), "nobody is through"
        self._struck.append(worker)
        [ready] = self.scene.of(WorkerReady, worker=worker)
        os.kill(ready.pid, number)

    async def ends_as_undisturbed(self, plain):
        self.held.open()
        await self.scene.ends(self.name)
        assert difference({"model": torch.load(self.out, weights_only=True)}, plain) <= 1e-5
        await self.scene.until(lambda: [each.name for each in self.out.parent.glob("model.pt*")] == ["model.pt"])
        assert not self.scene.of(Alert, task=self.name)


@pytest.mark.parametrize("layout", [ParallelLayout(), ParallelLayout(shard=2)], ids=["whole", "sharded"])
async def test_writers_that_are_killed_while_they_write_are_followed_by_others(
    scene, script, plain, held, tmp_path, layout
):
    run = Writers(scene, script, tmp_path, f"killed-{layout.shard}", held, layout=layout)
    await scene.client.submit(run.spec)
    await run.strike(signal.SIGKILL)
    await run.strike(signal.SIGKILL)
    await run.ends_as_undisturbed(plain)
    assert {each.iteration for each in scene.of(Regrouped, task=run.name) if each.epoch > 0} >= {ITERATIONS}
    assert all(each.recomputed == 0 for each in scene.of(Regrouped, task=run.name) if each.iteration == ITERATIONS)


async def test_where_the_only_worker_is_killed_while_it_writes_the_next_one_writes(
    scene, script, plain, held, tmp_path
):
    run = Writers(scene, script, tmp_path, "only", held, max_workers=1)
    held.close(ITERATIONS - 1)
    await scene.client.submit(run.spec)
    await scene.until(lambda: scene.of(StateSecured, task=run.name))
    held.close(phase="writing")
    await scene.until(lambda: [at for at in held.waiting if at["phase"] == "writing"])
    states = [each for node in ("node-1", "node-2") for each in await scene.client.states(node)]
    await run.strike(signal.SIGKILL)
    await run.ends_as_undisturbed(plain)
    [begun] = [each for each in scene.of(Regrouped, task=run.name) if each.epoch > 0]
    assert begun.state_from, "it was in memory"
    assert begun.iteration == max(each.iteration for each in states if each.task == run.name)


async def test_a_writer_that_is_stopped_is_followed_by_another(scene, script, plain, held, tmp_path):
    run = Writers(scene, script, tmp_path, "stopped", held)
    await scene.client.submit(run.spec)
    await run.strike(signal.SIGSTOP)
    await run.ends_as_undisturbed(plain)


async def test_a_file_that_nobody_can_write_fails_the_task_with_the_reason(scene, script, held, tmp_path):
    run = Writers(scene, script, tmp_path, "refused", held)
    run.out.mkdir()
    held.open()
    await scene.client.submit(run.spec)
    assert f"{run.out} can't be saved: Is a directory" in (await scene.fails(run.name)).traceback
    assert not list(tmp_path.glob("model.pt.*")), "and nothing is left"


async def test_a_folder_that_is_not_there_is_told_before_anything_is_computed(scene, script, held, tmp_path):
    run = Writers(scene, script, tmp_path, "nowhere", held)
    run.spec.env["OUT"] = str(tmp_path / "nothing" / "model.pt")
    await scene.client.submit(run.spec)
    assert "session.save() makes no folders" in (await scene.fails(run.name)).traceback
    assert scene.of(WorkerRaised, task=run.name)
