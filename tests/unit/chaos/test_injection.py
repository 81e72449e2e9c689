"""Fault scripts and storms with the registry, in virtual time; the agent is a stand-in that notes what it is asked."""

import asyncio
import contextlib
import functools
import inspect
import time
from pathlib import Path

import msgspec
import pytest
from helpers.accounts import finished
from helpers.waiting import elapse, in_virtual_time, insist, until
from helpers.worlds import LEASE_TTL_S
from unicron_chaos import injection
from unicron_chaos.injection import inject, run_script
from unicron_chaos.script import RankTarget, parse
from unicron_chaos.storm import Storm, rage, troubles
from unicron_registry.main import RegistrySettings, wiring

from unicron import codec, subjects
from unicron.client import Client
from unicron.contracts.answers import NodeView, Reply, RunningSettings, Status
from unicron.contracts.events import TaskStateChanged
from unicron.contracts.tasks import Member, NodeState, TaskSpec, TaskState
from unicron.errors import InvalidInputError
from unicron.service.service import Service

SPEC = TaskSpec(name="gpt", command=["train.py"], max_workers=2, iterations=50)


def script(*faults):
    line = "- {{at: {{task: gpt, iteration: {}}}, fault: {}, target: {}}}"
    return parse("\n".join(line.format(*fault) for fault in faults), Path("faults.yaml"))


class ScriptedTask:
    """A task whose life the test tells."""

    def __init__(self, client):
        self.client, self.asked, self.refusal, self._count = client, [], "", 0

    async def changes(self, state, *workers):
        self._count += 1
        members = [Member(worker=worker, node="node-1", slot=slot) for slot, worker in enumerate(workers)]
        said = {"id": f"c{self._count}", "at": time.time(), "source": "transition"}
        change = TaskStateChanged(**said, task="gpt", state=state, epoch=0, members=members)
        await self.client.bus.append(subjects.for_message(change), codec.encode(change), change.id)
        await self.shows(lambda view: view.state == state)

    def plays(self, *faults, start_node=None, say=lambda _: None):
        return asyncio.ensure_future(run_script(self.client, script(*faults), start_node, say))

    async def shows(self, holds):
        """Wait until what the registry tells of the task holds."""

        async def found():
            return holds((await self.client.status()).tasks[0])

        await until(found)

    async def finishes(self, iteration):
        done = finished(iteration, "w0", "node-1", source="node-1")
        await self.client.bus.publish_telemetry(subjects.for_message(done), codec.encode(done))

    async def inject(self, data):
        query = codec.decode_query(data)
        self.asked.append((query.fault, query.worker))
        return codec.encode(Reply(text="done", error=self.refusal))

    async def has_been_asked(self, count):
        await until(lambda: len(self.asked) >= count)


@contextlib.asynccontextmanager
async def staged(world):
    registry = Service(wiring(RegistrySettings()), await world.connect(), world.clock, LEASE_TTL_S)
    service = asyncio.create_task(registry.run())
    scene = ScriptedTask(Client(await world.connect()))
    await (await world.connect()).serve(subjects.orders("node-1"), "agent-node-1", scene.inject)
    await insist(lambda: scene.client.submit(SPEC))
    yield scene
    service.cancel()
    await asyncio.wait({service})


def on_stage(test):
    """Give a test its `scene`, in virtual time."""

    async def run(world, **fixtures):
        async with staged(world) as scene:
            await test(scene, **fixtures)

    functools.update_wrapper(run, test)
    scene, *fixtures = inspect.signature(test).parameters.values()
    run.__signature__ = inspect.Signature([scene.replace(name="world"), *fixtures])
    return in_virtual_time(run)


