"""Scripts that are not computing, and machines that tell what is wrong with them."""

import asyncio

from helpers.scenes import scene, task
from helpers.waiting import elapse
from unicron_agent.stimuli import Logged

from unicron.contracts.events import (
    FailureDetected,
    WorkerAsleep,
    WorkerAway,
    WorkerExited,
    WorkerFinished,
    WorkerStalled,
)
from unicron.contracts.tasks import TaskState
from unicron.train.iteration import WorkerCore

EVALUATION_S = 50.0
"""More than who waits for others may wait for them: 20 s."""


class Evaluating(WorkerCore):
    """A script that, behind iteration 9, evaluates its model on one rank."""

    async def step(self):
        await super().step()
        if (self.iteration, self.membership.rank) == (10, 0):
            await elapse(EVALUATION_S)


@scene(nodes=2, worker=Evaluating)
async def test_an_evaluation_on_one_rank_is_no_failure_of_anybody(stage):
    await stage.submit(task(iterations=16, min_workers=2, max_workers=2))
    assert (await stage.until_state("t", TaskState.FINISHED, TaskState.FAILED)).state is TaskState.FINISHED
    assert len(stage.of(WorkerFinished)) == 2
    assert stage.of(FailureDetected) == []
    [away] = stage.of(WorkerAway)
    assert away.iteration == 10
    [waits] = stage.of(WorkerStalled)
    assert waits.worker != away.worker


class Sleeping(WorkerCore):
    """A script that sleeps in a microbatch for ever, where it is run by the second worker."""

    async def next_microbatch(self):
        microbatch = await super().next_microbatch()
        if (self.iteration, self._shell.name) == (10, "t-2"):
            self._shell.asleep = True
            await asyncio.Event().wait()
        return microbatch


@scene(nodes=2, worker=Sleeping)
async def test_a_script_that_sleeps_in_a_microbatch_is_found_long_before_one_that_may_be_busy(stage):
    await stage.submit(task(iterations=16, min_workers=2, max_workers=2))
    assert (await stage.until_state("t", TaskState.FINISHED, TaskState.FAILED)).state is TaskState.FINISHED
    [asleep], [stalled] = stage.of(WorkerAsleep), stage.of(WorkerStalled)
    [failure] = stage.of(FailureDetected)
    assert (asleep.worker, stalled.worker, stalled.asleep) == ("t-2", "t-2", True)
    assert stalled.limit_s < 10.0
    assert (failure.worker, failure.status) == ("t-2", "task_hang")
    assert "still answers while all its processes sleep" in failure.reason


@scene()
async def test_a_sick_node_is_given_up_and_its_worker_ended(stage):
    [_, victim, _] = await stage.running(task())
    text = "NVRM: Xid (PCI:0000:2b:00): 79, fallen off the bus"
    stage.machine(victim.node).agent.handle(Logged(text=text, status="xid_79"))
    [failure] = await stage.until(lambda: stage.of(FailureDetected))
    assert (failure.severity, failure.node, failure.method) == (1, victim.node, "device_health")
    assert text in failure.reason
    await stage.regrouped(world_size=2)
    await stage.until(lambda: stage.of(WorkerExited, worker=victim.worker, expected=True))
