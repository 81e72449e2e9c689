"""Real workers whose state nobody has any more: it is had from the memory of a node, or from storage."""

import asyncio
import itertools
import os
import shutil
import signal
import textwrap
from collections import Counter

import pytest
import pytest_asyncio
from helpers import training
from helpers.cli import data, unicron
from helpers.local_cluster import local_cluster
from helpers.training import ITERATIONS, difference, running_cluster, shared, task, write_script
from unicron_agent.hardware.network import memory_dir

from unicron.contracts.commands import Regroup
from unicron.contracts.events import (
    CheckpointFailed,
    CheckpointFound,
    CheckpointStored,
    FailureDetected,
    GradientNotFinite,
    Regrouped,
    StateCopied,
    StateDiverged,
    StateKept,
    StateRejected,
    StateSecured,
    StatesFound,
    WorkerReady,
)
from unicron.contracts.tasks import TaskState

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

TRAIN = training.TRAIN.replace(
    "    gradients.BUCKET",
    """
    from unicron.train.worker import duties
    duties.CHEAP_S = 1.0  # that it takes long to save, as on a busy machine, is no reason to save rarely
    gradients.BUCKET""",
)

UNRULY = TRAIN.replace("microbatches=6)", 'microbatches=6, finite="retry")').replace(
    "            session.backward((model(x) - x.sum(1, keepdim=True)).square().mean())",
    """
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            if iteration == 4 and microbatch == 2:
                with open(os.environ["FAULTY"], "a+") as faulty:  # who computes it first
                    faulty.seek(0)
                    first = faulty.read() or faulty.write(os.environ["UNICRON_WORKER"]) and os.environ["UNICRON_WORKER"]
                loss = loss * float("nan") if first == os.environ["UNICRON_WORKER"] else loss
            session.backward(loss)""",
)
"""The usual script, in which the loss of one microbatch is no number on one worker."""

FLIPPING = TRAIN.replace(
    "        for microbatch",
    """
        if iteration == 8 and session.rank == 2 and not os.path.exists(os.environ["FLIPPED"]):
            with torch.no_grad(), open(os.environ["FLIPPED"], "x") as told:
                model[0].weight[3, 5] += 0.5
                told.write(os.environ["UNICRON_WORKER"])
        for microbatch""",
)
"""The usual script, in which one worker's parameters change."""

DYING = TRAIN.replace(
    "    for iteration",
    """
    from unicron.train.snapshots.packed import Packing
    write, iteration = Packing.write, 0
    def dies_half_way(packing, mapped, before=None):
        if iteration >= 8 and not os.path.exists(os.environ["DIED"]):
            open(os.environ["DIED"], "x").close()
            mapped[: packing.size // 2] = bytes(packing.size // 2)
            os.kill(os.getpid(), 9)
        wrote = write(packing, mapped, before)
        if not os.path.exists(os.environ["DIED"]):
            with open(os.environ["WROTE"], "a") as told:
                print(iteration, file=told)
        return wrote
    Packing.write = dies_half_way
    for iteration""",
    1,
)
"""The usual script, which is killed while its state from before the update of iteration 8 is being written.

Where the one before is not safe elsewhere yet, no state of iteration 8 is written; then it is a later one.
"""

HELD_AT = 6