@on_stage
async def test_each_fault_strikes_when_its_iteration_is_computed(scene):
    restarted, seen = [], []

    async def restart(node):
        restarted.append(node)

    faults = [(4, "kill-worker", "{task: gpt, rank: 1}"), (4, "kill-node", "{node: node-1}")]
    faults += [(2, "raise", "{task: gpt, rank: 0}"), (9, "restart-node", "{node: node-2}")]
    await scene.changes(TaskState.RUNNING, "w0", "w1")
    run = scene.plays(*faults, start_node=restart, say=seen.append)
    await scene.finishes(0)
    await elapse(injection.TARGET_S / 2)
    assert scene.asked == []
    await scene.finishes(1)
    await scene.has_been_asked(1)
    await scene.finishes(3)
    await scene.has_been_asked(3)
    assert scene.asked == [("raise", "w0"), ("kill-worker", "w1"), ("kill-node", "")]
    assert not run.done()
    await scene.finishes(8)
    await run
    assert restarted == ["node-2"]
    assert [(made.fault, made.target, made.node, made.worker) for made in seen] == [
        ("raise", "gpt:0", "node-1", "w0"),
        ("kill-worker", "gpt:1", "node-1", "w1"),
        ("kill-node", "node-1", "node-1", ""),
        ("restart-node", "node-2", "node-2", ""),
    ]
    assert [made.at for made in seen] == sorted(made.at for made in seen)


@on_stage
async def test_progress_that_telemetry_did_not_tell_comes_from_the_registry(scene):
    await scene.changes(TaskState.RUNNING, "w0")
    await scene.finishes(5)
    await scene.shows(lambda view: view.iteration == 5)
    await scene.plays((6, "stop-worker", "{task: gpt, rank: 0}"))
    assert scene.asked == [("stop-worker", "w0")]


@on_stage
async def test_a_fault_waits_for_a_rank_that_is_just_being_replaced(scene):
    await scene.changes(TaskState.RECOVERING, "w0")
    await scene.finishes(5)
    run = scene.plays((1, "kill-worker", "{task: gpt, rank: 1}"))
    await elapse(injection.TARGET_S / 2)
    assert scene.asked == []
    await scene.changes(TaskState.RUNNING, "w0", "w2")
    await run
    assert scene.asked == [("kill-worker", "w2")]


@on_stage
async def test_a_target_that_never_comes_is_named(scene):
    await scene.changes(TaskState.RUNNING, "w0")
    with pytest.raises(InvalidInputError, match="no rank 7 in task gpt"):
        await scene.plays((0, "kill-worker", "{task: gpt, rank: 7}"))


@on_stage
async def test_nobody_waits_for_a_target_whose_task_is_over(scene):
    await scene.changes(TaskState.RUNNING, "w0")
    await scene.finishes(5)
    await scene.changes(TaskState.FINISHED)
    began = asyncio.get_running_loop().time()
    with pytest.raises(InvalidInputError, match="no rank 1 in task gpt, which is finished"):
        await scene.plays((1, "kill-worker", "{task: gpt, rank: 1}"))
    waited_s = asyncio.get_running_loop().time() - began  # in virtual time
    assert waited_s < injection.TARGET_S


@on_stage
async def test_a_task_that_nobody_submits_is_named(scene):
    faults = [msgspec.structs.replace(fault, task="none") for fault in script((0, "raise", "{task: gpt, rank: 0}"))]
    with pytest.raises(InvalidInputError, match="no task 'none' was submitted"):
        await run_script(scene.client, faults, None, lambda _: None)


@pytest.mark.parametrize("end", [TaskState.FINISHED, TaskState.FAILED])
@on_stage
async def test_nobody_waits_for_an_iteration_that_can_not_come(scene, end):
    await scene.changes(TaskState.RUNNING, "w0")
    run = scene.plays((70, "kill-worker", "{task: gpt, rank: 0}"))
    await scene.changes(end)
    with pytest.raises(InvalidInputError, match=f"gpt is {end} and did not reach iteration 70 for kill-worker gpt:0"):
        await run


@on_stage
async def test_a_script_that_nobody_can_finish_does_not_begin(scene):
    await scene.changes(TaskState.RUNNING, "w0")
    with pytest.raises(InvalidInputError, match=r"fault 2, restart-node node-1: .*--dir.*docker start"):
        await scene.plays((0, "kill-node", "{node: node-1}"), (0, "restart-node", "{node: node-1}"))
    with pytest.raises(InvalidInputError, match="--dir"):
        await inject(scene.client, "restart-node", "node-1")
    assert scene.asked == []


