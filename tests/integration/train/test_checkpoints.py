"""Real workers whose state nobody has any more: it is had from the memory of a node, and nothing is computed again."""

import asyncio
import itertools
import shutil
import textwrap
from collections import Counter

import pytest
import pytest_asyncio
from helpers.cli import data, unicron
from helpers.training import ITERATIONS, TRAIN, difference, running_cluster, task, write_script
from unicron_agent.network import memory_dir

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

UNRULY = TRAIN.replace("microbatches=6)", 'microbatches=6, finite=os.environ["RULE"])').replace(
    "            session.backward((model(x) - x.sum(1, keepdim=True)).square().mean())",
    """
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            if iteration == 4 and microbatch == 2:
                with open(os.environ["FAULTY"], "a+") as faulty:  # who computes it first, or whoever does
                    faulty.seek(0)
                    first = faulty.read() or faulty.write(os.environ["UNICRON_WORKER"]) and os.environ["UNICRON_WORKER"]
                loss = loss * float("nan") if first in {os.environ["UNICRON_WORKER"], "all"} else loss
            session.backward(loss)""",
)
"""The usual script, in which the loss of one microbatch is no number, on one worker or on all."""

FLIPPING = TRAIN.replace(
    "        for microbatch",
    """
        flips = str(iteration) == os.environ.get("FLIP_AT") and session.rank == int(os.environ["FLIP"])
        if flips and not os.path.exists(os.environ["FLIPPED"]):
            with torch.no_grad(), open(os.environ["FLIPPED"], "x") as told:
                model[0].weight[3, 5] += float(os.environ["BY"])
                told.write(os.environ["UNICRON_WORKER"])
        for microbatch""",
).replace(
    "            if not os.path",
    """
            while str(iteration) == os.environ.get("FLIP_AT") and not os.path.exists(os.environ["HELD"]):
                time.sleep(0.01)
            if not os.path""",
)
"""The usual script, in which one worker's parameters change, and in that iteration all wait."""

