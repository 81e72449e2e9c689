"""Workers and nodes that fail, leave, return or hang: reactions, alerts and health."""

import asyncio
import contextlib
import os
from collections import Counter
from functools import partial

import pytest
from helpers.scenes import scene, task
from helpers.waiting import elapse
from unicron_agent.outbox import Outbox
from unicron_agent.stimuli import Logged
from unicron_console.pages import Pages
from unicron_simulator.storms.invariants import SERVICES
from unicron_simulator.storms.training import Trainer
from unicron_simulator.storms.world import LEASE_TTL_S

from unicron.contracts.commands import StartWorker
from unicron.contracts.events import (
    FailureDetected,
    NodeDrained,
    NodeGone,
    NodeJoined,
    Regrouped,
    StandbyDied,
    StandbyRevived,
    TaskBroken,
    TaskRecovered,
    TaskStateChanged,
    WorkerAsleep,
    WorkerAway,
    WorkerExited,
    WorkerFinished,
    WorkerStalled,
)
from unicron.contracts.failures import Severity
from unicron.contracts.tasks import NodeState, TaskState
from unicron.errors import BusUnavailableError
from unicron.observe.cluster import ClusterPicture
from unicron.service import health
from unicron.train.worker.iteration import WorkerCore


def none_twice(stage):
    assert [iteration for iteration, count in Counter(stage.done("t")).items() if count > 1] == []


async def all_up(stage):
    return {view.state for view in (await stage.status()).nodes} == {NodeState.UP}


@pytest.mark.parametrize("seconds", [2.5, 90.0, 3600.0])
@pytest.mark.parametrize("how", ["stopped", "asleep"])
@scene(nodes=2)
async def test_what_stands_still_all_together_goes_on_and_nobody_is_to_blame(stage, how, seconds):
    before = {member.worker for member in await stage.running(task(max_workers=2))}
    if how == "stopped":
        stage.world.clock.advance(seconds)
    else:
        for clock in stage.world.clocks.values():
            clock.ahead_s += seconds
    await elapse(30.0)
    assert {member.worker for member in (await stage.view("t")).members} == before
    assert not stage.of(FailureDetected)


@scene()
async def test_a_stopped_worker_is_replaced(stage):
    [*_, victim] = await stage.running(task())
    [first, *_] = stage.of(Regrouped, world_size=3)
    stage.worker(victim.worker).pause()
    [failure] = await stage.until(lambda: stage.of(FailureDetected))
    assert (failure.severity, failure.status, failure.worker) == (Severity.SEV2, "task_hang", victim.worker)
    [stalled] = stage.of(WorkerStalled)
    assert stalled.limit_s < 2, "long before one that may be busy"
    whole = await stage.regrouped(world_size=3, above=first.epoch)
    between = [each for each in stage.of(Regrouped) if first.epoch < each.epoch < whole.epoch]
    assert between, "the survivors do not wait for the new worker"
    assert all(each.world_size == 2 and each.kept + each.recomputed for each in between)
    assert victim.worker not in {member.worker for member in (await stage.view("t")).members}
    none_twice(stage)


@scene()
async def test_a_worker_starts_as_soon_as_there_is_a_standby_again_and_nobody_is_to_blame(stage):
    [*_, victim] = await stage.running(task())
    stage.machine(victim.node).kill_standby(20.0)
    stage.kill(victim.worker)
    await stage.until(lambda: len(stage.of(StandbyDied)) == 3)
    assert victim.node in next(view.problem for view in (await stage.status()).nodes if view.problem)
    [revived] = await stage.until(lambda: stage.of(StandbyRevived))
    [_, recovered] = await stage.until(lambda: stage.of(TaskRecovered)[1:] and stage.of(TaskRecovered))
    assert recovered.at > revived.at, "it can't have been started before"
    assert [failure.worker for failure in stage.of(FailureDetected)] == [victim.worker]
    assert [died.deaths for died in stage.of(StandbyDied)] == list(range(1, 1 + len(stage.of(StandbyDied))))


DEAD_S = 250.0
"""Longer than a worker may take to start."""


@scene()
@pytest.mark.parametrize("spare", [True, False])
async def test_where_no_standby_lives_a_task_goes_to_another_node_or_waits_and_goes_on_by_itself(stage, spare):
    [*_, victim] = await stage.running(task(max_workers=2 if spare else 3, min_workers=2 if spare else 3))
    stage.machine(victim.node).kill_standby(DEAD_S)
    stage.kill(victim.worker)
    await stage.until(lambda: stage.of(NodeDrained, node=victim.node))
    if spare:
        await stage.until(lambda: stage.of(TaskRecovered)[1:])
        assert victim.node not in {member.node for member in (await stage.view("t")).members}
    await stage.wait(DEAD_S)
    await stage.until(lambda: stage.of(StandbyRevived))
    await stage.until(lambda: all_up(stage))
    await stage.until(lambda: stage.of(TaskRecovered)[1:])
    assert {failure.worker for failure in stage.of(FailureDetected)} == {victim.worker}, "nobody else is to blame"
    assert not stage.of(TaskBroken)


