"""The times of an agent's ticks, in virtual time: as rare as its heartbeats where there is nothing else to do."""

import asyncio

from helpers.waiting import elapse, in_virtual_time
from unicron_agent.agent import Agent
from unicron_agent.core import AgentCore
from unicron_agent.outbox import Outbox
from unicron_agent.stimuli import Adopted, Reconnected, Tick, WorkerMessage, WorkerProcess

from unicron.contracts.events import NodeHeartbeat, NodeJoined, WorkerStalled
from unicron.contracts.tasks import Slot
from unicron.contracts.worker import Hello, Pong

CARD = NodeJoined(node="n1", incarnation="", host="h", slots=[Slot(index=1)], rendezvous="h:1")


class Ticking:
    """An agent that ticks, and when it did."""

    def __init__(self, world, *found):
        self.ticks, self.beats = [], []
        outbox = Outbox(world.memory.connect(), world.clock, "n1", "b")
        self.agent = Agent(AgentCore(CARD, "b"), None, outbox, lambda _: None, self._look)
        self.agent.observe = lambda fact: self.beats.append(self._now()) if isinstance(fact, NodeHeartbeat) else None
        self.agent.handle(Adopted(list(found)))

    def _now(self):
        return round(asyncio.get_running_loop().time(), 3)

    def _look(self):
        self.ticks.append(self._now())
        return Tick()

    async def during(self, seconds, say=None, every_s=1e5):
        """Let it tick, and its worker say something meanwhile; return when it has ticked."""
        self.ticks, ticking = [], asyncio.create_task(self.agent._tick())
        for _ in range(max(1, round(seconds / every_s))):
            await elapse(min(every_s, seconds))
            if say:
                self.agent.handle(WorkerMessage("gpt-1", say))
        ticking.cancel()
        return self.ticks


@in_virtual_time
async def test_without_workers_each_tick_is_one_for_a_heartbeat(world):
    node = Ticking(world)
    await elapse(0.23)
    assert await node.during(2.5) == node.beats == [0.23, 0.5, 1.0, 1.5, 2.0, 2.5]


@in_virtual_time
async def test_a_worker_that_says_something_all_the_time_is_looked_at_more_rarely_than_one_that_is_quiet(world):
    node = Ticking(world, WorkerProcess(worker="gpt-1", task="gpt", slot=1, pid=41, correlation="c"))
    node.agent.handle(WorkerMessage("gpt-1", Hello(worker="gpt-1", pid=41)))
    busy = len(await node.during(3.0, Pong(), every_s=0.05))
    quiet = len(await node.during(3.0))
    assert busy <= 16
    assert quiet >= 28


@in_virtual_time
async def test_a_node_that_joins_again_beats_at_once(world):
    node = Ticking(world)
    ticking = asyncio.create_task(node.agent._tick())
    await elapse(0.7)
    node.agent.handle(Reconnected())
    await elapse(0.1)
    assert node.beats == [0.0, 0.5, 0.7]
    ticking.cancel()


@in_virtual_time
async def test_while_a_node_stood_still_no_worker_of_it_was_silent(world):
    node, stalls = Ticking(world, WorkerProcess(worker="gpt-1", task="gpt", slot=1, pid=41, correlation="c")), []
    node.agent.observe = lambda fact: stalls.append(fact) if isinstance(fact, WorkerStalled) else None
    node.agent.handle(WorkerMessage("gpt-1", Hello(worker="gpt-1", pid=41)))
    ticking = asyncio.create_task(node.agent._tick())
    await elapse(0.3)
    before = node.agent.now()
    world.clock.advance(5000.0)  # longer than any limit; nothing of this process ran
    await elapse(0.3)
    assert node.agent.now() - before < 2.0
    assert stalls == []
    ticking.cancel()
