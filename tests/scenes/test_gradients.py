"""Tasks whose gradient is not finite, by the rule that the script has given."""

from functools import partial

from helpers.scenes import scene, task
from unicron_simulator.storms.training import Trainer

from unicron.contracts.events import FailureDetected, GradientNotFinite, WorkerReady
from unicron.contracts.tasks import TaskState
from unicron.contracts.worker import Raised
from unicron.errors import NonFiniteGradientError
from unicron.train.worker.iteration import WorkerCore

BAD = (4, 2)
"""Iteration and microbatch."""


class Unruly(Trainer):
    """A script in which one microbatch has no finite gradient, whoever computes it."""

    async def _train(self):
        try:
            await super()._train()
        except NonFiniteGradientError as error:
            self.send(Raised(iteration=BAD[0], exception=type(error).__name__, text=str(error), traceback=""))
            self.end(1, None)

    @property
    def is_sum_finite(self):
        return not (self.core.iteration == BAD[0] and BAD[1] in self._sums)


class Sick(Unruly):
    """That is so on one node only: where it is computed as long as nobody is lost."""

    @property
    def is_sum_finite(self):
        return self.host.name != "node-3" or super().is_sum_finite


def unruly(rule, script=Unruly):
    return scene(script=script, worker=partial(WorkerCore, rule=rule))


async def until_over(stage):
    await stage.submit(task(iterations=8))
    return await stage.until_state("t", TaskState.FINISHED, TaskState.FAILED)


@unruly("skip")
async def test_an_update_whose_gradient_is_no_number_is_skipped_and_the_microbatch_named(stage):
    assert (await until_over(stage)).state is TaskState.FINISHED
    [told] = stage.of(GradientNotFinite)
    assert (told.iteration, told.microbatches, told.rule) == (4, [2], "skip")
    assert stage.done("t") == list(range(8))


@unruly("stop")
async def test_a_task_that_is_to_stop_at_such_a_gradient_fails_and_nothing_is_restarted(stage):
    view = await until_over(stage)
    assert view.state is TaskState.FAILED
    [told] = stage.of(GradientNotFinite)
    assert f"that of microbatch 2 on rank {told.rank} ({told.worker})" in view.reason
    assert not stage.of(FailureDetected)
    assert len(stage.of(WorkerReady)) == 3


@unruly("retry", Sick)
async def test_what_is_no_number_on_one_worker_only_is_had_from_another_and_its_node_named(stage):
    assert (await until_over(stage)).state is TaskState.FINISHED
    told = stage.of(GradientNotFinite)
    assert [(each.iteration, each.microbatches, each.suspect) for each in told] == [(4, [2], False), (4, [2], True)]
    assert {each.node for each in told} == {"node-3"}
    assert not stage.of(FailureDetected)


@unruly("retry")
async def test_what_is_no_number_on_another_worker_either_ends_the_task(stage):
    view = await until_over(stage)
    assert view.state is TaskState.FAILED
    assert "nor is it when computed again: that of microbatch 2 on rank" in view.reason
    first = stage.of(GradientNotFinite)
    assert (first[0].microbatches, first[0].rule, any(each.suspect for each in first)) == ([2], "retry", False)
    assert f"({first[0].worker})" not in view.reason, "it was computed by another"
