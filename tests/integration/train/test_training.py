"""Real workers: scripts as users run them, faults, and error messages."""

import asyncio
import itertools

import pytest
from helpers import likenccl
from helpers.gate import gate
from helpers.local_cluster import local_cluster
from helpers.scripts import Run
from helpers.training import ITERATIONS, TRAIN, difference, plain_run, running_cluster, shared, task, write_script

from unicron.contracts.commands import Regroup, StartWorker
from unicron.contracts.events import FailureDetected, NodeJoined, Regrouped, WorkerExited
from unicron.contracts.failures import Severity

pytestmark = [pytest.mark.asyncio(loop_scope="module")]

scene = shared(local_cluster)


names = (f"t{number}" for number in itertools.count())


async def trained(scene, script, faults=(), iterations=ITERATIONS, **environment):
    """Train on three workers, strike one in each fifth iteration, and return what rank 0 saved."""
    name, out = next(names), script.with_name("out.pt")
    out.unlink(missing_ok=True)
    async with gate() as held:
        run = Run(scene, name, 3, held)
        if faults:
            held.close(5)
        await scene.client.submit(
            task(script, name, iterations=iterations, env={"OUT": str(out)} | environment | held.env)
        )
        found = []
        for number, (rank, fault) in enumerate(faults, 1):
            await run.at(5 * number, 3)  # each has one of its two microbatches behind it
            epoch = (await scene.view(name)).epoch
            found.append(await run.strike(rank, fault))
            await scene.until(lambda: [one for one in scene.of(Regroup, task=name, world_size=3) if one.epoch > epoch])  # noqa: B023
        held.open()
        await scene.ends(name)
    await scene.until(lambda: scene.of(WorkerExited, task=name, finished=True))
    scene.assert_none_twice(name)
    assert run.failures == found
    return await scene.saved(out)


async def test_neither_a_killed_worker_nor_a_stopped_one_makes_a_difference_to_the_parameters(scene, script, plain):
    healed = await trained(scene, script, [(1, "kill-worker"), (2, "stop-worker")])
    assert difference(healed, plain) <= 1e-5
    assert healed["lr"] == plain["lr"], "a scheduler that is protected steps once an iteration too"
    killed, stopped = scene.of(FailureDetected)
    assert (killed.severity, killed.status) == (Severity.SEV2, "exited_abnormally")
    assert (stopped.severity, stopped.status) == (Severity.SEV2, "task_hang")


@pytest.mark.slow
async def test_with_float32_the_difference_is_that_of_another_number_of_workers(scene, script):
    plain = await asyncio.to_thread(
        plain_run, script, script.parent / "float32.pt", ITERATIONS=str(ITERATIONS), ACCUMULATE="float32"
    )
    undisturbed = await trained(scene, script, ACCUMULATE="float32")
    healed = await trained(scene, script, [(1, "kill-worker")], ACCUMULATE="float32")
    other_order = difference(undisturbed, plain)
    assert other_order > 0, "in float32 the order of summation shows: the comparison means something"
    assert difference(healed, plain) <= 2 * other_order  # a rounding or two more or less


@pytest.mark.slow
async def test_what_fails_at_once_is_told_and_nothing_loops(scene, tmp_path):
    script, raises, absent = write_script(tmp_path, 'raise ValueError("no such data set")\n'), next(names), next(names)
    await scene.client.submit(task(script, raises))
    view = await scene.fails(raises)
    assert "no such data set" in view.reason
    assert "script.py" in view.traceback
    assert "ValueError: no such data set" in view.traceback
    spec = task(script, absent)
    await scene.client.submit(type(spec)(name=absent, command=["no-such-program"], workdir=str(tmp_path)))
    view = await scene.fails(absent)
    assert "no-such-program" in view.reason + view.traceback
    assert len(scene.of(StartWorker, task=raises)) <= 6


