"""The planner as a service, in virtual time: facts in the journal, plans out, over restarts."""

import asyncio
import contextlib
import math
import sys
import time

import pytest
from helpers.planner import STEEPER, admitted, iteration, lost, sizes, submitted
from helpers.waiting import in_virtual_time, until
from helpers.worlds import LEASE_TTL_S
from msgspec.structs import replace
from unicron_planner.main import PlannerSettings, wiring

from unicron import codec, subjects
from unicron.contracts.events import Alert, DeadLetter, PlanDecided
from unicron.contracts.queries import GetPlan, GetStatus, Reply
from unicron.said import OF_SERVICES
from unicron.service import Service

NOW = time.time()


@contextlib.asynccontextmanager
async def running(world):
    service = Service(wiring(PlannerSettings()), await world.connect(), world.clock, LEASE_TTL_S)
    task = asyncio.create_task(service.run())
    try:
        yield
    finally:
        task.cancel()
        for outcome in await asyncio.gather(task, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome


def from_source(message, number):
    speaker = OF_SERVICES.get(type(message)) or message.node
    return replace(message, id=f"fact-{number}", at=NOW + number, source=speaker)


async def feed(bus, *messages, start):
    for number, message in enumerate(messages, start):
        fact = from_source(message, number)
        await bus.append(subjects.of(fact), codec.encode(fact), fact.id)


async def found(bus, kind, wanted):
    """Return the first message of `kind` in the journal that is `wanted`."""
    async with contextlib.aclosing(bus.follow(subjects.events(kind), 0)) as entries:
        async for entry in entries:
            message = codec.decode_message(entry.data)
            if wanted(message):
                return message
    raise AssertionError


async def asked(bus, wanted, query=None):
    """Ask the planner until its reply is `wanted`."""

    async def answer():
        reply = codec.decode(await bus.ask(subjects.rpc("planner"), codec.encode(query or GetPlan()), 5.0), Reply)
        return wanted(reply) and reply

    return await until(answer)


@in_virtual_time
async def test_a_lost_node_is_answered_from_the_table_and_a_restart_goes_on_where_it_was(world):
    bus = await world.connect()
    tasks = (submitted("a", throughput=STEEPER), submitted("b", weight=2.0, throughput=STEEPER))
    async with running(world):
        await feed(bus, *(admitted(f"n{number}") for number in (1, 2, 3)), *tasks, start=0)
        whole = await found(bus, PlanDecided, lambda message: message.plan.trigger == "task_submitted:b")
        assert sizes(whole.plan) == {"a": 2, "b": 4}
        view = (await asked(bus, lambda reply: reply.plan and reply.plan.table)).plan
        assert view.plan == whole.plan
        rows = {row.event: row.changes for row in view.table}
        assert next(changes for event, changes in rows.items() if "n2" in event.split(":")[-1].split(",")) == {
            "a": 1,
            "b": 3,
        }
        reply = await asked(bus, lambda reply: reply.error, GetStatus())
        assert "GetPlan" in reply.error

        await feed(bus, lost("n2"), start=10)
        plan = await found(bus, PlanDecided, lambda message: message.plan.trigger == "node_lost:n2")
        assert (plan.plan.prepared, sizes(plan.plan)) == (True, {"a": 1, "b": 3})
        assert (plan.source, plan.correlation) == ("planner", "fact-10")

    async with running(world):
        await feed(bus, admitted("n2", incarnation="2"), start=20)
        back = await found(bus, PlanDecided, lambda message: message.plan.trigger == "node_joined:n2")
        assert sizes(back.plan) == sizes(whole.plan)
        assert back.plan.number == plan.plan.number + 1
        assert back.correlation == "fact-20", "a plan that waited for more nodes is of the chain of the first"


@in_virtual_time
async def test_a_task_that_cannot_be_weighed_is_put_aside_and_the_planner_lives_on(world):
    bus = await world.connect()
    async with running(world):
        await feed(bus, admitted("n1"), submitted("bad", weight=math.nan), submitted("good"), start=0)
        letter = await found(bus, DeadLetter, lambda _: True)
        assert "weight" in letter.error
        assert "weight" in (await found(bus, Alert, lambda _: True)).text
        plan = await found(bus, PlanDecided, lambda message: "good" in sizes(message.plan))
        assert sizes(plan.plan) == {"good": 2}


@in_virtual_time
async def test_measured_iterations_reach_the_table(world):
    bus = await world.connect()
    curve = {1: 1.0, 2: 1.8, 3: 2.4, 4: 2.7}
    tasks = (submitted("a", throughput=curve, flops=2.4), submitted("b", throughput=curve, flops=2.4))
    async with running(world):
        await feed(bus, *(admitted(f"n{number}") for number in (1, 2, 3)), *tasks, start=0)
        decided = await found(bus, PlanDecided, lambda message: sizes(message.plan) == {"a": 3, "b": 3})
        first = {share.task: share.slots[0] for share in decided.plan.shares}

        async def measure():
            for number in range(10_000):
                for task, seconds in (("a", 1.0), ("b", 0.1)):
                    done = from_source(iteration(task, 3, seconds, number=number, slot=first[task]), number)
                    await bus.tell(subjects.of(done), codec.encode(done))
                await asyncio.sleep(0.01)

        def learned(reply):
            rows = {row.event: row.changes for row in reply.plan.table}
            return rows.get("node_lost:n1,n2,n3") == {"a": 0, "b": 4}

        telling = asyncio.create_task(measure())
        try:
            await asked(bus, learned)
        finally:
            telling.cancel()


@pytest.mark.parametrize("flag", ["--transition-s=-1", "--nats-url=nats://127.0.0.1:9"])
async def test_the_process_says_what_is_wrong_and_ends(flag):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "unicron_planner", flag, "--connect-timeout-s=0.5", stderr=asyncio.subprocess.PIPE
    )
    _, stderr = await process.communicate()
    assert process.returncode == 1
    name = "UNICRON_TRANSITION_S" if "transition" in flag else "127.0.0.1:9"
    assert name in stderr.decode().splitlines()[-1]
