"""The notifier as a process on a real bus, with a real web server, and the commands of who is told."""

import asyncio
import time

import pytest
from helpers.buses import say
from helpers.cli import unicron
from helpers.notifier import changed, lost, running
from helpers.receiver import Receiver
from helpers.registry import connected, eventually, process_of
from msgspec.structs import replace

RULES = """
[channel.ops]
kind = "json"
url = "{url}/ops"

[rule.all]
channels = ["ops"]
wait_s = 0.3
"""


@pytest.fixture
def receiver(private_world, tmp_path):
    """Whom a notifier tells."""
    file = tmp_path / "notify.toml"
    with Receiver() as receiver:
        file.write_text(RULES.format(url=receiver.url))
        with process_of("notifier", private_world, "--notify", str(file)):
            yield receiver


async def test_a_lost_node_is_told_and_whoever_says_so_sees_to_it(private_world, receiver):
    url = private_world.settings.nats_url

    async def heard(count):
        async def got():
            return receiver.at("/ops")

        return (await eventually(got, lambda requests: len(requests) >= count))[-1].body

    async with connected(private_world) as client:
        await eventually(client.notifications, lambda view: view.channels)
        for number, each in enumerate((running("gpt", "n1", "n1"), lost("n1"), changed("gpt", "recovering"))):
            named = {"id": f"n1.{number}", "source": each.source or "detector", "correlation": "n1"}
            await say(client.bus, replace(each, at=time.time(), **named))
        assert (await heard(1))["phase"] == "opened"
        text = await asyncio.to_thread(unicron, "notify", "ack", "n1", "--by", "ada", url=url)
        assert text.startswith("ada sees to n1: n1 is lost")
        assert (await heard(2))["by"] == "ada"
        shown = await asyncio.to_thread(unicron, "notify", "status", url=url)
        assert "seen to by ada" in shown
        assert "ops: nothing to deliver" in shown