@pytest.mark.slow
async def test_an_agent_that_crashes_finds_its_workers_again(tmp_path):
    async with running_cluster(tmp_path, nodes=1, slots=3) as scene, gate() as held:
        held.close(5)
        await scene.client.submit(task(write_script(tmp_path), env=held.env))
        await held.held(3)
        await asyncio.to_thread(scene.cluster.kill, "node-1")
        await asyncio.to_thread(scene.cluster.start_process, "node-1")
        [_, back] = await scene.until(lambda: scene.of(NodeJoined)[1:] and scene.of(NodeJoined))
        assert {worker.worker for worker in back.workers} == {"t-1", "t-2", "t-3"}
        assert all(worker.ready for worker in back.workers)
        held.open()
        await scene.ends("t")
        scene.assert_none_twice("t")
        assert {each.epoch for each in scene.of(Regrouped)} == {0}


MISSES_THE_END = """
    import os
    from unicron.errors import GroupBrokenError
    from unicron.train.session.gradients import TorchGradients

    reduce, missed = TorchGradients.reduce, []

    async def reduce_but_miss_the_end_once(self, bucket):
        await reduce(self, bucket)
        if session.rank == 1 and session.iteration == 5 and bucket == self.buckets - 1 and not missed:
            missed.append(True)
            raise GroupBrokenError("the connection was reset behind the last bucket")

    if "UNICRON_WORKER" in os.environ:
        TorchGradients.reduce = reduce_but_miss_the_end_once
"""


@pytest.mark.slow
@pytest.mark.skipif(likenccl.is_used(), reason="no rank of GPUs goes on before all of them have the whole gradient")
async def test_a_rank_that_missed_the_end_of_an_iteration_takes_the_state_of_one_that_did_not(scene, tmp_path, plain):
    name, out = next(names), tmp_path / "out.pt"
    script = write_script(tmp_path, MISSES_THE_END + TRAIN)
    await scene.client.submit(task(script, name, iterations=ITERATIONS, env={"OUT": str(out)}))
    await scene.ends(name)
    [failure] = scene.of(FailureDetected, task=name)
    assert (failure.severity, failure.status) == (Severity.SEV3, "connection_reset")
    took = [message for message in scene.of(Regrouped, task=name, epoch=1) if message.state_from]
    assert [message.iteration for message in took] == [6], "the one rank that was behind took the state of iteration 6"
    healed = await scene.saved(out)
    assert difference(healed, plain) <= 1e-5
    assert healed["lr"] == plain["lr"], "the scheduler of the rank that was behind did not step twice"


WAITS_BEHIND_THE_FIRST_BUCKET = """
    import os
    import gate
    from unicron.train.session.gradients import TorchGradients

    begin, waited = TorchGradients._send, []

    def begin_later(self, bucket):
        if (session.iteration, bucket) == (5, 1) and not waited:
            waited.append(self._ranks.group.finish(self._active[0]))
            gate.at(5, phase="summed", rank=session.rank)
        return begin(self, bucket)

    if os.environ.get("UNICRON_WORKER", "")[-2:] in {"-1", "-2", "-3"}:  # those that are there from the beginning
        TorchGradients._send = begin_later
"""


@pytest.mark.slow
async def test_a_bucket_that_was_summed_before_a_fault_is_not_begun_again_by_those_who_compute_more(scene, tmp_path):
    script = write_script(tmp_path, WAITS_BEHIND_THE_FIRST_BUCKET + TRAIN)
    name, out = next(names), tmp_path / "out.pt"
    async with gate() as held:
        held.close(5, phase="summed", rank=2)
        # the lost rank had one of four microbatches: of those that are left one computes it, in whose backward pass
        # buckets are begun, and one computes nothing
        await scene.client.submit(task(script, name, iterations=12, microbatches=4, env={"OUT": str(out), **held.env}))
        await held.held()
        await scene.until(lambda: {at["rank"] for at in held.passed if at["phase"] == "summed"} == {0, 1})
        await Run(scene, name, 3, held).strike(2)
        held.open()
        await scene.ends(name)
    plain = await asyncio.to_thread(plain_run, script, tmp_path / "plain.pt", ITERATIONS="12", UNICRON_MICROBATCHES="4")
    assert difference(await scene.saved(out), plain) <= 1e-5
