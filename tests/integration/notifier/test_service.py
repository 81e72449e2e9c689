"""The notifier as a process on a real bus, with a real web server: nothing is lost, and nothing doubled, by kills."""

import asyncio
import contextlib
import json
import subprocess
import sys
import time

import pytest
from helpers.cli import unicron
from helpers.notifier import changed, lost, recovered, running
from helpers.receiver import Receiver
from helpers.registry import connected, eventually, facts
from helpers.training import running_cluster, task, write_script
from helpers.worlds import LEASE_TTL_S
from msgspec.structs import replace

from unicron import codec, subjects
from unicron.aio import insist
from unicron.contracts.events import Alert
from unicron.contracts.notices import IncidentAcknowledged, NotificationDecided, NotificationFailed, NotificationSent
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


async def test_bad_receivers_cost_no_other_one_its_deliveries_and_are_told_of_once(place):
    receiver = place.receiver
    receiver.manners = {"/hanging": "hang", "/garbage": "garbage", "/away": f"{receiver.url}/elsewhere", "/full": 503}
    place.write("hanging", "garbage", "away", "full", "ops", refusing="http://127.0.0.1:9")
    async with connected(place.world) as client:
        with place.notifier():
            await place.ready(client)
            await place.lose(client, "n1")
            request, *_ = await place.heard("/ops", 1)  # what is said of the channels may be there already
            assert request.body["title"] == "n1 is lost: 2 workers of 1 task (on-n1)"
            assert request.headers["Idempotency-Key"] == "n1.1.ops"
            await place.say(client, recovered("on-n1"), chain="elsewhere")
            await eventually(lambda: facts(client, Alert), lambda found: len(found) >= 4)
            # and that a channel is broken; the alerts come together or one by one, and before or after the end
            await eventually(place.ops, lambda got: any(each.body["phase"] == "over" for each in got))
            await eventually(place.ops, lambda got: any(each.body["title"].startswith("channel ") for each in got))
            broken = {each.text.split()[1] for each in await facts(client, Alert)}
            assert broken == {"garbage", "away", "full", "refusing"}, "one hangs still"
            assert len(await facts(client, Alert)) == 4
            away = [each for each in await facts(client, NotificationFailed) if each.channel == "away"]
            assert all("a redirect, which is not followed" in each.reason for each in away)
            assert receiver.at("/elsewhere") == []
            pages = [each.body for each in receiver.at("/ops")]
            of_node = [each for each in pages if not each["title"].startswith("channel ")]
            assert [(each["title"], each["phase"]) for each in of_node] == [
                (request.body["title"], phase) for phase in ("opened", "over")
            ]
            view = await client.notifications()
            assert {each.name for each in view.channels if each.broken} == broken


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


async def test_the_heartbeat_beats_as_long_as_the_journal_answers(place, private_server):
    receiver = place.receiver
    place.write("ops", more=f'[heartbeat]\nurl = "{receiver.url}/alive"\nevery_s = 0.2\n')
    with place.notifier():
        beats = await place.heard("/alive", 3)
        assert {each.method for each in beats} == {"GET"}
        await asyncio.to_thread(private_server.stop)

        async def beats_in_2_s():  # some may be under way still
            before = len(receiver.at("/alive"))
            await asyncio.sleep(2.0)
            return len(receiver.at("/alive")) - before

        await eventually(beats_in_2_s, lambda count: count == 0)
        before = len(receiver.at("/alive"))
        await asyncio.to_thread(private_server.start)
        await place.heard("/alive", before + 2)


@pytest.mark.slow
async def test_a_node_that_dies_under_two_tasks_is_one_page_and_one_end(tmp_path, monkeypatch, place):
    place.write("ops")
    monkeypatch.setenv("UNICRON_NOTIFY", str(place.file))
    async with running_cluster(tmp_path, nodes=3, slots=2) as scene:
        script = write_script(tmp_path)
        for name in ("one", "two"):
            await scene.client.submit(task(script, name, iterations=100_000, max_workers=3, env={"PACE": "0.05"}))
        for name in ("one", "two"):
            await scene.until(lambda name=name: [m for m in scene.iterations if m.task == name and m.world_size == 3])
        by_node = {}
        for name in ("one", "two"):
            for member in (await scene.view(name)).members:
                by_node.setdefault(member.node, set()).add(name)
        victim = next(node for node, tasks in by_node.items() if len(tasks) == 2)
        await asyncio.to_thread(scene.cluster.kill_node, victim)
        await scene.until(lambda: [m for m in scene.of(NotificationSent) if m.incident])
        ends = await eventually(place.ops, lambda got: any(each.body["phase"] == "over" for each in got))
        bodies = [each.body for each in ends]
        assert {each["incident"] for each in bodies} == {bodies[0]["incident"]}, "one cause"
        assert [each["phase"] for each in bodies] in (["opened", "over"], ["opened", "updated", "over"], ["over"])
        last = bodies[-1]
        assert last["title"] == f"{victim} is lost: 2 workers of 2 tasks ({', '.join(last['tasks'])})"
        assert set(last["tasks"]) == {"one", "two"}
        assert 0 < last["ended"] - last["began"] < 60
        assert last["lost_worker_s"] > 0
        chain = [m for m in scene.journal if m.correlation == last["chain"]]
        assert {type(m).__name__ for m in chain} >= {"FailureDetected", "NotificationDecided", "NotificationSent"}
        for name in ("one", "two"):
            await scene.client.remove(name)
