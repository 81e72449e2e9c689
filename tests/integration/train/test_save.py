"""`session.save` on real workers: when the task is finished the file is there, whole, whoever dies while writing it."""

import os
import signal

import pytest
import pytest_asyncio
import torch
from helpers.training import difference, plain_run, running_cluster, task, write_script

from unicron.contracts.events import Alert, Regrouped, WorkerFinished, WorkerRaised
from unicron.contracts.tasks import ParallelLayout, TaskState

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

ITERATIONS = 6

SCRIPT = """
    import os, signal, time
    from pathlib import Path
    import torch
    from unicron.train import Session, whole

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

    if writing := os.environ.get("WRITING"):  # a storage that takes its time, as the first writers find it
        class Slow(whole._Summed):
            def write(self, data):
                wrote = super().write(data)
                if (number := len(list(Path(writing).iterdir()))) < int(os.environ["WRITERS"]):
                    self.flush()
                    (Path(writing) / f"{number}-{os.getpid()}").touch()
                    time.sleep(60)
                return wrote
        whole._Summed = Slow

    for iteration in session.iterations():
        for microbatch in session.microbatches():
            time.sleep(float(os.environ.get("PACE", "0")))
            x = torch.randn(16, 32)[ranks.get_local_rank() :: ranks.size()]
            session.backward((model(x) - x.sum(1, keepdim=True)).square().mean())
        session.step()
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(tmp_path_factory, plain):  # that one first: it blocks the loop
    async with running_cluster(tmp_path_factory.mktemp("cluster"), nodes=2, slots=2) as scene:
        yield scene


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    return write_script(tmp_path_factory.mktemp("script"), SCRIPT)


@pytest.fixture(scope="module")
def plain(script):
    return {"model": plain_run(script, script.parent / "plain.pt")}


class Writers:
    """Workers that are slow to write, one after the other."""

    def __init__(self, scene, script, tmp_path, name, writers, layout=ParallelLayout(), **fields):  # noqa: B008
        self.scene, self.name, self.out = scene, name, tmp_path / "model.pt"
        self.marks = tmp_path / "writing"
        self.marks.mkdir()
        env = {"OUT": str(self.out), "WRITING": str(self.marks), "WRITERS": str(writers)}
        fields = {"max_workers": 4, "min_workers": layout.replica_workers, **fields}
        self.spec = task(script, name, iterations=ITERATIONS, layout=layout, env=env, **fields)

    async def next(self, number):
        """Wait for a writer; return its process."""
        found = await self.scene.until(lambda: sorted(self.marks.glob(f"{number}-*")))
        assert not self.out.exists(), "half of it is there under its name"
        assert not self.scene.of(WorkerFinished, task=self.name), "nobody is through"
        return int(found[0].name.partition("-")[2])

    async def ends_as_undisturbed(self, plain):
        view = await self.scene.until_state(self.name, TaskState.FINISHED, TaskState.FAILED)
        assert view.state is TaskState.FINISHED, (view.reason, view.traceback)
        assert difference({"model": torch.load(self.out, weights_only=True)}, plain) <= 1e-5
        await self.scene.until(lambda: [each.name for each in self.out.parent.glob("model.pt*")] == ["model.pt"])
        assert not self.scene.of(Alert, task=self.name)


@pytest.mark.parametrize("layout", [ParallelLayout(), ParallelLayout(shard=2)], ids=["whole", "sharded"])
async def test_writers_that_are_killed_while_they_write_are_followed_by_others(scene, script, plain, tmp_path, layout):
    run = Writers(scene, script, tmp_path, f"killed-{layout.shard}", writers=2, layout=layout)
    await scene.client.submit(run.spec)
    os.kill(await run.next(0), signal.SIGKILL)
    os.kill(await run.next(1), signal.SIGKILL)
    await run.ends_as_undisturbed(plain)
    assert {each.iteration for each in scene.of(Regrouped, task=run.name) if each.epoch > 0} >= {ITERATIONS}
    assert all(each.recomputed == 0 for each in scene.of(Regrouped, task=run.name) if each.iteration == ITERATIONS)


async def test_where_the_only_worker_is_killed_while_it_writes_the_next_one_writes(scene, script, plain, tmp_path):
    run = Writers(scene, script, tmp_path, "only", writers=1, max_workers=1)
    run.spec.env["PACE"] = "0.1"  # saving keeps up with that
    await scene.client.submit(run.spec)
    os.kill(await run.next(0), signal.SIGKILL)
    await run.ends_as_undisturbed(plain)
    begun = [each.iteration for each in scene.of(Regrouped, task=run.name) if each.epoch > 0]
    assert min(begun) >= ITERATIONS - 1, "its state was in memory"


async def test_a_writer_that_is_stopped_is_followed_by_another(scene, script, plain, tmp_path):
    run = Writers(scene, script, tmp_path, "stopped", writers=1)
    await scene.client.submit(run.spec)
    os.kill(await run.next(0), signal.SIGSTOP)
    await run.ends_as_undisturbed(plain)


async def test_a_file_that_nobody_can_write_fails_the_task_with_the_reason(scene, script, tmp_path):
    run = Writers(scene, script, tmp_path, "refused", writers=0)
    run.out.mkdir()
    await scene.client.submit(run.spec)
    view = await scene.until_state(run.name, TaskState.FAILED, TaskState.FINISHED)
    assert view.state is TaskState.FAILED
    assert f"{run.out} can't be saved: Is a directory" in view.traceback
    assert not list(tmp_path.glob("model.pt.*")), "and nothing is left"


async def test_a_folder_that_is_not_there_is_told_before_anything_is_computed(scene, script, tmp_path):
    run = Writers(scene, script, tmp_path, "nowhere", writers=0)
    run.spec.env["OUT"] = str(tmp_path / "nothing" / "model.pt")
    await scene.client.submit(run.spec)
    view = await scene.until_state(run.name, TaskState.FAILED, TaskState.FINISHED)
    assert "session.save() makes no folders" in view.traceback
    assert scene.of(WorkerRaised, task=run.name)
