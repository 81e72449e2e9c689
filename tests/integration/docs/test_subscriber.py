import ast
import asyncio
import contextlib
import sys

import pytest
from helpers import ROOT
from helpers.buses import say

from unicron.contracts.events import FailureDetected, NodeGone, PlanDecided
from unicron.contracts.failures import Severity
from unicron.contracts.plans import Plan, TaskShare
from unicron.contracts.tasks import SlotRef

SCRIPT = ROOT / "examples" / "subscriber.py"


def failure(number):
    what = {"severity": Severity.SEV2, "method": "process_supervision", "status": "exited_abnormally"}
    where = {"task": "gpt", "node": "node-1", "worker": f"w{number}", "reason": "killed by signal 9"}
    return FailureDetected(id=f"f{number}", at=1.0, source="detector", **what, **where)


def plan(number):
    share = TaskShare(task="gpt", slots=[SlotRef(node="node-1", slot=0), SlotRef(node="node-1", slot=1)])
    found = Plan(number=number, trigger="node_lost:node-3", workers=4, shares=[share])
    return PlanDecided(id=f"p{number}", at=2.0, source="planner", plan=found)


async def publish(world, *messages):
    bus = await world.connect()
    for message in messages:
        await say(bus, message)


@contextlib.asynccontextmanager
async def subscriber(url):
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(SCRIPT), url, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )

    async def next_line():
        line = await process.stdout.readline()
        if not line:
            pytest.fail((await process.stderr.read()).decode())
        return line.decode().split(" ", 1)[1].rstrip()

    try:
        yield next_line
    finally:
        process.kill()
        await process.wait()


def test_it_needs_nothing_of_unicron():
    found = set()
    for node in ast.walk(ast.parse(SCRIPT.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module.partition(".")[0])
    assert found - set(sys.stdlib_module_names) == {"nats", "msgpack"}


async def test_it_prints_past_and_new_failures_and_plans_and_nothing_else(nats_world):
    gone = NodeGone(id="n1", at=1.0, source="registry", node="node-9")
    await publish(nats_world, failure(1), gone, plan(1))
    async with subscriber(nats_world.settings.nats_url) as next_line:
        assert await next_line() == "FAILURE sev2 exited_abnormally gpt w1 node-1: killed by signal 9"
        assert await next_line() == "PLAN 1 after node_lost:node-3: gpt 2 of 4 slots"
        await publish(nats_world, plan(2))
        assert (await next_line()).startswith("PLAN 2 ")


async def test_it_goes_on_after_a_restart_of_the_server(private_world, private_server):
    await publish(private_world, failure(1))
    async with subscriber(private_server.url) as next_line:
        assert " w1 " in await next_line()
        private_server.restart()
        await publish(private_world, failure(2))
        assert " w2 " in await next_line()
