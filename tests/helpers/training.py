"""Small training scripts for tests, and a cluster to run them on."""

import asyncio
import contextlib
import os
import signal
import textwrap
import zipfile

import pytest_asyncio
import torch
from unicron_deploy.embedded import Cluster

from helpers import nursery, standby
from helpers.cli import KEYS
from helpers.gate import write_gate
from helpers.observer import ClusterObserver
from helpers.ports import free_port
from helpers.waiting import insist, until
from helpers.worlds import PATIENT_PING_S
from unicron.contracts.events import FailureDetected, WorkerReady
from unicron.contracts.tasks import TaskSpec, TaskState
from unicron.service.bootstrap import connected_client

TRAIN = """
    import os, sys, time
    import gate
    import torch
    from unicron.train import Session
    from unicron.train.session import gradients

    gradients.BUCKET_BYTES = 4096  # several buckets even of this model, so that reduces overlap with backward passes
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.9)
    session = Session(seed=3, accumulate_dtype=getattr(torch, os.environ.get("ACCUMULATE", "float64")),
                      iterations=int(os.environ.get("ITERATIONS", "1")), microbatches=6)
    session.protect(model=model, optimizer=optimizer, schedule=schedule)
    for iteration in session.iterations():
        for microbatch in session.microbatches():
            x = torch.randn(16, 32)
            gate.at(iteration, microbatch, rank=session.rank)
            session.backward((model(x) - x.sum(1, keepdim=True)).square().mean())
        session.step()
        schedule.step()
        if "DONE" in os.environ:
            with open(os.environ["DONE"], "a") as done:
                print(iteration, file=done)
        print("iteration", iteration, session.loss, flush=True)
    if session.rank == 0 and "OUT" in os.environ:
        torch.save({"model": model.state_dict(), "lr": schedule.get_last_lr()}, os.environ["OUT"])
"""

SMALL = """
    import os, sys, time
    import torch
    from unicron.train import Session

    model = torch.nn.Linear(4, 1)
    session = Session()
    session.protect(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for iteration in session.iterations():
        for microbatch in session.microbatches():
            time.sleep(0.02)
            session.backward(model(torch.rand(2, 4)).square().mean())
        session.step()
"""
"""The smallest, which nobody holds."""

HELD = {"UNICRON_ASLEEP_S": "60", "UNICRON_HANG_S": "60"}
"""Settings with which a worker that is held at a gate for long does not count as one that hangs."""

ITERATIONS = 24
"""Of the usual script, where nothing else is needed: enough to be struck in the middle."""


def write_script(folder, text=TRAIN):
    write_gate(folder)
    path = folder / "script.py"
    path.write_text(textwrap.dedent(text))
    return path


def task(script, name="t", *arguments, **fields):
    fields = {"max_workers": 3, "microbatches": 6, "iterations": 10, **fields}
    return TaskSpec(name=name, command=["python", str(script), *arguments], workdir=str(script.parent), **fields)


def plain_run(script, out, **environment):
    """Run the script as one plain process, without any cluster; return what it saved."""
    code, written = standby.run(script, OUT=str(out), **environment)
    assert code == 0, written
    return torch.load(out, weights_only=True)


def difference(ours, theirs):
    """Return, over all parameters, the largest |a-b| over the largest |b|."""
    ours, theirs = ours["model"], theirs["model"]
    return max(
        float((ours[name].double() - theirs[name].double()).abs().max() / theirs[name].abs().max()) for name in theirs
    )


class RunningCluster(ClusterObserver):
    """A running cluster, a client, and all messages."""

    def __init__(self, cluster, client):
        self.cluster, self.client = cluster, client
        self.journal, self.iterations, self._position = [], [], 0

    @contextlib.asynccontextmanager
    async def listening(self):
        """Hear of all that happens meanwhile."""
        jobs = [asyncio.create_task(self.follow()), asyncio.create_task(self.listen())]
        await asyncio.sleep(0)  # the bus in memory; a real one is ready when it has answered
        await self.client.bus.flush()
        try:
            yield self
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)

    async def follow(self):
        async for position, message in self.client.follow():
            self.journal.append(message)
            self._position = position

    async def until(self, condition):
        """Wait until `condition` returns something true; return it."""
        try:
            return await until(condition)
        except asyncio.CancelledError:  # the run's limit for a test is over
            print(f"it never came; the journal ends with {self.journal[-8:]}")  # noqa: T201 pytest shows it
            raise

    async def caught_up(self):
        """Wait until all that is in the journal now has arrived here as well: the registry may know of it sooner."""
        tail = await insist(self.client.tail)
        await self.until(lambda: self._position >= tail)

    async def saved(self, path):
        """Return what a script has written, once it is through with that: a zip archive's directory comes last."""
        await self.until(lambda: path.exists() and zipfile.is_zipfile(path))
        return torch.load(path, weights_only=True)

    async def status(self):
        return await insist(self.client.status)

    async def until_state(self, name, *states):
        view = await super().until_state(name, *states)
        await self.caught_up()
        return view

    async def ends(self, name):
        """Wait until a task has finished."""
        view = await self.until_state(name, TaskState.FINISHED, TaskState.FAILED)
        assert view.state is TaskState.FINISHED, (view.reason, view.traceback)

    async def fails(self, name):
        """Wait until a task has failed; return how the registry sees it."""
        view = await self.until_state(name, TaskState.FINISHED, TaskState.FAILED)
        assert view.state is TaskState.FAILED
        return view

    async def lose_worker(self, name, rank):
        """Kill a worker of a task, and wait until that is noticed; return who it was."""
        victim = (await self.view(name)).members[rank]
        await self.client.inject(victim.node, "kill-worker", victim.worker)
        await self.until(lambda: self.of(FailureDetected, worker=victim.worker))
        return victim

    def assert_none_twice(self, name):
        done = self.done(name)
        assert len(set(done)) == len(done), "an iteration was finished twice"


def kill_at_once(scene, members):
    """Kill workers such that none of them sees another one gone: each is stopped first."""
    pids = [scene.of(WorkerReady, worker=each.worker)[-1].pid for each in members]
    assert all(pid > 0 for pid in pids), "0 would be everybody in this test's process group"
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, number)


@contextlib.contextmanager
def environment(defaults):
    """Have these in the environment meanwhile, where it has none."""
    unset = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(unset)
    try:
        yield
    finally:
        for name in unset:
            del os.environ[name]


def shared(cluster, **options):
    """Make a fixture: a cluster that all tests of a module share."""

    @pytest_asyncio.fixture(scope="module", loop_scope="module")
    async def scene(tmp_path_factory):
        async with cluster(tmp_path_factory.mktemp("cluster"), **options) as scene:
            yield scene

    return scene


@contextlib.asynccontextmanager
async def running_cluster(root, nodes=3, slots=1, kind=Cluster, ping_s=PATIENT_PING_S):
    """Have a cluster; one that pings often notices who is stopped, and cuts off a test that merely waits for a core."""
    with environment(HELD):
        cluster = kind(root / "cluster", nodes=nodes, slots=slots, port=free_port(), ping_s=ping_s, spawn=nursery.spawn)
        await asyncio.to_thread(cluster.start)
        try:
            await cluster.wait_until_ready(120.0)
            KEYS[cluster.url] = cluster.settings().nats_nkey
            async with (
                connected_client(cluster.settings(), "test") as client,
                RunningCluster(cluster, client).listening() as scene,
            ):
                yield scene
        finally:
            await asyncio.to_thread(cluster.stop)
