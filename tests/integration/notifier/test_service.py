"""The notifier as a process on a real bus, with a real web server: nothing is lost, and nothing doubled, by kills."""

import asyncio
import contextlib
import json
import subprocess
import sys
import time

import pytest
from helpers.cli import unicron
from helpers.notifier import changed, lost, running
from helpers.receiver import Receiver
from helpers.registry import connected, eventually, facts
from helpers.worlds import LEASE_TTL_S
from msgspec.structs import replace

from unicron import codec, subjects
from unicron.aio import insist
from unicron.contracts.notices import IncidentAcknowledged, NotificationDecided, NotificationSent
from unicron.errors import InvalidInputError

CHANNEL = """
[channel.{name}]
kind = "json"
url = "{url}"
timeout_s = 50
give_up_s = 0.2
"""


class Place:
    """A bus, a receiver and a file; `notifier` runs the service on them."""

    def __init__(self, world, receiver, folder):
        self.world, self.receiver, self.file = world, receiver, folder / "notify.toml"
        self.count = 0

    def write(self, *channels, more="", **urls):
        """Have each of these channels told at its own path, or at an address."""
        urls |= {name: f"{self.receiver.url}/{name}" for name in channels}
        text = "".join(CHANNEL.format(name=name, url=url) for name, url in urls.items())
        self.file.write_text(f"{text}\n[rule.all]\nchannels = {json.dumps(list(urls))}\nwait_s = 0.3\n{more}")

    @contextlib.contextmanager
    def notifier(self):
        flags = {
            "--nats-url": self.world.settings.nats_url,
            "--lease-ttl-s": str(LEASE_TTL_S),
            "--notify": str(self.file),
        }
        words = [word for pair in flags.items() for word in pair]
        process = subprocess.Popen(
            [sys.executable, "-m", "unicron_notifier", *words], stderr=subprocess.PIPE, text=True
        )
        try:
            yield process
        finally:
            process.kill()
            sys.stdout.write(process.communicate()[1])  # pytest shows it where the test fails

    async def ready(self, client):
        await eventually(client.notifications, lambda view: view.channels)

    async def say(self, client, *said, chain):
        for each in said:
            self.count += 1
            fact = replace(
                each, id=f"{chain}.{self.count}", source=each.source or "detector", at=time.time(), correlation=chain
            )
            subject, data = subjects.of(fact), codec.encode(fact)
            await insist(
                lambda subject=subject, data=data, fact=fact: client.bus.append(subject, data, fact.id), "saying"
            )

    async def lose(self, client, node):
        """Lose a node with two workers."""
        await self.say(client, running(f"on-{node}", node, node), chain=f"before-{node}")
        await self.say(client, lost(node), changed(f"on-{node}", "recovering"), chain=node)

    async def ops(self):
        return self.receiver.at("/ops")

    async def heard(self, path, count):
        async def ask():
            return self.receiver.at(path)

        return await eventually(ask, lambda got: len(got) >= count)


@pytest.fixture
def place(private_world, tmp_path):
    with Receiver() as receiver:
        yield Place(private_world, receiver, tmp_path)


async def test_over_a_kill_nothing_is_lost_and_what_is_doubled_has_the_same_id(place):
    place.write("ops")
    receiver = place.receiver
    async with connected(place.world) as client:
        with place.notifier() as process:
            await place.ready(client)
            await place.lose(client, "n1")
            await eventually(lambda: facts(client, NotificationSent), lambda sent: len(sent) == 1)
            receiver.manners["/ops"] = "hang"
            await place.lose(client, "n2")
            await place.heard("/ops", 2)
            process.kill()  # it has sent it, and can't know whether it was taken
        await place.lose(client, "n3")  # while nobody is there
        receiver.manners.clear()
        with place.notifier() as process:
            await eventually(lambda: facts(client, NotificationSent), lambda sent: len(sent) == 3)
            process.kill()
        with place.notifier():
            await place.lose(client, "n4")
            await eventually(lambda: facts(client, NotificationSent), lambda sent: len(sent) == 4)
        keys = [each.headers["Idempotency-Key"] for each in receiver.at("/ops")]
        assert keys == ["n1.1.ops", "n2.1.ops", "n2.1.ops", "n3.1.ops", "n4.1.ops"]
        sent = await facts(client, NotificationSent)
        assert [each.delivery for each in sent] == ["n1.1.ops", "n2.1.ops", "n3.1.ops", "n4.1.ops"]
        assert [each.correlation for each in sent] == ["n1", "n2", "n3", "n4"]
        assert [each.incident for each in await facts(client, NotificationDecided)] == ["n1", "n2", "n3", "n4"]


async def test_who_acknowledges_is_told_to_all_and_by_a_fact(place):
    place.write("ops", "boss", more='escalate = {after_min = 0.02, channels = ["boss"]}\nseverity = [1]')
    place.file.write_text(place.file.read_text().replace('channels = ["ops", "boss"]', 'channels = ["ops"]', 1))
    url = place.world.settings.nats_url
    async with connected(place.world) as client:
        with place.notifier():
            await place.ready(client)
            await place.lose(client, "n1")
            [call] = await place.heard("/boss", 1)
            assert call.body["phase"] == "escalated"
            # by the notifier's clock: on a busy machine the first one may arrive late
            assert call.body["decided"] - place.receiver.at("/ops")[0].body["decided"] > 1.0
            text = await asyncio.to_thread(unicron, "notify", "ack", "n1", "--by", "ada", url=url)
            assert text.startswith("ada sees to n1: n1 is lost")
            for path in ("/ops", "/boss"):
                assert (await place.heard(path, 2))[-1].body["by"] == "ada"
            [acknowledged] = await facts(client, IncidentAcknowledged)
            assert (acknowledged.incident, acknowledged.by) == ("n1", "ada")
            shown = await asyncio.to_thread(unicron, "notify", "status", url=url)
            assert "seen to by ada" in shown
            assert "ops: nothing to deliver" in shown
            with pytest.raises(InvalidInputError, match="there is no incident 'n7'; going on are n1"):
                await client.acknowledge("n7", "ada")