@scene()
async def test_a_start_that_waits_for_a_standby_can_be_called_off(stage):
    [*_, victim] = await stage.running(task())
    stage.machine(victim.node).kill_standby(DEAD_S)
    stage.kill(victim.worker)
    [start] = await stage.until(lambda: [each for each in stage.of(StartWorker) if each.node == victim.node][1:])
    await stage.client.remove("t")
    [ended] = await stage.until(lambda: stage.of(WorkerExited, worker=start.worker))
    assert ended.expected
    stage.machine(victim.node).fatal_until = 0.0
    await stage.until(lambda: stage.of(StandbyRevived))


@scene()
async def test_an_agent_that_crashes_finds_its_workers_again(stage):
    [first, *_] = await stage.running(task())
    await stage.kill_agent(first.node)
    stage.boot(first.node)
    [_, back] = await stage.until(
        lambda: stage.of(NodeJoined, node=first.node)[1:] and stage.of(NodeJoined, node=first.node)
    )
    assert [(worker.worker, worker.ready) for worker in back.workers] == [(first.worker, True)]
    await stage.reached("t", stage.done("t")[-1] + 10)
    none_twice(stage)
    assert not stage.of(FailureDetected)
    assert {each.epoch for each in stage.of(Regrouped)} == {0}
    assert {each.state for each in stage.of(TaskStateChanged)}.isdisjoint({TaskState.FAILED, TaskState.RECOVERING})


@scene()
async def test_an_agent_that_is_told_to_stop_leaves_and_its_tasks_go_on(stage):
    [first, *_] = await stage.running(task())
    await stage.leave(first.node)
    smaller = await stage.regrouped(world_size=2)
    await stage.until(lambda: stage.of(NodeGone, node=first.node))
    await stage.reached("t", stage.done("t")[-1] + 10)
    assert not stage.of(FailureDetected)
    stage.boot(first.node)
    await stage.regrouped(world_size=3, above=smaller.epoch)
    none_twice(stage)


@scene()
async def test_a_node_that_is_back_before_it_is_missed_gets_new_workers(stage):
    [_, second, _] = await stage.running(task())
    await stage.lose_power(second.node)
    stage.boot(second.node)
    await stage.regrouped(world_size=3, above=0)
    [failure] = stage.of(FailureDetected)
    assert (failure.severity, failure.worker) == (Severity.SEV2, second.worker), "it was not given up"
    await stage.rest()
    assert await all_up(stage)


@scene()
async def test_a_node_that_was_given_up_though_it_lives_comes_back_by_itself(stage):
    [_, second, _] = await stage.running(task())
    link = stage.machine(second.node).agent.link
    link.interrupt()
    [failure] = await stage.until(lambda: stage.of(FailureDetected, node=second.node, task=""))
    assert (failure.severity, failure.status) == (Severity.SEV1, "lost_connection")
    smaller = await stage.regrouped(world_size=2)
    link.cut = False  # as if its agent had been stopped: it sees no connection end
    link._healed.set()
    await stage.regrouped(world_size=3, above=smaller.epoch)
    none_twice(stage)
    assert await all_up(stage)


@scene()
async def test_a_task_whose_nodes_were_all_given_up_goes_on_where_it_was_when_they_are_back(stage):
    nodes = [member.node for member in await stage.running(task())]
    for node in nodes:
        await stage.kill_agent(node)
    for node in nodes:
        await stage.until(lambda node=node: stage.of(FailureDetected, node=node, severity=Severity.SEV1))
    stage.boot(*nodes)
    assert (await stage.regrouped(world_size=3, above=0)).iteration > 5
    none_twice(stage)


class RaisesAtOnce(Trainer):
    """A script that gets nowhere."""

    async def _train(self):
        self.throw("there is no such data set")


@scene(script=RaisesAtOnce)
async def test_a_script_that_raises_at_once_fails_and_nothing_loops(stage):
    await stage.submit(task())
    view = await stage.until_state("t", TaskState.FAILED)
    assert "there is no such data set" in view.reason
    assert view.traceback == "there is no such data set"
    await stage.wait(60)
    assert len(stage.of(StartWorker)) <= 6


