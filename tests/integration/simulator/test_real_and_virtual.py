"""The same history of faults on a real cluster and in virtual time: the same plans come of it."""

import asyncio
import itertools
import signal

import msgspec
import pytest
from helpers.training import TRAIN, running_cluster, task, write_script
from unicron_simulator.storms import faults, storm
from unicron_simulator.storms.links import Weather
from unicron_simulator.storms.scene import Scene

from unicron.contracts.events import FailureDetected, NodeGone, PlanDecided, WorkerReady
from unicron.contracts.tasks import TaskState

pytestmark = [
    pytest.mark.slow,
    pytest.mark.exhaustive("storms have what virtual time shows, and real clusters what it can not"),
]

LONG = 1_000_000
SLOWLY = TRAIN.replace("            session.backward(", "            time.sleep(0.05)\n            session.backward(")
LAST = "task_removed:a"

HISTORY = [
    "task_submitted:a",
    "task_submitted:b",
    "node_lost:node-2",
    "node_joined:node-2",
    "node_drained:node-1",
    "node_undrained:node-1",
    "node_left:node-3",
    "node_joined:node-3",
    LAST,
]
"""What decides on a plan, in this order; a worker is killed in between, which decides on none."""


def specs(script):
    tables = {"a": {1: 1e12, 2: 1.9e12, 3: 2.5e12}, "b": {1: 1.2e12, 2: 2.3e12}}
    return {
        name: task(script, name, throughput=table, max_workers=len(table), iterations=LONG)
        for name, table in tables.items()
    }


def plans(journal):
    """Return each plan that was decided on, from the first task on: why, for how many slots, and who gets which."""
    decided = itertools.accumulate(
        (message.plan for message in journal if isinstance(message, PlanDecided)),
        lambda before, plan: plan.whole(before),
    )
    told = [
        (plan.trigger, plan.workers, {share.task: [str(slot) for slot in share.slots] for share in plan.shares})
        for plan in decided
    ]
    return told[[trigger for trigger, _, _ in told].index(HISTORY[0]) :]


def in_virtual_time(tasks):
    history = [
        faults.Submit(at=5, task=tasks["b"]),
        faults.LosePower(at=15, node="node-2", back_s=10, noticed=True),
        faults.Drain(at=35, node="node-1", for_s=10),
        faults.LeaveNode(at=55, node="node-3", back_s=10),
        faults.StrikeWorker(at=75, pick=0, how="kill"),
        faults.Remove(at=85, task="a"),
    ]
    slots = {f"node-{number}": 1 for number in (1, 2, 3)}
    scene = Scene(seed=1, slots=slots, tasks=[tasks["a"]], standbys=[], weather=Weather(), faults=history)
    world = storm.play(scene)
    assert not world.invariants.violation
    return plans(world.invariants.messages)


class Real:
    """Does the same to a real cluster, each thing when the one before has been coped with."""

    def __init__(self, scene):
        self.scene = scene

    async def planned(self, trigger):
        """Wait for the plan, and until all its tasks compute as it says."""
        await self.scene.until(lambda: [m for m in self.scene.of(PlanDecided) if m.plan.trigger == HISTORY[0]])
        # of those since then alone: nodes have joined before
        decided = await self.scene.until(lambda: [each for each in plans(self.scene.journal) if each[0] == trigger])
        *_, (_, _, slots) = decided
        wanted = {task: sorted(given) for task, given in slots.items() if given}

        async def agreed():
            return await self.found() == wanted

        await self.scene.until(agreed)

    async def found(self):
        views = (await self.scene.client.status()).tasks
        return {
            view.spec.name: sorted(f"{member.node}:{member.slot}" for member in view.members)
            for view in views
            if view.state is TaskState.RUNNING
        }

    async def live_through(self, tasks):
        client, cluster = self.scene.client, self.scene.cluster
        for name, spec in tasks.items():
            await client.submit(spec)
            await self.planned(f"task_submitted:{name}")
        cluster.kill_node("node-2")
        await self.planned("node_lost:node-2")
        await asyncio.to_thread(cluster.start_process, "node-2")
        await self.planned("node_joined:node-2")
        for drain, word in ((True, "drained"), (False, "undrained")):
            await client.drain("node-1", drain=drain)
            await self.planned(f"node_{word}:node-1")
        cluster.processes["node-3"].signal(signal.SIGINT)
        await self.scene.until(lambda: self.scene.of(NodeGone, node="node-3"))
        await self.planned("node_left:node-3")
        while cluster.processes["node-3"].alive():
            await asyncio.sleep(0.05)
        await asyncio.to_thread(cluster.start_process, "node-3")
        await self.planned("node_joined:node-3")
        await self.kill_a_worker()
        await client.remove("a")
        await self.planned(LAST)

    async def kill_a_worker(self):
        victim = next(view for view in (await self.scene.client.status()).tasks if view.spec.name == "a").members[0]
        ready = len(self.scene.of(WorkerReady, task="a"))
        await self.scene.client.inject(victim.node, "kill-worker", victim.worker)
        await self.scene.until(lambda: self.scene.of(FailureDetected, worker=victim.worker))
        await self.scene.until(lambda: len(self.scene.of(WorkerReady, task="a")) > ready)


async def test_the_same_history_ends_in_the_same_plans(tmp_path):
    tasks = specs(write_script(tmp_path, SLOWLY))
    virtual = await asyncio.to_thread(in_virtual_time, tasks)
    assert [trigger for trigger, _, _ in virtual] == HISTORY
    async with running_cluster(tmp_path) as scene:
        await Real(scene).live_through(tasks)
        real = plans(scene.journal)
    assert msgspec.json.encode(real) == msgspec.json.encode(virtual)