names = (f"t{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def eager(tmp_path_factory):
    return write_script(tmp_path_factory.mktemp("script"), TRAIN)


scene = shared(local_cluster, nodes=4)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mortal(tmp_path_factory):
    """A cluster whose nodes can be killed, and which commands reach."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNICRON_ASLEEP_S", "60")  # who is held sleeps
        patch.setenv("UNICRON_HANG_S", "60")
        async with running_cluster(tmp_path_factory.mktemp("mortal")) as scene:
            yield scene


class Run:
    """A task that trains for a while, and what comes of it."""

    def __init__(self, scene, script, tmp_path, held, env=(), **fields):
        self.scene, self.name, self.held = scene, next(names), held
        self.out, self._done = tmp_path / "out.pt", tmp_path / "done"
        env = {"ACCUMULATE": "float64", "OUT": str(self.out), "DONE": str(self._done), **dict(env), **held.env}
        self.spec = task(script, self.name, iterations=ITERATIONS, env=env, **fields)

    async def until_held(self, iteration=HELD_AT):
        """Train until all workers are held in an iteration, and a state lies in memory; return who they are."""
        self.held.close(iteration - 1)
        await self.scene.client.submit(self.spec)
        await self.held.held(self.spec.max_workers)
        await self.scene.until(lambda: self.scene.of(StateSecured, task=self.name))
        self.held.close(iteration)  # on the way there the next one is saved
        await self.held.held(self.spec.max_workers)
        return (await self.scene.view(self.name)).members

    async def ends_as_undisturbed(self, plain, since=HELD_AT):
        """Hold that it ends as if nothing had happened, and computes again only what was done `since` its state."""
        self.held.open()
        await self.scene.ends(self.name)
        assert difference(await self.scene.saved(self.out), plain) <= 1e-5
        assert self.twice() <= {*range(since, HELD_AT)}
        assert {*map(int, self._done.read_text().split())} == {*range(ITERATIONS)}, "as the script wrote it down"

    def twice(self):
        """Return the iterations that were computed twice."""
        return {iteration for iteration, count in Counter(self.scene.done(self.name)).items() if count > 1}

    def begun(self):
        """Return the iterations in which memberships began, but the first one."""
        return {each.iteration for each in self.scene.of(Regrouped, task=self.name) if each.epoch > 0}


async def test_the_only_worker_killed_while_it_writes_its_state_goes_on_from_the_one_before(
    scene, plain, held, tmp_path
):
    env = {name.upper(): str(tmp_path / name) for name in ("died", "wrote")}
    run = Run(scene, write_script(tmp_path, DYING), tmp_path, held, max_workers=1, env=env)
    await run.until_held()
    for iteration in range(HELD_AT + 1, ITERATIONS):  # it writes once it has heard that the one before is safe
        held.close(iteration)
        there = lambda at=iteration: [each for each in held.waiting if each["iteration"] >= at]  # noqa: E731
        while not ((tmp_path / "died").exists() or there()):
            await asyncio.sleep(0.01)
    held.open()
    await scene.ends(run.name)
    taken = [each.iteration for each in scene.of(Regrouped, task=run.name) if each.state_from]
    assert taken == [int((tmp_path / "wrote").read_text().split()[-1])]
    assert min(run.twice(), default=taken[0]) >= taken[0], "and computes no more again"
    assert difference(await scene.saved(run.out), plain) <= 1e-5
    assert not scene.of(StateRejected, task=run.name), "what is not whole is offered to nobody"


async def test_users_see_what_lies_in_which_memories(mortal, eager, held, tmp_path):
    run = Run(mortal, eager, tmp_path, held, max_workers=1)
    [only] = await run.until_held()
    [secured] = mortal.of(StateSecured, task=run.name)
    ask = ("checkpoints", "memory", run.name)
    rows = await asyncio.to_thread(data, *ask, url=mortal.cluster.url)
    assert {(row["task"], row["worker"], row["place"]) for row in rows} == {(run.name, only.worker, 0)}
    assert [row["iteration"] for row in rows] == sorted((row["iteration"] for row in rows), reverse=True)
    older = rows[-1]
    assert sorted(older["nodes"]) == sorted([only.node, *secured.nodes])
    assert older["size"] > 8_700, "its parameters"
    text = await asyncio.to_thread(unicron, *ask, url=mortal.cluster.url)
    assert f"{run.name} " in text
    assert secured.nodes[0] in text
    status = await asyncio.to_thread(unicron, "status", url=mortal.cluster.url)
    assert "2 nodes" in next(line for line in status.splitlines() if line.startswith(run.name))
    await mortal.client.remove(run.name)
    assert "no node has a state" in await asyncio.to_thread(
        unicron, "checkpoints", "memory", "no-task", url=mortal.cluster.url
    )


async def test_all_nodes_killed_at_once_and_brought_back_go_on_where_they_were(mortal, eager, plain, held, tmp_path):
    run = Run(mortal, eager, tmp_path, held)
    members = await run.until_held()
    for each in members:
        mortal.cluster.kill_node(each.node)
    for each in members:
        mortal.cluster.start_process(each.node)
    await mortal.until(lambda: mortal.of(StatesFound, task=run.name))
    held.open()
    [begun] = await mortal.until(run.begun)
    assert begun > 0
    await run.ends_as_undisturbed(plain, begun)


async def test_where_every_memory_is_lost_it_goes_on_from_storage(mortal, eager, plain, held, tmp_path):
    storage = tmp_path / "storage"
    storage.mkdir()
    run = Run(mortal, eager, tmp_path, held, checkpoints=str(storage), checkpoint_s=0.01)
    members = await run.until_held()
    stored = await mortal.until(lambda: [m for m in mortal.of(CheckpointStored, task=run.name) if m.iteration > 0])
    assert all(each.address.startswith(str(storage)) for each in stored)
    for each in members:
        mortal.cluster.kill_node(each.node)
        shutil.rmtree(memory_of(mortal, each.node))
    for each in members:
        mortal.cluster.start_process(each.node)
    [found, *_] = await mortal.until(lambda: mortal.of(CheckpointFound, task=run.name))
    assert found.stored.iteration >= stored[-1].iteration
    await run.ends_as_undisturbed(plain, found.stored.iteration)
    assert run.begun() == {found.stored.iteration}


async def test_a_paused_task_whose_node_is_drained_and_switched_off_goes_on_where_it_was(eager, plain, held, tmp_path):
    async with local_cluster(tmp_path) as scene:
        run = Run(scene, eager, tmp_path, held, max_workers=1)
        [only] = await run.until_held()
        await scene.client.pause(run.name)
        await scene.until(lambda: scene.of(Regroup, task=run.name, leaving=True))
        held.open()
        [left] = await scene.until(lambda: scene.of(StateKept, task=run.name))
        await scene.until_state(run.name, TaskState.WAITING)
        await scene.client.drain(only.node)
        [copied] = await scene.until(lambda: scene.of(StateCopied, task=run.name))
        assert copied.state == left.state.at(copied.state.location.node, copied.state.location.address)
        scene.cluster.leave(only.node)
        await scene.cluster.gone(only.node)
        await scene.client.pause(run.name, pause=False)
        await run.ends_as_undisturbed(plain)
        iterations = {each.iteration for each in scene.of(Regrouped, task=run.name) if each.node != only.node}
        assert iterations == {left.state.iteration}
        assert not scene.of(StatesFound, task=run.name), "nobody had to look for it"


async def test_a_copy_with_a_byte_flipped_is_used_by_nobody(scene, eager, plain, held, tmp_path):
    run = Run(scene, eager, tmp_path, held, max_workers=1)
    [only] = await run.until_held()
    [ready] = scene.of(WorkerReady, worker=only.worker)
    kill_and_flip(ready.pid, memory_of(scene, only.node).glob(f"{only.worker}.*.saved"))
    held.open()
    [begun] = await scene.until(run.begun)
    await run.ends_as_undisturbed(plain, begun)
    rejected = scene.of(StateRejected, task=run.name)
    assert {each.state.location.node for each in rejected} == {only.node}, "the node is named"


OWN = """
    import os
    from pathlib import Path
    folder = Path(os.environ["UNICRON_CHECKPOINT_DIR"])
    folder.mkdir(exist_ok=True)
    found = sorted(path.name for path in folder.iterdir())
    part = folder.parent / f"{os.environ['UNICRON_WORKER']}.part"  # somebody waits for a file, and reads it at once
    part.write_text(" ".join(found))
    part.rename(folder / os.environ["UNICRON_WORKER"])
"""


async def test_a_script_finds_its_own_checkpoints_again_when_it_is_started_again(scene, eager, held, tmp_path):
    own = write_script(tmp_path, textwrap.dedent(OWN) + eager.read_text())
    run = Run(scene, own, tmp_path, held, max_workers=1, checkpoints=str(tmp_path))
    [only] = await run.until_held()
    await scene.client.inject(only.node, "kill-worker", only.worker)
    held.open()
    await scene.ends(run.name)
    await scene.client.remove(run.name)
    await scene.client.submit(run.spec)  # under the same name
    await scene.until(lambda: len(list((tmp_path / f"{run.name}.own").iterdir())) == 3)
    await scene.client.remove(run.name)
    found = {path.name: path.read_text().split() for path in (tmp_path / f"{run.name}.own").iterdir()}
    one, two, three = sorted(found)
    assert found == {one: [], two: [one], three: [one, two]}
    assert f"{run.name}.own" not in await asyncio.to_thread(unicron, "checkpoints", "list", "--at", str(tmp_path))


async def test_a_storage_that_refuses_is_told_of_and_training_goes_on(scene, eager, plain, held, tmp_path):
    run = Run(scene, eager, tmp_path, held, checkpoints=str(tmp_path / "nothing"), checkpoint_s=0.01)
    await run.until_held()
    [failed, *_] = await scene.until(lambda: scene.of(CheckpointFailed, task=run.name))
    assert "is no directory: make it, or mount" in failed.reason
    await run.ends_as_undisturbed(plain)


def kill_and_flip(pid, paths):
    """Kill a worker, and flip a byte in what it has saved before its agent, in this very loop, sees that it is gone."""
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    for path in paths:
        data = bytearray(path.read_bytes())
        data[100] ^= 1
        path.write_bytes(data)


def memory_of(scene, node):
    return memory_dir((scene.cluster.root / "nodes" / node).resolve())


async def test_a_worker_whose_parameters_changed_takes_those_of_the_others_when_one_of_them_is_replaced(
    scene, plain, held, tmp_path
):
    env = {"FLIPPED": str(tmp_path / "flipped")}
    run = Run(scene, write_script(tmp_path, FLIPPING), tmp_path, held, max_workers=4, env=env)
    members, flipped = await run.until_held(8), (tmp_path / "flipped").read_text()
    victim = next(each for each in members if each.worker not in {flipped, members[0].worker})
    await scene.client.inject(victim.node, "kill-worker", victim.worker)
    await scene.until(lambda: scene.of(WorkerReady, worker=f"{run.name}-5"))
    await run.ends_as_undisturbed(plain)
    [told] = scene.of(StateDiverged, task=run.name)
    [node] = [each.node for each in members if each.worker == flipped]
    assert (told.worker, told.node, told.iteration, told.undecided) == (flipped, node, 8, False)
    assert told.digests.count(told.digests[told.replica]) == 1
    again = [each for each in scene.of(Regrouped, task=run.name, worker=flipped) if each.epoch > told.epoch]
    assert again[0].state_from, "in place"


async def test_what_is_no_number_on_one_worker_only_is_had_from_another_and_its_node_named(
    scene, plain, held, tmp_path
):
    faulty = tmp_path / "faulty"
    run = Run(scene, write_script(tmp_path, UNRULY), tmp_path, held, env={"FAULTY": str(faulty)})
    await scene.client.submit(run.spec)
    await run.ends_as_undisturbed(plain)
    await scene.until(lambda: scene.of(GradientNotFinite, task=run.name)[1:])
    told = scene.of(GradientNotFinite, task=run.name)
    assert [(each.iteration, each.microbatches, each.suspect) for each in told] == [(4, [2], False), (4, [2], True)]
    [ready] = scene.of(WorkerReady, worker=faulty.read_text())
    assert {each.node for each in told} == {ready.node}
    assert not scene.of(FailureDetected, task=run.name)
