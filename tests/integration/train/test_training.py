"""Real workers on a real cluster: what users run, what breaks, and what they are told."""

import asyncio
import itertools

import pytest
import pytest_asyncio
from helpers.training import TRAIN, difference, plain_run, running_cluster, task, write_script

from unicron.contracts.events import FailureDetected, NodeJoined, Regrouped, TaskStateChanged, WorkerExited
from unicron.contracts.failures import Severity
from unicron.contracts.tasks import TaskState

pytestmark = [pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(tmp_path_factory):
    async with running_cluster(tmp_path_factory.mktemp("cluster")) as scene:
        yield scene


names = (f"t{number}" for number in itertools.count())


async def healed_run(scene, tmp_path, script, accumulate="float64", iterations=16, fault=True):
    """Train on three workers, kill one in the middle, and return what rank 0 saved."""
    name, out = next(names), tmp_path / "healed.pt"
    hurry = tmp_path / "hurry"
    hurry.unlink(missing_ok=True)
    out.unlink(missing_ok=True)
    # slow until it is struck: it must not be through before
    env = {"OUT": str(out), "ACCUMULATE": accumulate, "PACE": "0.2", "HURRY": str(hurry)}
    await scene.client.submit(task(script, name, iterations=iterations, env=env))
    if fault:
        await scene.reached(name, 5)
        victim = (await scene.view(name)).members[1]
        await scene.client.inject(victim.node, "kill-worker", victim.worker)
    hurry.touch()
    view = await scene.until_state(name, TaskState.FINISHED, TaskState.FAILED)
    assert view.state is TaskState.FINISHED, view
    await scene.until(lambda: scene.of(WorkerExited, task=name, finished=True))
    assert await scene.finished(name) == list(range(iterations)), "each iteration is finished exactly once"
    return await scene.saved(out)


async def test_a_killed_worker_makes_no_difference_to_the_parameters(scene, tmp_path):
    script = write_script(tmp_path)
    healed = await healed_run(scene, tmp_path, script)
    plain = await asyncio.to_thread(plain_run, script, tmp_path / "plain.pt", ITERATIONS="16")
    assert difference(healed, plain) <= 1e-5
    assert healed["lr"] == plain["lr"], "a scheduler that is protected steps once an iteration too"


@pytest.mark.slow
async def test_with_float32_the_difference_is_that_of_another_number_of_workers(scene, tmp_path):
    script = write_script(tmp_path)
    plain = await asyncio.to_thread(plain_run, script, tmp_path / "plain.pt", ITERATIONS="16", ACCUMULATE="float32")
    undisturbed = await healed_run(scene, tmp_path, script, "float32", fault=False)
    healed = await healed_run(scene, tmp_path, script, "float32")
    other_order = difference(undisturbed, plain)
    assert other_order > 0, "in float32 the order of summation shows: the comparison means something"
    assert difference(healed, plain) <= 2 * other_order  # a rounding or two more or less


@pytest.mark.slow
async def test_a_script_that_raises_at_once_fails_with_its_own_traceback_and_nothing_loops(scene, tmp_path):
    script = write_script(tmp_path, 'raise ValueError("there is no such data set")\n')
    name = next(names)
    await scene.client.submit(task(script, name))
    view = await scene.until_state(name, TaskState.FAILED)
    assert "there is no such data set" in view.reason
    assert "script.py" in view.traceback
    assert "ValueError: there is no such data set" in view.traceback
    await asyncio.sleep(1.0)
    assert len([m for m in scene.journal if type(m).__name__ == "StartWorker" and m.task == name]) <= 6


@pytest.mark.slow
async def test_a_program_that_is_not_there_fails_the_task_and_says_so(scene, tmp_path):
    name = next(names)
    spec = task(tmp_path / "none.py", name)
    await scene.client.submit(type(spec)(name=name, command=["no-such-program"], workdir=str(tmp_path)))
    view = await scene.until_state(name, TaskState.FAILED)
    assert "no-such-program" in view.reason + view.traceback


@pytest.mark.slow
async def test_an_agent_that_crashes_finds_its_workers_again(scene, tmp_path):
    name = next(names)
    await scene.client.submit(task(write_script(tmp_path), name, iterations=400, env={"PACE": "0.02"}))
    await scene.reached(name, 5)
    members = (await scene.view(name)).members
    node = members[0].node
    joined = len(scene.of(NodeJoined, node=node))
    scene.cluster.kill(node)
    await asyncio.to_thread(scene.cluster.start_process, node)
    back = (await scene.until(lambda: scene.of(NodeJoined, node=node)[joined:]))[0]
    assert [worker.worker for worker in back.workers] == [members[0].worker]
    assert back.workers[0].ready
    reached = scene.iterations[-1].iteration
    await scene.reached(name, reached + 10)
    done = [message.iteration for message in scene.iterations if message.task == name]
    assert len(done) == len(set(done)), "no iteration is finished twice"
    assert not [m for m in scene.of(TaskStateChanged, task=name) if m.state in {TaskState.FAILED, TaskState.WAITING}]
    await scene.client.remove(name)


MISSES_THE_END = """
    import os
    from unicron.errors import GroupBrokenError
    from unicron.train.gradients import Gradients

    reduce, missed = Gradients.reduce, []

    def reduce_but_miss_the_end_once(self, group, bucket):
        reduce(self, group, bucket)
        if session.rank == 1 and session.iteration == 5 and bucket == self.buckets - 1 and not missed:
            missed.append(True)
            raise GroupBrokenError("the connection was reset behind the last bucket")

    if "UNICRON_WORKER" in os.environ:
        Gradients.reduce = reduce_but_miss_the_end_once
"""


@pytest.mark.slow
async def test_a_rank_that_missed_the_end_of_an_iteration_takes_the_state_of_one_that_did_not(scene, tmp_path):
    script = write_script(tmp_path, MISSES_THE_END + TRAIN)
    name, out = next(names), tmp_path / "out.pt"
    await scene.client.submit(task(script, name, iterations=12, env={"OUT": str(out), "PACE": "0.02"}))
    view = await scene.until_state(name, TaskState.FINISHED, TaskState.FAILED)
    assert view.state is TaskState.FINISHED, view
    [failure] = scene.of(FailureDetected, task=name)
    assert (failure.severity, failure.status) == (Severity.SEV3, "connection_reset")
    took = [message for message in scene.of(Regrouped, task=name, epoch=1) if message.state_from]
    assert [message.iteration for message in took] == [6], "the one rank that was behind took the state of iteration 6"
    plain = await asyncio.to_thread(plain_run, script, tmp_path / "plain.pt", ITERATIONS="12")
    healed = await scene.saved(out)
    assert difference(healed, plain) <= 1e-5
    assert healed["lr"] == plain["lr"], "the scheduler of the rank that was behind did not step twice"


DIES_BEHIND_THE_FIRST_BUCKET = """
    import os, pathlib, signal, time
    from unicron.train.gradients import Gradients

    begin = Gradients._begin

    def begin_or_die(self, group, bucket):
        if (session.rank, session.iteration, bucket) == (2, 5, 1) and not os.path.exists(os.environ["DIED"]):
            group.finish(self._overlap.begun[0])
            time.sleep(0.3)  # now the others have it too
            pathlib.Path(os.environ["DIED"]).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return begin(self, group, bucket)

    if "UNICRON_WORKER" in os.environ:
        Gradients._begin = begin_or_die
"""


@pytest.mark.slow
async def test_a_bucket_that_was_summed_before_a_fault_is_not_begun_again_by_those_who_compute_more(scene, tmp_path):
    script = write_script(tmp_path, DIES_BEHIND_THE_FIRST_BUCKET + TRAIN)
    name, out, died = next(names), tmp_path / "out.pt", tmp_path / "died"
    env = {"OUT": str(out), "DIED": str(died), "PACE": "0.02"}
    # the lost rank had one of four microbatches: of those that are left one computes it, in whose backward pass
    # buckets are begun, and one computes nothing
    await scene.client.submit(task(script, name, iterations=12, microbatches=4, env=env))
    view = await scene.until_state(name, TaskState.FINISHED, TaskState.FAILED)
    assert view.state is TaskState.FINISHED, view
    assert died.exists()
    plain = await asyncio.to_thread(plain_run, script, tmp_path / "plain.pt", ITERATIONS="12", UNICRON_MICROBATCHES="4")
    assert difference(await scene.saved(out), plain) <= 1e-5