@scene()
async def test_the_only_worker_of_a_task_takes_its_state_along_when_its_node_is_drained(stage):
    [only] = await stage.running(task(max_workers=1))
    await stage.client.drain(only.node)
    moved = await stage.regrouped(above=0)
    await stage.reached("t", moved.iteration + 5)
    [member] = (await stage.view("t")).members
    assert member.node != only.node
    assert not stage.of(FailureDetected)
    none_twice(stage)
    await stage.client.drain(only.node, drain=False)


# --- scripts that are not computing, and machines that tell what is wrong with them -----------------------------------


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
        if (self.iteration, self._ranks.name) == (10, "t-2"):
            self._ranks.asleep = True
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


# --- which services and nodes are healthy while something is wrong with them ------------------------------------------


@scene(nodes=1)
async def test_a_service_is_healthy_while_an_instance_of_it_lives(stage, monkeypatch):
    @contextlib.asynccontextmanager
    async def connected(settings, name, *, patient):
        assert not patient, "Docker waits for 10 s"
        yield stage.client.bus

    monkeypatch.setattr(health, "connected", connected)
    check = partial(health.check, health.HealthSettings())
    for name in SERVICES:
        await check(name)
        [instance] = stage.world.instances[name]
        await stage.world.kill_service(instance)
        await stage.wait(2 * LEASE_TTL_S)
        with pytest.raises(BusUnavailableError, match=f"no instance of {name} is active"):
            await check(name)
        stage.world.start_service(name)
        await stage.wait(2 * LEASE_TTL_S)
        await check(name)


@scene(nodes=1)
async def test_a_node_is_healthy_while_its_agent_reaches_the_bus(stage, tmp_path, monkeypatch):
    alive, clock, machine = tmp_path / "alive", stage.world.clock, stage.machine("node-1")

    def touch():
        alive.touch()
        os.utime(alive, (clock.now(), clock.now()))

    async def broken(subject, data):
        raise BusUnavailableError("the connection is down")

    await machine.crash_agent()
    machine.make_outbox = lambda *given: Outbox(*given, touch)
    machine.boot()
    await stage.until(alive.exists)
    health._check_agent(alive, clock.now())
    with monkeypatch.context() as away:
        away.setattr(machine.agent.link, "publish_telemetry", broken)
        await stage.wait(1.5 * health.SILENT_S)
        with pytest.raises(BusUnavailableError, match="its agent has sent the bus nothing for 15 s"):
            health._check_agent(alive, clock.now())
    await stage.wait(1.0)
    health._check_agent(alive, clock.now())


# --- the console's picture of a cluster in which much happens is what the registry knows ------------------------------


@scene(nodes=3, slots=2)
async def test_the_picture_is_what_the_registry_knows_whatever_happens(stage):
    picture, now = ClusterPicture(), stage.world.clock.now

    async def agrees():
        for position in range(picture.position, len(stage.journal)):
            picture.handle(position + 1, stage.journal[position])
        page, status = Pages(picture).cluster(now()), await stage.status()
        nodes = {node.node: str(node.state) for node in status.nodes}
        tasks = {view.spec.name: (str(view.state), len(view.members), view.paused) for view in status.tasks}
        shown = {line.name: (line.state, line.workers, line.paused) for line in page.tasks}
        return {name: square.state for name, square in page.nodes.items()} == nodes and shown == tasks

    await stage.running(task("one", max_workers=4))
    await stage.running(task("two", max_workers=2))
    await stage.until(agrees)
    stage.kill("one-1", "two-1")
    await stage.until(lambda: {each.task for each in stage.of(TaskRecovered) if each.epoch} == {"one", "two"})
    await stage.until(agrees)
    await stage.client.drain("node-2")
    await stage.client.pause("two")
    await stage.until(agrees)
    await stage.lose_power("node-1")
    await stage.until(lambda: stage.of(FailureDetected, node="node-1", severity=1))
    await stage.until(agrees)
    stage.boot("node-1")
    await stage.client.drain("node-2", drain=False)
    await stage.client.pause("two", pause=False)
    await stage.rest()
    await stage.until(agrees)
    assert set(picture.failures) == {each.correlation for each in stage.of(FailureDetected)}

    async def over():
        return await agrees() and all(Pages(picture).failure(each, now()).line.over for each in picture.failures)

    await stage.until(over)
    for page in (Pages(picture).failure(chain, now()) for chain in picture.failures):
        assert sum(page.seconds.values()) == pytest.approx(page.line.cost_s)
        assert page.line.cost_s > 0
