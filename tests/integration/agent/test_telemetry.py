"""An agent's heartbeats do not wait for the journal."""

import asyncio
import sys

from unicron import codec, subjects
from unicron.bus import topology
from unicron.contracts.events import NodeHeartbeat, NodeJoined


async def test_an_agent_beats_on_while_the_journal_takes_nothing(private_server, private_world, tmp_path):
    bus = await private_world.connect()
    flags = ["--node", "n1", "--slots", "1", "--run-dir", str(tmp_path / "run"), "--nats-url", private_server.url]
    agent = await asyncio.create_subprocess_exec(sys.executable, "-m", "unicron_agent", *flags)
    try:
        entry = await anext(bus.follow(subjects.events(NodeJoined), 0))
        first = codec.decode_message(entry.data).incarnation
        await bus.jetstream.delete_stream(topology.STREAM)
        await asyncio.to_thread(private_server.stop)
        await asyncio.to_thread(private_server.start)  # the agent joins again, and nobody takes that down
        beats = bus.hear(subjects.events(NodeHeartbeat))
        while (beat := codec.decode_message((await anext(beats)).data)).incarnation == first:
            pass
        assert beat.node == "n1"
    finally:
        agent.kill()
        await agent.wait()
