"""The registry as a process of its own, on a real server."""

import signal
import time

from helpers.buses import say
from helpers.registry import SPEC, connected, eventually, facts, registry
from helpers.shell import let_go

from unicron.contracts.events import NodeAdmitted, NodeJoined, TaskSubmitted
from unicron.contracts.tasks import Slot, TaskState


def joined(node):
    fields = {"id": f"test-{node}", "at": time.time(), "source": node}
    return NodeJoined(node=node, incarnation="a", host="127.0.0.1", slots=[Slot(index=0)], **fields)


async def test_it_keeps_its_picture_over_a_kill_and_says_everything_once(private_world):
    async with connected(private_world) as client:
        with registry(private_world) as process:
            await eventually(client.status, lambda status: True)
            await say(client.bus, joined("node-1"))
            await eventually(client.status, lambda status: [view.node for view in status.nodes] == ["node-1"])
            assert "submitted" in await client.submit(SPEC)
            assert "nothing changed" in await client.submit(SPEC)
            process.send_signal(signal.SIGKILL)
            process.wait()
            await let_go(client.bus, "registry")
            await say(client.bus, joined("node-2"))
        with registry(private_world):
            status = await eventually(client.status, lambda status: len(status.nodes) == 2)
        assert [(view.spec, view.state) for view in status.tasks] == [(SPEC, TaskState.WAITING)]
        assert [fact.node for fact in await facts(client, NodeAdmitted)] == ["node-1", "node-2"]
        assert [fact.spec for fact in await facts(client, TaskSubmitted)] == [SPEC]