LOGLESS, CALM = {"UNICRON_CHAOS": "True", "UNICRON_KERNEL_LOG": ""}, {"UNICRON_CHAOS": "False"}
FOLLOWS_NONE = "fault 1, ecc .*: node-1 follows no kernel's log; start its agent with"


@pytest.mark.parametrize(
    ("one", "other", "of_node", "of_rank"),
    [
        (LOGLESS, CALM, FOLLOWS_NONE, FOLLOWS_NONE),
        (LOGLESS, {}, FOLLOWS_NONE, ""),
        (CALM, CALM, "node-1 injects no faults; start", "node-1 injects no faults; start"),
        ({}, LOGLESS, "", ""),
    ],
)
async def test_what_agents_say_that_they_refuse_is_known_before_anything_strikes(one, other, of_node, of_rank):
    class Nodes:
        async def status(self):
            return Status(nodes=[NodeView(node=f"node-{at}", state=NodeState.UP, since=1.0) for at in (1, 2)])

        async def settings(self, node):
            return RunningSettings(settings=one if node == "node-1" else other)

    for target, says in (("{node: node-1}", of_node), ("{task: gpt, rank: 0}", of_rank)):
        with pytest.raises(InvalidInputError, match=says) if says else contextlib.nullcontext():
            await injection._check(Nodes(), script((0, "ecc", target)), None)


@on_stage
async def test_a_storm_strikes_workers_only_and_says_what_could_not_be_done(scene):
    await scene.changes(TaskState.RUNNING, "w0", "w1")
    made = []
    async with contextlib.aclosing(rage(scene.client, Storm(1, nodes=False), 600.0, 1.5, None)) as raging:
        async for each in raging:
            made.append(each)
            if {each.worker for each in made} >= {"w0", "w1"}:
                break
    assert [(each.fault, each.worker) for each in made] == scene.asked
    assert {each.worker for each in made} == {"w0", "w1"}
    scene.refusal = "start it with UNICRON_CHAOS=true"
    async with contextlib.aclosing(rage(scene.client, Storm(1, nodes=False), 600.0, 1.5, None)) as raging:
        refused = [await anext(raging) for _ in range(5)]
    assert {str(each) for each in refused} == {scene.refusal}


@on_stage
async def test_a_storm_is_over_when_its_nodes_are_back_and_tasks_run(scene):
    await scene.changes(TaskState.RUNNING, "w0")
    assert await troubles(scene.client, set()) == []
    await scene.changes(TaskState.WAITING)
    assert await troubles(scene.client, set()) == ["gpt is waiting: "]


@on_stage
async def test_the_name_of_a_process_means_the_rank_that_it_has(scene):
    await scene.changes(TaskState.RUNNING, "w0", "w2")
    made = await inject(scene.client, "kill-worker", "w2")
    assert (made.target, made.worker, scene.asked) == ("gpt:1", "w2", [("kill-worker", "w2")])
    with pytest.raises(InvalidInputError, match="takes TASK:RANK, not w1"):
        await inject(scene.client, "kill-worker", "w1")


@on_stage
async def test_a_refusal_of_the_agent_is_told(scene):
    async def refuse(data):
        return codec.encode(Reply(error="start it with UNICRON_CHAOS=true"))

    await scene.changes(TaskState.RUNNING, "w0")
    await scene.client.bus.serve(subjects.orders("node-2"), "agent-node-2", refuse)
    with pytest.raises(InvalidInputError, match="UNICRON_CHAOS"):
        await inject(scene.client, "kill-node", "node-2")
    with pytest.raises(InvalidInputError, match="no fault 'flood'"):
        await scene.client.inject("node-2", "flood")
    with pytest.raises(InvalidInputError, match="takes TASK:RANK"):
        await inject(scene.client, "raise", "node-1")
    with pytest.raises(InvalidInputError, match=r"no node .node2.; the known ones are none"):
        await inject(scene.client, "kill-node", "node2")
    with pytest.raises(InvalidInputError, match="takes NODE"):
        await inject(scene.client, "kill-node", RankTarget(task="gpt", rank=0))
