"""Stragglers of a job that runs: a slow rank is found and named, and recording can be switched while it trains."""

import asyncio

import pytest
from helpers.cli import UNICRON, call, reaching
from helpers.training import SMALL, running_cluster, task, write_script

from unicron.contracts.events import IterationFinished, StepTimed
from unicron.contracts.stragglers import RecordingSwitched, StragglerDetected
from unicron.contracts.tasks import TaskState
from unicron.contracts.timings import OPERATIONS

pytestmark = pytest.mark.slow

SLOW = SMALL.replace("Session()", "Session(gc_every=2)").replace("0.02", "0.05 if session.rank == 1 else 0.02")


async def unicron(scene, *words):
    """Run `unicron straggler` against the cluster; return what it prints."""
    done = await asyncio.to_thread(call, [*UNICRON, "straggler", *words], reaching(scene.cluster.url))
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.exhaustive("who is slow is shown from timings; with real ones it takes many iterations")
async def test_a_slow_rank_is_found_and_named_and_recording_stops_when_told(tmp_path, monkeypatch):
    monkeypatch.setenv("UNICRON_STRAGGLER_WINDOW", "4")
    async with running_cluster(tmp_path, nodes=2, slots=2) as scene:
        client, records = scene.client, {}

        async def listen():
            async for message in client.telemetry(StepTimed):
                records[message.iteration, message.rank] = message

        listening = asyncio.create_task(listen())
        spec = task(write_script(tmp_path, SLOW), "slow", min_workers=3, iterations=100_000)
        await client.submit(spec)
        await scene.until_state("slow", TaskState.RUNNING)
        await scene.until(lambda: len(records) >= 3)
        assert {iteration % 10 for iteration, _ in records} == {0}, "a tenth is recorded without being asked for"
        assert "1 of the iterations" in await unicron(scene, "on", "slow", "--share", "1")
        [found] = await scene.until(lambda: scene.of(StragglerDetected))
        view = await scene.view("slow")
        culprit = view.members[1]
        assert (found.worker, found.node, found.slot) == (culprit.worker, culprit.node, culprit.slot)
        assert found.task == "slow"
        assert found.diagnosis == "slow-worker"
        assert found.gain > found.slowdown > 1.1
        assert found.last > found.first >= 0
        assert not found.drain, "nobody said that it may"
        seen = await client.straggler("slow")
        assert seen.alert == "slow-worker"
        assert {window.worker for window in seen.history if window.slow} == {culprit.worker}

        shown = await unicron(scene, "status", "slow")
        assert "alert: slow-worker" in shown
        assert culprit.worker in shown

        whole = records[max(iteration for iteration, rank in records if iteration % 2 == 1 and rank == 0), 0]
        names = [OPERATIONS[op.kind] for op in whole.ops]
        assert names == [*["forward-compute", "backward-compute"] * 2, "gc", "grads-reduce-scatter", "optimizer"]
        assert [op.microbatch for op in whole.ops[:4]] == [0, 0, 3, 3]

        assert "nothing is recorded" in await unicron(scene, "off", "slow")
        await scene.until(lambda: [fact.share for fact in scene.of(RecordingSwitched)] == [1.0, 0.0])
        # an agent that waits for a turn tells its workers late; a tenth, or all, would be recorded within so many
        await scene.until(lambda: max(m.iteration for m in scene.iterations) > max(records)[0] + 25)
        last = max(records)[0]
        await scene.reached("slow", last + 37)
        assert max(records)[0] == last
        assert isinstance(scene.iterations[-1], IterationFinished)

        assert len(scene.of(StragglerDetected)) == 1, "once an episode"
        await client.remove("slow")
        listening.cancel()
