"""The registry as a process of its own, on a real server."""

import signal
import time

import msgspec
from helpers.registry import SPEC, connected, eventually, facts, registry
from helpers.shell import let_go

from unicron import codec, subjects
from unicron.contracts.events import NodeAdmitted, NodeJoined, TaskSubmitted
from unicron.contracts.tasks import Slot, TaskState


async def say(client, message, number):
    message = msgspec.structs.replace(message, id=f"test-{number}", at=time.time())
    await client.bus.append(subjects.of(message), codec.encode(message), message.id)


def joined(node):
    return NodeJoined(node=node, source=node, incarnation="a", host="127.0.0.1", slots=[Slot(index=0)])


async def test_it_keeps_its_picture_over_a_kill_and_says_everything_once(private_world):
    async with connected(private_world) as client:
        with registry(private_world) as process:
            await eventually(client.status, lambda status: True)
            await say(client, joined("node-1"), 1)
            await eventually(client.status, lambda status: [view.node for view in status.nodes] == ["node-1"])
            assert "submitted" in await client.submit(SPEC)
            assert "nothing changed" in await client.submit(SPEC)
            process.send_signal(signal.SIGKILL)
            process.wait()
            await let_go(client.bus, "registry")
            await say(client, joined("node-2"), 2)
        with registry(private_world):
            status = await eventually(client.status, lambda status: len(status.nodes) == 2)
        assert [(view.spec, view.state) for view in status.tasks] == [(SPEC, TaskState.WAITING)]
        assert [fact.node for fact in await facts(client, NodeAdmitted)] == ["node-1", "node-2"]
        assert [fact.spec for fact in await facts(client, TaskSubmitted)] == [SPEC]