DYING = TRAIN.replace(
    "    for iteration",
    """
    from unicron.train.packed import Packing
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

names = (f"t{number}" for number in itertools.count())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(tmp_path_factory, plain):  # that one first: it blocks the loop
    async with running_cluster(tmp_path_factory.mktemp("cluster")) as scene:
        yield scene


class Run:
    """A task that trains for a while, and what comes of it."""

    def __init__(self, scene, script, tmp_path, pace=None, env=(), **fields):
        self.scene, self.name = scene, next(names)
        self.out, self._hurry, self._done = (tmp_path / name for name in ("out.pt", "hurry", "done"))
        if pace is None:  # a fifth of a second for an iteration of six: it must not be through before it is struck
            pace = 0.2 * fields.get("max_workers", 3) / 6
        env = {"ACCUMULATE": "float64", "PACE": str(pace), "OUT": str(self.out), **dict(env)}
        env |= {"HURRY": str(self._hurry), "DONE": str(self._done)}
        self.spec = task(script, self.name, iterations=ITERATIONS, env=env, **fields)

    async def until_protected(self):
        await self.scene.client.submit(self.spec)
        await self.scene.reached(self.name, 5)
        await self.scene.until(lambda: self.scene.of(StateSecured, task=self.name))
        return (await self.scene.view(self.name)).members

    def hurry(self):
        """Have it train without a pause from now on."""
        self._hurry.touch()

    async def ends_as_undisturbed(self, plain, again=0):
        self.hurry()
        view = await self.scene.until_state(self.name, TaskState.FINISHED, TaskState.FAILED)
        assert view.state is TaskState.FINISHED, view
        result = await self.result()
        await self.scene.reached(self.name, ITERATIONS - 1)
        assert set(map(int, self._done.read_text().split())) == set(range(ITERATIONS)), "as the script wrote it down"
        told = Counter(message.iteration for message in self.scene.iterations if message.task == self.name)
        assert sum(told.values()) - len(told) <= again, f"computed again: {told - Counter(range(ITERATIONS))}"
        assert difference(result, plain) <= 1e-5

    async def result(self):
        """Return what the script has written, once it is through with that."""
        return await self.scene.saved(self.out)


async def test_the_only_worker_killed_while_it_writes_its_state_goes_on_from_the_one_before(scene, plain, tmp_path):
    env = {name.upper(): str(tmp_path / name) for name in ("died", "wrote")}
    run = Run(scene, write_script(tmp_path, DYING), tmp_path, max_workers=1, env=env)
    await run.until_protected()
    await scene.until((tmp_path / "died").exists)
    await run.ends_as_undisturbed(plain, again=ITERATIONS)
    taken = [each.iteration for each in scene.of(Regrouped, task=run.name) if each.state_from]
    assert taken == [int((tmp_path / "wrote").read_text().split()[-1])]
    told = Counter(each.iteration for each in scene.iterations if each.task == run.name)
    assert all(iteration >= taken[0] for iteration, count in told.items() if count > 1), "and computes no more again"
    assert not scene.of(StateRejected, task=run.name), "what is not whole is offered to nobody"


async def test_users_see_what_lies_in_which_memories(scene, script, tmp_path):
    run = Run(scene, script, tmp_path, pace=0.3, max_workers=1)
    [only] = await run.until_protected()
    [secured] = scene.of(StateSecured, task=run.name)
    ask = ("checkpoints", "memory", run.name)
    rows = await asyncio.to_thread(data, *ask, url=scene.cluster.url)
    assert {(row["task"], row["worker"], row["place"]) for row in rows} == {(run.name, only.worker, 0)}
    assert [row["iteration"] for row in rows] == sorted((row["iteration"] for row in rows), reverse=True)
    older = rows[-1]
    assert sorted(older["nodes"]) == sorted([only.node, *secured.nodes])
    assert older["size"] > 10_000
    text = await asyncio.to_thread(unicron, *ask, url=scene.cluster.url)
    assert f"{run.name} " in text
    assert secured.nodes[0] in text
    status = await asyncio.to_thread(unicron, "status", url=scene.cluster.url)
    assert "2 nodes" in next(line for line in status.splitlines() if line.startswith(run.name))
    await scene.client.remove(run.name)
    assert "no node has a state" in await asyncio.to_thread(
        unicron, "checkpoints", "memory", "no-task", url=scene.cluster.url
    )


async def test_all_nodes_killed_at_once_and_brought_back_go_on_where_they_were(scene, script, plain, tmp_path):
    run = Run(scene, script, tmp_path)
    members = await run.until_protected()
    for each in members:
        scene.cluster.kill_node(each.node)
    await asyncio.sleep(1.0)
    for each in members:
        scene.cluster.start_process(each.node)
    await run.ends_as_undisturbed(plain, again=1)


async def test_a_paused_task_whose_node_is_drained_and_switched_off_goes_on_where_it_was(
    scene, script, plain, tmp_path
):
    run = Run(scene, script, tmp_path, max_workers=1)
    [only] = await run.until_protected()
    await scene.client.pause(run.name)
    [left] = await scene.until(lambda: scene.of(StateKept, task=run.name))
    await scene.until_state(run.name, TaskState.WAITING)
    await scene.client.drain(only.node)
    [copied] = await scene.until(lambda: scene.of(StateCopied, task=run.name))
    assert copied.state == left.state.at(copied.state.location.node, copied.state.location.address)
    scene.cluster.kill_node(only.node)
    shutil.rmtree(memory_of(scene, only.node))
    try:
        await scene.client.pause(run.name, pause=False)
        await run.ends_as_undisturbed(plain)
    finally:
        scene.cluster.start_process(only.node)
        await scene.client.drain(only.node, drain=False)
    iterations = {each.iteration for each in scene.of(Regrouped, task=run.name) if each.node != only.node}
    assert iterations == {left.state.iteration}
    assert not scene.of(StatesFound, task=run.name), "nobody had to look for it"


async def test_a_copy_with_a_byte_flipped_is_used_by_nobody(scene, script, plain, tmp_path):
    run = Run(scene, script, tmp_path, max_workers=1)
    [only] = await run.until_protected()
    [secured] = scene.of(StateSecured, task=run.name)
    assert secured.nodes, "another node has a copy"
    await scene.client.inject(only.node, "stop-worker", only.worker)
    for path in memory_of(scene, only.node).glob(f"{only.worker}.*.saved"):
        flip(path)
    await scene.client.inject(only.node, "kill-worker", only.worker)
    await run.ends_as_undisturbed(plain, again=1)  # what was on its way to the other node when it stopped
    rejected = scene.of(StateRejected, task=run.name)
    assert {each.state.location.node for each in rejected} == {only.node}, "the node is named"
    assert {each.iteration for each in scene.of(Regrouped, task=run.name)}.isdisjoint({1, 2, 3, 4})


@pytest.mark.parametrize("workers", [3, 2], ids=["all-nodes", "two-of-a-group"])
async def test_where_every_memory_is_lost_it_goes_on_from_storage(scene, script, plain, tmp_path, workers):
    storage = tmp_path / "storage"
    storage.mkdir()
    run = Run(scene, script, tmp_path, pace=0.8, checkpoints=str(storage), checkpoint_s=0.3, max_workers=workers)
    members = await run.until_protected()
    assert len(members) == workers
    stored = await scene.until(lambda: scene.of(CheckpointStored, task=run.name))
    assert all(each.address.startswith(str(storage)) for each in stored)
    for each in members:
        scene.cluster.kill_node(each.node)
        shutil.rmtree(memory_of(scene, each.node))
    run.hurry()
    for each in members:
        scene.cluster.start_process(each.node)
    found = (await scene.until(lambda: scene.of(CheckpointFound, task=run.name)))[0].stored
    assert found.iteration >= stored[-1].iteration
    await run.ends_as_undisturbed(plain, again=ITERATIONS - found.iteration)
    begun = min(each.iteration for each in scene.of(Regrouped, task=run.name) if each.state_from == found.folder)
    assert begun == found.iteration > 0


OWN = """
    import os, time
    from pathlib import Path
    folder = Path(os.environ["UNICRON_CHECKPOINT_DIR"])
    folder.mkdir(exist_ok=True)
    found = sorted(path.name for path in folder.iterdir())
    part = folder.parent / f"{os.environ['UNICRON_WORKER']}.part"  # somebody waits for a file, and reads it at once
    part.write_text(" ".join(found))
    part.rename(folder / os.environ["UNICRON_WORKER"])
"""


async def test_a_script_finds_its_own_checkpoints_again_when_it_is_started_again(scene, script, tmp_path):
    own = write_script(tmp_path, textwrap.dedent(OWN) + script.read_text())
    run = Run(scene, own, tmp_path, pace=0.05, max_workers=1, checkpoints=str(tmp_path))
    [only] = await run.until_protected()
    await scene.client.inject(only.node, "kill-worker", only.worker)
    await scene.until_state(run.name, TaskState.FINISHED)
    await scene.client.remove(run.name)
    await scene.client.submit(run.spec)  # under the same name
    await scene.until(lambda: len(list((tmp_path / f"{run.name}.own").iterdir())) == 3)
    await scene.client.remove(run.name)
    found = {path.name: path.read_text().split() for path in (tmp_path / f"{run.name}.own").iterdir()}
    one, two, three = sorted(found)
    assert found == {one: [], two: [one], three: [one, two]}
    assert f"{run.name}.own" not in await asyncio.to_thread(unicron, "checkpoints", "list", "--at", str(tmp_path))


async def test_a_storage_that_refuses_is_told_of_and_training_goes_on(scene, script, plain, tmp_path):
    run = Run(scene, script, tmp_path, pace=0.1, checkpoints=str(tmp_path / "nothing"), checkpoint_s=0.3)
    await run.until_protected()
    await run.ends_as_undisturbed(plain)
    failed = (await scene.until(lambda: scene.of(CheckpointFailed, task=run.name)))[0]
    assert "is no directory: make it, or mount" in failed.reason


def flip(path):
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)


def memory_of(scene, node):
    return memory_dir((scene.cluster.root / "nodes" / node).resolve())


async def until_held(scene, name, iteration):
    """Wait until two nodes have what a task has saved in an iteration: the one of its worker, and one with a copy."""
    async with asyncio.timeout(60):
        while True:
            held = [{(each.task, each.iteration) for each in await scene.client.states(n)} for n in scene.cluster.nodes]
            if sum((name, iteration) in each for each in held) >= 2:
                return
            await asyncio.sleep(0.02)


async def hold_in_iteration_8(scene, script, tmp_path, rank, by="0.5", **fields):
    """Run a task in which the parameters of one worker change, and which goes no further before `held` is there."""
    env = {
        "FLIP_AT": "8",
        "FLIP": str(rank),
        "BY": by,
        "HELD": str(tmp_path / "held"),
        "FLIPPED": str(tmp_path / "flipped"),
    }
    run = Run(scene, script, tmp_path, env=env, **{"max_workers": 4, **fields})
    await scene.client.submit(run.spec)
    await scene.until(lambda: (tmp_path / "flipped").exists() and (tmp_path / "flipped").read_text())
    members = (await scene.view(run.name)).members
    return run, members, (tmp_path / "flipped").read_text()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def wide(tmp_path_factory, plain):
    async with running_cluster(tmp_path_factory.mktemp("wide"), nodes=4) as scene:
        yield scene


@pytest.fixture(scope="module")
def flipping(tmp_path_factory):
    return write_script(tmp_path_factory.mktemp("flipping"), FLIPPING)


async def test_a_worker_whose_parameters_changed_takes_those_of_the_others_when_one_of_them_is_replaced(
    wide, flipping, plain, tmp_path
):
    run, members, flipped = await hold_in_iteration_8(wide, flipping, tmp_path, rank=2)
    victim = next(each for each in members if each.worker not in {flipped, members[0].worker})
    await wide.client.inject(victim.node, "kill-worker", victim.worker)
    await wide.until(lambda: [each for each in wide.of(WorkerReady, task=run.name) if each.worker == f"{run.name}-5"])
    (tmp_path / "held").touch()
    await run.ends_as_undisturbed(plain)
    [told] = wide.of(StateDiverged, task=run.name)
    [node] = [each.node for each in members if each.worker == flipped]
    assert (told.worker, told.node, told.iteration, told.undecided) == (flipped, node, 8, False)
    assert told.digests.count(told.digests[told.replica]) == 1
    again = [each for each in wide.of(Regrouped, task=run.name, worker=flipped) if each.epoch > told.epoch]
    assert again[0].state_from, "in place"


async def unruly_run(wide, unruly, tmp_path, rule, faulty="all"):
    (tmp_path / "faulty").write_text(faulty)
    run = Run(wide, unruly, tmp_path, env={"RULE": rule, "FAULTY": str(tmp_path / "faulty")})
    await wide.client.submit(run.spec)
    return run, await wide.until_state(run.name, TaskState.FINISHED, TaskState.FAILED)


async def test_what_is_no_number_on_one_worker_only_is_had_from_another_and_its_node_named(
    wide, unruly, plain, tmp_path
):
    run, view = await unruly_run(wide, unruly, tmp_path, "retry", faulty="")
    assert view.state is TaskState.FINISHED, view
    await run.ends_as_undisturbed(plain)
    told = await wide.until(lambda: wide.of(GradientNotFinite, task=run.name)[1:] and wide.of(GradientNotFinite))
    told = [each for each in told if each.task == run.name]
    assert [(each.iteration, each.microbatches, each.suspect) for each in told] == [(4, [2], False), (4, [2], True)]
    [ready] = wide.of(WorkerReady, worker=(tmp_path / "faulty").read_text())
    assert {each.node for each in told} == {ready.node}
    assert not wide.of(FailureDetected, task=run.name)


@pytest.fixture(scope="module")
def unruly(tmp_path_factory):
    return write_script(tmp_path_factory.mktemp("unruly"), UNRULY)
