"""`python -m unicron.service.health OWNER` finds services that work and others; and how long nodes beat."""

import asyncio
import sys

from helpers.waiting import until

from unicron import codec, subjects
from unicron.bus import topology
from unicron.contracts.events import NodeHeartbeat, NodeJoined
from unicron.service.bootstrap import connected
from unicron.settings import Settings


async def ask(url: str, *words: str) -> tuple[int, str]:
    patience = ("--nats-url", url, "--connect-timeout-s", "20")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "unicron.service.health", words[0], *patience, *words[1:], stderr=asyncio.subprocess.PIPE
    )
    _, error = await process.communicate()
    return process.returncode, error.decode()


async def healthy(*words):
    return await ask(*words) == (0, "")


async def provision(server):
    async with connected(Settings(nats_url=server.url), "test") as bus:
        await topology.provision(bus.jetstream, lease_ttl_s=60)


async def test_a_node_is_healthy_while_its_agent_reaches_the_bus(private_server, tmp_path):
    run_dir, key = tmp_path / "run", ("node-1", "--run-dir", str(tmp_path / "run"))
    code, error = await ask(private_server.url, *key)
    assert code == 1
    assert "its agent has sent the bus nothing" in error
    await provision(private_server)
    words = ("-m", "unicron_agent", "--node", "node-1", "--slots", "1", "--run-dir", str(run_dir))
    agent = await asyncio.create_subprocess_exec(sys.executable, *words, "--nats-url", private_server.url)
    try:
        await until(lambda: healthy(private_server.url, *key))
    finally:
        agent.kill()
        await agent.wait()


async def test_without_a_bus_nothing_is_healthy(private_server):
    url = private_server.url
    private_server.stop()
    code, error = await ask(url, "registry", "--connect-timeout-s", "1")
    assert code == 1
    assert url in error
    assert error.count("\n") == 1


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
        beats = bus.receive_telemetry(subjects.events(NodeHeartbeat))
        while (beat := codec.decode_message((await anext(beats)).data)).incarnation == first:
            pass
        assert beat.node == "n1"
    finally:
        agent.kill()
        await agent.wait()
